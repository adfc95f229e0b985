//! Runs a tiny model's prompts through a stage, the way an engine would, and reads the expected values.

#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used, reason = "each test uses its part")]

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_gguf::{Format, ModelFile};
use motet_model::batch::{
    Ask, BatchLimits, Commit, InFlight, MAX_POOLS, NO_PAGE, Segment, Slot, StateOp, Want,
};
use motet_model::{Device, KvFormat, Limits, Network, Observer, PAGE, Stage};

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
    pools: usize,
    windows: Vec<Option<u32>>,
    pages_each: usize,
    seen: Arc<Mutex<Vec<Vec<f32>>>>,
}

struct Collector(Arc<Mutex<Vec<Vec<f32>>>>);

impl Observer for Collector {
    fn logits(&mut self, _: u32, logits: &[f32]) {
        self.0.lock().unwrap().push(logits.to_vec());
    }
}

impl Bench {
    pub fn new(file: &ModelFile, way: Way, sessions: usize, context: usize) -> Self {
        let network = Network::from_gguf(file).unwrap();
        let state = network.state(false);
        let pages_each = context.div_ceil(PAGE);
        let batch = BatchLimits {
            rows: way.chunk * sessions,
            segments: sessions,
            pages: sessions * MAX_POOLS * pages_each,
            before: 64,
            asks: way.chunk * sessions,
            seen: 0,
            bias: 0,
            drafts: DRAFTS,
        };
        let limits = Limits {
            batch,
            sessions,
            context,
            logit_rows: 16,
            pages: vec![sessions * pages_each; state.pools.len()],
            checkpoints: 1,
            kv: way.kv,
            draft_head: false,
        };
        let device = CpuDevice::new(CpuOptions { threads: way.threads, isa: way.isa });
        let mut stage = device.prepare(&network, file, 0..network.layers, &limits).unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        stage.observe(Some(Box::new(Collector(Arc::clone(&seen)))));
        for pool in 0..state.pools.len() {
            (0..sessions * pages_each).for_each(|page| stage.poison(pool, page as u32));
        }
        Self {
            stage,
            work: InFlight::with_capacity(&batch, network.d_model),
            pools: state.pools.len(),
            windows: state.pools.iter().map(|p| p.window).collect(),
            pages_each,
            seen,
        }
    }

    /// Adds rows `from..to` of a session's tokens to the next step; all rows are asked for.
    pub fn add(&mut self, session: usize, tokens: &[u32], from: usize, to: usize) {
        self.add_as(Commit::All, session, tokens, from, to);
    }

    /// As [`Bench::add`]; rows to verify wait for a commit.
    pub fn add_as(&mut self, commit: Commit, session: usize, tokens: &[u32], from: usize, to: usize) {
        let batch = &mut self.work.batch;
        let first_row = batch.tokens.len() as u32;
        let slot = Slot(session as u32);
        if from == 0 {
            batch.before.push(StateOp::Clear { slot });
        }
        let mut tables = [const { 0..0 }; MAX_POOLS];
        for (pool, table) in tables.iter_mut().enumerate().take(self.pools) {
            let start = batch.pages.len() as u32;
            for page in 0..to.div_ceil(PAGE) {
                // Pages lie backwards, and those that no row sees any more are absent.
                let id = (session * self.pages_each + self.pages_each - 1 - page) as u32;
                let gone = self.windows[pool].is_some_and(|w| ((page + 1) * PAGE + w as usize) <= from + 1);
                batch.pages.push(if gone { NO_PAGE } else { id });
                if page * PAGE >= from && page * PAGE < to {
                    batch.before.push(StateOp::ZeroPage { pool: pool as u32, page: id });
                }
            }
            *table = start..batch.pages.len() as u32;
        }
        batch.tokens.extend_from_slice(&tokens[from..to]);
        let rows = first_row..batch.tokens.len() as u32;
        for (i, row) in rows.clone().enumerate() {
            let target = tokens.get(from + i + 1).copied().unwrap_or(0);
            batch.asks.push(Ask { row, want: Want::Score { target }, top: 0, logprob: true, digest: true });
        }
        batch.segments.push(Segment { slot, first_position: from as u32, rows, tables, commit });
    }

    /// Runs what was added; the logits of its rows, in order.
    pub fn step(&mut self) -> Vec<Vec<f32>> {
        self.stage.step(&mut self.work).unwrap();
        assert!(self.work.faults.is_empty(), "rows that are not finite");
        self.work.clear();
        std::mem::take(&mut self.seen.lock().unwrap())
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
