//! What follows from a program without running it: state by session, workspace by lifetime, the manifest of weights.
//!
//! Pure functions; devices add the bytes of their own formats.

use crate::batch::MAX_POOLS;
use crate::program::{BufferId, Program, RESIDUAL, StateKind, WeightId};

/// Attention layers of one kind: they share page tables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Keys a row can see; `None`: all before it.
    pub window: Option<u32>,
    /// The layers' states, by index into `Program::states`.
    pub states: Vec<usize>,
}

/// What a session must remember, kind by kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    /// One pool for each kind of attention, full attention first.
    pub pools: Vec<Pool>,
    /// Floats of recurrent state per session.
    pub recurrent_floats: usize,
}

impl StateLayout {
    /// The layout of a program's state.
    ///
    /// # Panics
    /// With more kinds of attention than [`MAX_POOLS`]: no architecture builds such a program.
    pub fn of(program: &Program) -> Self {
        let mut pools: Vec<Pool> = Vec::new();
        let mut recurrent_floats = 0;
        for (i, state) in program.states.iter().enumerate() {
            recurrent_floats += state.kind.recurrent_floats();
            if let StateKind::Kv { window, .. } = state.kind {
                match pools.iter_mut().find(|p| p.window == window) {
                    Some(pool) => pool.states.push(i),
                    None => pools.push(Pool { window, states: vec![i] }),
                }
            }
        }
        pools.sort_by_key(|p| p.window.unwrap_or(0));
        assert!(pools.len() <= MAX_POOLS, "{} kinds of attention", pools.len());
        Self { pools, recurrent_floats }
    }
}

/// Where the buffers of a stage's operations lie, in floats per row: buffers that don't live at the same time
/// share columns.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkspaceLayout {
    /// First column of each buffer; `None` for the residual stream and buffers that no operation touches.
    pub at: Vec<Option<usize>>,
    /// Columns in all.
    pub width: usize,
}

impl WorkspaceLayout {
    /// Places each buffer of `ops` (indices into `program.ops`) into the first gap that is free from its first to
    /// its last use, wide buffers first. Columns are multiples of 16 floats.
    pub fn of(program: &Program, ops: &[usize]) -> Self {
        struct Life {
            buffer: usize,
            width: usize,
            first: usize,
            last: usize,
        }
        let mut lives: Vec<Life> = Vec::new();
        for (time, &op) in ops.iter().enumerate() {
            let t = program.ops[op].1.touches();
            for id in t.reads.iter().chain(&t.writes).filter(|&&b| b != RESIDUAL) {
                match lives.iter_mut().find(|l| l.buffer == id.0) {
                    Some(life) => life.last = time,
                    None => {
                        let width = program.buffers[id.0].width.next_multiple_of(16);
                        lives.push(Life { buffer: id.0, width, first: time, last: time });
                    }
                }
            }
        }
        lives.sort_by_key(|l| (std::cmp::Reverse(l.width), l.first));
        let mut at = vec![None; program.buffers.len()];
        let mut width = 0;
        for (i, life) in lives.iter().enumerate() {
            let mut taken: Vec<(usize, usize)> = lives[..i]
                .iter()
                .filter(|o| o.first <= life.last && life.first <= o.last)
                .filter_map(|o| at[o.buffer].map(|a: usize| (a, a + o.width)))
                .collect();
            taken.sort_unstable();
            let mut here = 0;
            for (from, to) in taken {
                if from >= here + life.width {
                    break;
                }
                here = here.max(to);
            }
            at[life.buffer] = Some(here);
            width = width.max(here + life.width);
        }
        Self { at, width }
    }

    /// First column of a buffer that an operation of the stage touches.
    pub fn column(&self, buffer: BufferId) -> Option<usize> {
        self.at[buffer.0]
    }
}

/// The weights that `ops` read, each once, in order of first use.
pub fn manifest(program: &Program, ops: &[usize]) -> Vec<WeightId> {
    let mut out = Vec::new();
    let ropes = program.ropes.iter().filter_map(|r| r.factors);
    let by_ops = ops.iter().flat_map(|&op| program.ops[op].1.touches().weights);
    for id in by_ops.chain(ropes) {
        if !out.contains(&id) {
            out.push(id);
        }
    }
    out
}
