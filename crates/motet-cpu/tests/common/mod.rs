//! Runs a tiny model's prompts through a stage, the way an engine would, and reads the expected values.

#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used, reason = "each test uses its part")]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_gguf::{Format, ModelFile};
use motet_model::batch::{
    Ask, Batch, BatchLimits, Commit, InFlight, MAX_POOLS, NO_PAGE, RECENT, Sampling, Segment, Slot, StateOp,
    Want,
};
use motet_model::{Device, KvFormat, Limits, Network, Observer, PAGE, Split, Stage};

/// A file of the repository's fixtures.
pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

/// A tiny model, as F32 or as the twin in another format.
pub fn tiny(name: &str, format: Format) -> ModelFile {
    let path = fixture(&format!("tiny/tiny-{name}-f32.gguf"));
    let file = ModelFile::open(&path).unwrap();
    match format {
        Format::F32 => file,
        other => ModelFile::from_vec(motet_gguf::twin(&file, other).unwrap()).unwrap(),
    }
}

/// A plain array of numpy's format: shape and bytes.
fn npy(name: &str) -> (Vec<usize>, Vec<u8>) {
    let path = fixture(&format!("expected/{name}.npy"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let header_len = u16::from_le_bytes([bytes[8], bytes[9]]) as usize;
    let header = std::str::from_utf8(&bytes[10..10 + header_len]).unwrap();
    let shape = header.split("'shape': (").nth(1).unwrap().split(')').next().unwrap();
    let shape = shape.split(',').filter_map(|n| n.trim().parse().ok()).collect();
    (shape, bytes[10 + header_len..].to_vec())
}

/// Expected floats, row by row.
pub fn expected(name: &str) -> Vec<Vec<f32>> {
    let (shape, bytes) = npy(name);
    let floats: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    floats.chunks_exact(shape[1]).map(<[f32]>::to_vec).collect()
}

/// The ids of a prompt.
pub fn prompt(name: &str) -> Vec<u32> {
    let (_, bytes) = npy(&format!("prompt.{name}.ids"));
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// How a model is run.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    pub isa: Isa,
    pub threads: usize,
    pub kv: KvFormat,
    /// Rows of a step.
    pub chunk: usize,
}

/// Drafts to a segment.
pub const DRAFTS: usize = 4;

/// Several conversations on one stage.
pub struct Bench {
    pub stage: Box<dyn Stage>,
    pub work: InFlight,
    /// By session: whose first pages are also its own, and how many.
    pub shares: Vec<(usize, usize)>,
    /// The tokens that the last step's answers named.
    pub answers: Vec<u32>,
    /// Whether steps feed the draft head with all their rows, or only where they must.
    pub eager: bool,
    /// By session: the positions that the draft head was fed with.
    fed: Vec<usize>,
    windows: Vec<Option<u32>>,
    pages_each: usize,
    seen: Arc<Mutex<Seen>>,
}

/// What an observer saw.
#[derive(Default)]
struct Seen {
    logits: Vec<Vec<f32>>,
    drafts: Vec<(usize, Vec<f32>)>,
}

struct Collector(Arc<Mutex<Seen>>);

impl Observer for Collector {
    fn logits(&mut self, _: u32, logits: &[f32]) {
        self.0.lock().unwrap().logits.push(logits.to_vec());
    }

    fn draft_logits(&mut self, segment: usize, depth: usize, logits: &[f32]) {
        let mut seen = self.0.lock().unwrap();
        assert_eq!(seen.drafts.iter().filter(|(of, _)| *of == segment).count(), depth, "depths in order");
        seen.drafts.push((segment, logits.to_vec()));
    }
}

/// The token with the greatest logit.
pub const GREEDY: Sampling = Sampling {
    seed: 0,
    choice: 0,
    temperature: 0.0,
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

/// What a session was given: the drafts and the logits that they were chosen from.
#[derive(Debug, Clone, PartialEq)]
pub struct Drafted {
    pub tokens: Vec<u32>,
    pub logits: Vec<Vec<f32>>,
}

impl Bench {
    pub fn new(file: &ModelFile, way: Way, sessions: usize, context: usize) -> Self {
        Self::with(false, file, way, sessions, context)
    }

    /// With the network's draft head, or without.
    pub fn with(draft_head: bool, file: &ModelFile, way: Way, sessions: usize, context: usize) -> Self {
        let network = Network::from_gguf(file).unwrap();
        let limits = limits(&network, draft_head, way, sessions, context);
        let device = CpuDevice::new(CpuOptions { threads: way.threads, isa: way.isa });
        let mut stage = device.prepare(&network, file, &Split::whole(&network), &limits).unwrap().remove(0);
        let seen = Arc::new(Mutex::new(Seen::default()));
        stage.observe(Some(Box::new(Collector(Arc::clone(&seen)))));
        for (pool, &pages) in limits.pages.iter().enumerate() {
            (0..pages).for_each(|page| stage.poison(pool, page as u32));
        }
        Self {
            stage,
            work: InFlight::with_capacity(&limits.batch, network.d_model),
            shares: vec![(0, 0); sessions],
            answers: Vec::new(),
            eager: true,
            fed: vec![0; sessions],
            windows: network.state(draft_head).pools.iter().map(|p| p.window).collect(),
            pages_each: context.div_ceil(PAGE),
            seen,
        }
    }

    /// Adds rows `from..to` of a session's tokens to the next step; all rows are asked for.
    pub fn add(&mut self, session: usize, tokens: &[u32], from: usize, to: usize) {
        self.add_as(Commit::All, session, tokens, from, to);
    }

    /// As [`Bench::add`]; rows to verify wait for a commit.
    pub fn add_as(&mut self, commit: Commit, session: usize, tokens: &[u32], from: usize, to: usize) {
        let slot = Slot(session as u32);
        if from == 0 {
            self.work.batch.before.push(StateOp::Clear { slot });
        }
        let tables = self.lay(session, from, to);
        let batch = &mut self.work.batch;
        for (pool, table) in tables.iter().enumerate().take(self.windows.len()) {
            for page in from.div_ceil(PAGE)..to.div_ceil(PAGE) {
                let page = batch.pages[table.start as usize + page];
                batch.before.push(StateOp::ZeroPage { pool: pool as u32, page });
            }
        }
        let first_row = batch.tokens.len() as u32;
        batch.tokens.extend_from_slice(&tokens[from..to]);
        let rows = first_row..batch.tokens.len() as u32;
        for (i, row) in rows.clone().enumerate() {
            let target = tokens.get(from + i + 1).copied().unwrap_or(0);
            batch.asks.push(Ask { row, want: Want::Score { target }, top: 0, logprob: true, digest: true });
        }
        // What a page holds is complete when the page is full, and the last rows only are remembered.
        let fed = self.fed[session].min(from);
        let must = to.is_multiple_of(PAGE) || to - fed >= RECENT - 1 - DRAFTS;
        let feed = (self.eager || must).then(|| behind(batch, &tokens[fed..from]));
        self.fed[session] = if feed.is_some() { to } else { fed };
        batch.segments.push(Segment { slot, first_position: from as u32, rows, tables, commit, feed });
    }

    /// A session takes over another's first positions.
    pub fn take_over(&mut self, session: usize, of: usize, positions: usize) {
        self.shares[session] = (of, positions / PAGE);
        self.fed[session] = positions;
    }

    /// The page tables of a session that is about to run rows `from..to`.
    fn lay(&mut self, session: usize, from: usize, to: usize) -> [Range<u32>; MAX_POOLS] {
        let pages = &mut self.work.batch.pages;
        let mut tables = [const { 0..0 }; MAX_POOLS];
        for (window, table) in self.windows.iter().zip(&mut tables) {
            let start = pages.len() as u32;
            for page in 0..to.div_ceil(PAGE) {
                // Pages lie backwards, and those that no row sees any more are absent.
                let (other, shared) = self.shares[session];
                let owner = if page < shared { other } else { session };
                let id = (owner * self.pages_each + self.pages_each - 1 - page) as u32;
                let gone = window.is_some_and(|w| ((page + 1) * PAGE + w as usize) <= from + 1);
                pages.push(if gone { NO_PAGE } else { id });
            }
            *table = start..pages.len() as u32;
        }
        tables
    }

    /// Runs what was added; the logits of its rows, in order.
    pub fn step(&mut self) -> Vec<Vec<f32>> {
        self.stage.step(&mut self.work).unwrap();
        assert!(self.work.faults.is_empty(), "rows that are not finite");
        self.answers.clear();
        self.answers.extend(self.work.answers.iter().map(|a| a.token));
        self.work.clear();
        std::mem::take(&mut self.seen.lock().unwrap().logits)
    }

    /// Adds a wish for drafts behind a session's tokens, of which the last has not been run.
    pub fn wish(&mut self, session: usize, tokens: &[u32], drafts: usize, sampling: Sampling) {
        let from = tokens.len() - 1;
        let tables = self.lay(session, from, from + drafts);
        let batch = &mut self.work.batch;
        let row = batch.tokens.len() as u32;
        batch.tokens.push(tokens[from]);
        let slot = Slot(session as u32);
        let feed = Some(behind(batch, &tokens[self.fed[session].min(from)..from]));
        batch.segments.push(Segment {
            slot,
            first_position: from as u32,
            rows: row..row + 1,
            tables,
            commit: Commit::All,
            feed,
        });
        self.fed[session] = from + 1;
        batch.asks.push(Ask { row, want: Want::Sample(sampling), top: 0, logprob: false, digest: false });
        batch.drafts.push(drafts as u32);
    }

    /// Drafts what was wished for, wish after wish.
    pub fn draft(&mut self) -> Vec<Drafted> {
        self.stage.draft(&mut self.work).unwrap();
        let mut seen = std::mem::take(&mut self.seen.lock().unwrap().drafts);
        seen.sort_by_key(|(segment, _)| *segment);
        let (mut tokens, mut logits) = (self.work.drafted.iter(), seen.into_iter().map(|(_, logits)| logits));
        let drafts = self.work.batch.drafts.iter().map(|&k| k as usize);
        let all = drafts.map(|k| Drafted {
            tokens: tokens.by_ref().take(k).copied().collect(),
            logits: logits.by_ref().take(k).collect(),
        });
        let all = all.collect();
        assert!(tokens.next().is_none() && logits.next().is_none(), "more drafts than were wished for");
        self.work.clear();
        all
    }
}

/// Lays tokens into a batch that the draft head was not fed with.
fn behind(batch: &mut Batch, tokens: &[u32]) -> Range<u32> {
    let first = batch.behind.len() as u32;
    batch.behind.extend_from_slice(tokens);
    first..batch.behind.len() as u32
}

/// What a stage is sized for.
pub fn limits(network: &Network, draft_head: bool, way: Way, sessions: usize, context: usize) -> Limits {
    let pages_each = context.div_ceil(PAGE);
    Limits {
        batch: BatchLimits {
            rows: way.chunk * sessions,
            segments: sessions,
            pages: sessions * MAX_POOLS * pages_each,
            before: 64,
            asks: way.chunk * sessions,
            seen: 0,
            bias: 0,
            allowed: 0,
            drafts: DRAFTS,
            behind: sessions * RECENT,
        },
        sessions,
        context,
        logit_rows: 16,
        pages: vec![sessions * pages_each; network.state(draft_head).pools.len()],
        checkpoints: 1,
        kv: way.kv,
        draft_head,
    }
}

/// The logits of all positions of a prompt.
pub fn logits(file: &ModelFile, way: Way, ids: &[u32]) -> Vec<Vec<f32>> {
    let mut bench = Bench::new(file, way, 1, ids.len());
    let mut out = Vec::new();
    for from in (0..ids.len()).step_by(way.chunk) {
        bench.add(0, ids, from, (from + way.chunk).min(ids.len()));
        out.extend(bench.step());
    }
    out
}
