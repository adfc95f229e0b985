//! What follows from a program without running it: state by session, workspace by lifetime, the manifest of weights.
//!
//! Pure functions; devices add the bytes of their own formats.

use std::cmp::Reverse;
use std::ops::Range;

use crate::batch::MAX_POOLS;
use crate::program::{BufferId, Op, Program, RESIDUAL, StateKind, WeightId};

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

/// Cuts `ops` (indices into `program.ops`) into runs that a device may execute as one parallel region: operations that
/// look at their own row only, products of the same rows, or one operation of another kind.
pub fn regions(program: &Program, ops: &[usize]) -> Vec<Range<usize>> {
    let belongs = |before: &Op, op: &Op| match (before, op) {
        (Op::Linear { x: a, .. }, Op::Linear { x: b, .. }) => a == b,
        _ => before.is_row_wise() && op.is_row_wise(),
    };
    let mut regions: Vec<Range<usize>> = Vec::new();
    for i in 0..ops.len() {
        match regions.last_mut() {
            Some(last) if belongs(&program.ops[ops[i - 1]].1, &program.ops[ops[i]].1) => last.end = i + 1,
            _ => regions.push(i..i + 1),
        }
    }
    regions
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
    /// Places each buffer of `ops` (indices into `program.ops`) into the first gap that is free whenever it is alive,
    /// wide buffers first. Columns are multiples of 16 floats. A region (see [`regions`]) is one moment: all that its
    /// operations touch is alive together.
    pub fn of(program: &Program, ops: &[usize]) -> Self {
        let regions = regions(program, ops);
        let of_buffer = |id: usize| (id, lives(program, ops, &regions, BufferId(id)));
        let mut buffers: Vec<(usize, Vec<Range<usize>>)> =
            (0..program.buffers.len()).map(of_buffer).collect();
        buffers.retain(|(id, lives)| BufferId(*id) != RESIDUAL && !lives.is_empty());
        let room = |id: usize| program.buffers[id].width.next_multiple_of(16);
        buffers.sort_by_key(|(id, lives)| (Reverse(room(*id)), lives[0].start));
        let mut at: Vec<Option<usize>> = vec![None; program.buffers.len()];
        let mut width = 0;
        for (i, (id, lives)) in buffers.iter().enumerate() {
            let together = |other: &[Range<usize>]| {
                lives.iter().any(|a| other.iter().any(|b| a.start < b.end && b.start < a.end))
            };
            let mut taken: Vec<Range<usize>> = buffers[..i]
                .iter()
                .filter(|(_, other)| together(other))
                .filter_map(|(o, _)| at[*o].map(|from| from..from + room(*o)))
                .collect();
            taken.sort_unstable_by_key(|t| t.start);
            let mut here = 0;
            for t in taken {
                if t.start >= here + room(*id) {
                    break;
                }
                here = here.max(t.end);
            }
            at[*id] = Some(here);
            width = width.max(here + room(*id));
        }
        Self { at, width }
    }

    /// First column of a buffer that an operation of the stage touches.
    pub fn column(&self, buffer: BufferId) -> Option<usize> {
        self.at[buffer.0]
    }
}

/// When a buffer holds something that will be read, in regions: from its first write to its last read. An operation
/// that writes it without reading it, after it was read, begins a new life: layers share buffers, not what is in them.
fn lives(program: &Program, ops: &[usize], regions: &[Range<usize>], buffer: BufferId) -> Vec<Range<usize>> {
    let mut lives: Vec<Range<usize>> = Vec::new();
    let mut was_read = true;
    let timed = regions.iter().enumerate().flat_map(|(time, ops)| ops.clone().map(move |i| (time, i)));
    for (time, i) in timed {
        let t = program.ops[ops[i]].1.touches();
        let (reads, writes) = (t.reads.contains(&buffer), t.writes.contains(&buffer));
        if !reads && !writes {
            continue;
        }
        match lives.last_mut() {
            Some(life) if reads || !was_read => life.end = time + 1,
            _ => lives.push(time..time + 1),
        }
        was_read = reads;
    }
    lives
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
