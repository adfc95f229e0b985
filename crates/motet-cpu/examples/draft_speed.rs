//! What drafting costs on a stage: steps with and without the draft head, rows to verify, commits, passes of the head.
//!
//! `cargo run --release -p motet-cpu --example draft_speed [MODEL.gguf]`, the built-in model by default. Medians in
//! microseconds, by the number of conversations. The machine's speed drifts: compare figures of one run only.

#![allow(clippy::print_stdout)]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use motet_cpu::{CpuDevice, CpuOptions};
use motet_gguf::ModelFile;
use motet_model::batch::{
    Ask, BatchLimits, Commit, InFlight, MAX_POOLS, Sampling, Segment, Slot, StateOp, Want,
};
use motet_model::{Device, KvFormat, Limits, Network, PAGE, Stage};

const SESSIONS: usize = 8;
const DRAFTS: usize = 3;
const PROMPT: usize = 64;
const ROUNDS: usize = 300;
const CONTEXT: usize = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let built_in = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../assets/motet-demo.gguf");
    let path = std::env::args_os().nth(1).map_or(built_in, PathBuf::from);
    let (mut trunk, mut head) = (Bench::new(&path, false)?, Bench::new(&path, true)?);
    println!("conversations   step   with head   verify 2, 3, 4 rows each   commit 2, 3, 4   passes 1, 2, 3");
    for sessions in [1, 2, 4, 8] {
        let plain = trunk.median(|b| b.step(sessions, 1))?;
        let fed = head.median(|b| b.step(sessions, 1))?;
        let mut verify = [Duration::ZERO; DRAFTS];
        let mut commit = verify;
        let mut passes = verify;
        for drafts in 1..=DRAFTS {
            verify[drafts - 1] = head.median(|b| b.step(sessions, 1 + drafts))?;
            commit[drafts - 1] = head.median(|b| {
                b.step(sessions, 1 + drafts)?;
                b.commit(sessions, 1 + drafts)
            })?;
            passes[drafts - 1] = head.median(|b| b.draft(sessions, drafts))?;
        }
        let list = |all: [Duration; DRAFTS]| all.map(|t| format!("{:.0}", t.as_secs_f64() * 1e6)).join(", ");
        println!(
            "{sessions:>13} {:>6.0} {:>11.0} {:>26} {:>16} {:>16}",
            plain.as_secs_f64() * 1e6,
            fed.as_secs_f64() * 1e6,
            list(verify),
            list(commit),
            list(passes)
        );
    }
    Ok(())
}

struct Bench {
    stage: Box<dyn Stage>,
    work: InFlight,
    pages_each: usize,
}

impl Bench {
    /// Conversations that have all read a prompt.
    fn new(path: &Path, draft_head: bool) -> Result<Self, Box<dyn Error>> {
        let file = ModelFile::open(path)?;
        let network = Network::from_gguf(&file)?;
        let pages_each = CONTEXT.div_ceil(PAGE);
        let batch = BatchLimits {
            rows: SESSIONS * PROMPT,
            segments: SESSIONS,
            pages: SESSIONS * MAX_POOLS * pages_each,
            before: SESSIONS,
            asks: SESSIONS * (1 + DRAFTS),
            seen: 0,
            bias: 0,
            allowed: 0,
            drafts: DRAFTS,
        };
        let limits = Limits {
            batch,
            sessions: SESSIONS,
            context: CONTEXT,
            logit_rows: 16,
            pages: vec![SESSIONS * pages_each; network.state(draft_head).pools.len()],
            checkpoints: 0,
            kv: KvFormat::F16,
            draft_head,
        };
        let device = CpuDevice::new(CpuOptions::from_env()?);
        let stage = device.prepare(&network, &file, 0..network.layers, &limits)?;
        let mut bench = Self { stage, work: InFlight::with_capacity(&batch, network.d_model), pages_each };
        for session in 0..SESSIONS {
            bench.work.batch.before.push(StateOp::Clear { slot: Slot(session as u32) });
            bench.lay(session, 0, PROMPT, Commit::All);
        }
        bench.stage.step(&mut bench.work)?;
        Ok(bench)
    }

    /// Rows of a session; those that are not a prompt are asked for a token.
    fn lay(&mut self, session: usize, first: usize, rows: usize, commit: Commit) {
        let batch = &mut self.work.batch;
        let mut tables = [const { 0..0 }; MAX_POOLS];
        for table in &mut tables {
            let start = batch.pages.len() as u32;
            batch.pages.extend((0..self.pages_each).map(|page| (session * self.pages_each + page) as u32));
            *table = start..batch.pages.len() as u32;
        }
        let row = batch.tokens.len() as u32;
        batch.tokens.extend((0..rows).map(|i| (40 + session + i) as u32));
        let sampling = Sampling {
            seed: 1,
            choice: 0,
            temperature: 0.7,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seen: 0..0,
            bias: 0..0,
            allowed: 0..0,
        };
        let asked = if rows > 1 + DRAFTS { 0 } else { rows as u32 };
        batch.asks.extend((row..row + asked).map(|row| Ask {
            row,
            want: Want::Sample(sampling.clone()),
            top: 0,
            logprob: false,
            digest: false,
        }));
        let rows = row..row + rows as u32;
        batch.segments.push(Segment {
            slot: Slot(session as u32),
            first_position: first as u32,
            rows,
            tables,
            commit,
        });
    }

    /// A step in which each session brings so many rows, always at the same place.
    fn step(&mut self, sessions: usize, rows: usize) -> Result<Duration, Box<dyn Error>> {
        self.work.clear();
        let commit = if rows > 1 { Commit::Verify } else { Commit::All };
        (0..sessions).for_each(|session| self.lay(session, 2 * PROMPT, rows, commit));
        let start = Instant::now();
        self.stage.step(&mut self.work)?;
        Ok(start.elapsed())
    }

    /// All rows of the last step are kept.
    fn commit(&mut self, sessions: usize, rows: usize) -> Result<Duration, Box<dyn Error>> {
        let kept: Vec<_> = (0..sessions).map(|session| (Slot(session as u32), rows)).collect();
        let start = Instant::now();
        self.stage.commit(&kept)?;
        Ok(start.elapsed())
    }

    fn draft(&mut self, sessions: usize, drafts: usize) -> Result<Duration, Box<dyn Error>> {
        self.work.clear();
        (0..sessions).for_each(|session| self.lay(session, 2 * PROMPT, 1, Commit::All));
        self.work.batch.drafts.resize(sessions, drafts as u32);
        let start = Instant::now();
        self.stage.draft(&mut self.work)?;
        Ok(start.elapsed())
    }

    /// The median of many.
    fn median(
        &mut self,
        mut once: impl FnMut(&mut Self) -> Result<Duration, Box<dyn Error>>,
    ) -> Result<Duration, Box<dyn Error>> {
        let mut times = (0..ROUNDS).map(|_| once(self)).collect::<Result<Vec<_>, _>>()?;
        times.sort_unstable();
        Ok(times[ROUNDS / 2])
    }
}
