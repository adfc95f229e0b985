//! What verify rows leave behind until they are committed: the inputs of every recurrence, row by row.
//!
//! A segment's first row is certain: in the step the state moves past it. The drafts behind it run on a copy of the
//! state. A commit moves the state past those that are kept, from this record alone and with the arithmetic of the step:
//! the bits are those of a step that had only these rows. Nothing of the network runs again.

use bytemuck::{cast_slice, cast_slice_mut};
use motet_model::batch::{Batch, Commit, Slot};
use motet_model::device::{DeviceError, Limits};
use motet_model::program::{Op, Program, StateId, StateKind};

use super::shared::Shared;
use super::{CpuStage, Machine, panicked};
use crate::arena::Arena;
use crate::rows::Rows;
use crate::rows::convolution;
use crate::rows::gated_delta::{self, DeltaInputs};
use crate::shared_rows::RowsMut;

/// Where a row's record holds the inputs of each recurrence of a stage.
#[derive(Debug, Clone, Default)]
pub(crate) struct RollBackLayout {
    recurrences: Vec<Recurrence>,
    /// Floats of a row's record.
    width: usize,
    /// Rows of a slot's record: as many drafts as a segment may bring.
    drafts: usize,
    /// Slots.
    slots: usize,
}

/// One recurrence of the stage.
#[derive(Debug, Clone, Copy)]
struct Recurrence {
    state: StateId,
    /// First column of its inputs.
    at: usize,
    inputs: Inputs,
}

/// What a row's inputs are, one behind the other.
#[derive(Debug, Clone, Copy)]
enum Inputs {
    /// `[channels]`, for a state of `kept` rows.
    Convolution { kept: usize, channels: usize },
    /// See [`DeltaColumns`].
    Delta(DeltaColumns),
}

/// Keys `[key_heads, key_dim]`, values `[heads, value_dim]`, decays `[heads]` and step sizes `[heads]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaColumns {
    pub(super) key_heads: usize,
    pub(super) key_dim: usize,
    pub(super) heads: usize,
    pub(super) value_dim: usize,
}

impl DeltaColumns {
    pub(super) fn key(self, head: usize) -> usize {
        head * self.key_dim
    }

    pub(super) fn value(self, head: usize) -> usize {
        self.key(self.key_heads) + head * self.value_dim
    }

    pub(super) fn alpha(self, head: usize) -> usize {
        self.value(self.heads) + head
    }

    pub(super) fn beta(self, head: usize) -> usize {
        self.alpha(self.heads) + head
    }
}

impl Inputs {
    fn of(program: &Program, op: &Op) -> Option<(StateId, Inputs)> {
        match *op {
            Op::Convolve { state, .. } => match program.states[state.0].kind {
                StateKind::Convolution { kernel, channels } => {
                    Some((state, Inputs::Convolution { kept: kernel - 1, channels }))
                }
                _ => unreachable!("a convolution has its last inputs"),
            },
            Op::Delta { k, v, state, .. } => {
                let (key_heads, key_dim, heads, value_dim) = (k.count, k.dim, v.count, v.dim);
                Some((state, Inputs::Delta(DeltaColumns { key_heads, key_dim, heads, value_dim })))
            }
            _ => None,
        }
    }

    fn width(self) -> usize {
        match self {
            Inputs::Convolution { channels, .. } => channels,
            Inputs::Delta(columns) => columns.beta(columns.heads),
        }
    }

    /// Parts of a commit that threads may share.
    fn parts(self) -> usize {
        match self {
            Inputs::Convolution { .. } => 1,
            Inputs::Delta(DeltaColumns { heads, .. }) => heads,
        }
    }
}

impl RollBackLayout {
    /// The record of a stage that runs `ops`.
    pub(crate) fn of(program: &Program, ops: &[usize], limits: &Limits) -> Self {
        let mut layout = Self::default();
        for (state, inputs) in ops.iter().filter_map(|&op| Inputs::of(program, &program.ops[op].1)) {
            layout.recurrences.push(Recurrence { state, at: layout.width, inputs });
            layout.width += inputs.width();
        }
        layout.drafts = limits.batch.drafts;
        layout.slots = limits.sessions;
        layout
    }

    /// The same for up to `drafts` drafts to a segment.
    pub(crate) fn with_drafts(&self, drafts: usize) -> Self {
        Self { drafts, ..self.clone() }
    }

    /// Rows of the record.
    fn rows(&self) -> usize {
        self.slots * self.drafts
    }

    pub(crate) fn bytes(&self) -> usize {
        4 * self.width * self.rows()
    }

    /// The greatest state that one thread copies to run drafts on it, in floats; none without drafts.
    pub(crate) fn copied_floats(&self) -> usize {
        let floats = |r: &Recurrence| match r.inputs {
            Inputs::Delta(DeltaColumns { key_dim, value_dim, .. }) => key_dim * value_dim,
            Inputs::Convolution { .. } => 0,
        };
        if self.drafts > 0 { self.recurrences.iter().map(floats).max().unwrap_or(0) } else { 0 }
    }
}

/// The record, slot by slot: between a session's step and its commit others may step.
#[derive(Debug)]
pub(crate) struct RollBack {
    layout: RollBackLayout,
    floats: Arena,
    /// The step's segments, in order.
    segments: Vec<Recorded>,
    /// What of each slot waits for a commit.
    waiting: Vec<Option<Recorded>>,
    /// What a commit keeps; empty between commits.
    kept: Vec<Recorded>,
    /// Parts of a commit of one session: (recurrence, part).
    parts: Vec<(usize, usize)>,
}

/// The drafts of a segment in the record.
#[derive(Debug, Clone, Copy)]
struct Recorded {
    slot: Slot,
    first: usize,
    drafts: usize,
}

impl RollBack {
    pub(crate) fn new(layout: RollBackLayout, limits: &Limits) -> Result<Self, DeviceError> {
        let segments = limits.batch.segments;
        let bytes = layout.bytes();
        let refused =
            |source| DeviceError::Memory { what: "the record of verify rows", bytes: bytes as u64, source };
        let floats = Arena::allocate(bytes).map_err(refused)?;
        let recurrences = layout.recurrences.iter().enumerate();
        let parts = recurrences.flat_map(|(i, r)| (0..r.inputs.parts()).map(move |part| (i, part))).collect();
        let (kept, recorded) = (Vec::with_capacity(segments), Vec::with_capacity(segments));
        Ok(Self { layout, floats, segments: recorded, waiting: vec![None; limits.sessions], kept, parts })
    }

    /// Makes room for a step's drafts, which `CpuStage::check_step` counted. What its sessions left before is forgotten.
    pub(super) fn begin(&mut self, batch: &Batch) {
        self.segments.clear();
        for s in &batch.segments {
            let slot = s.slot.0 as usize;
            let verify = s.commit == Commit::Verify;
            let drafts = if verify { s.rows.len() - 1 } else { 0 };
            let recorded = Recorded { slot: s.slot, first: slot * self.layout.drafts, drafts };
            self.segments.push(recorded);
            self.waiting[slot] = verify.then_some(recorded);
        }
    }

    /// Where the tasks of an operation leave the inputs of its verify rows.
    pub(super) fn recorder(&mut self, state: StateId) -> Recorder<'_> {
        let recurrence = self.layout.recurrences.iter().find(|r| r.state == state);
        let Recurrence { at, inputs, .. } = *recurrence.expect("a recurrence of this stage");
        let (width, rows) = (self.layout.width, self.layout.rows());
        let record = Shared::new(RowsMut::new(
            &mut cast_slice_mut(self.floats.bytes_mut())[..rows * width],
            rows,
            width,
            width,
        ));
        Recorder { record, at, inputs, segments: &self.segments }
    }

    /// Finds the rows that are to be kept.
    fn keep(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
        self.kept.clear();
        for (i, &(slot, rows)) in kept.iter().enumerate() {
            let found = self.waiting.get(slot.0 as usize).and_then(Option::as_ref);
            let had = found.map_or(0, |s| 1 + s.drafts);
            let Some(found) = found.filter(|_| (1..=had).contains(&rows)) else {
                let slot = slot.0;
                return Err(DeviceError::Batch(format!(
                    "{rows} rows to keep in slot {slot}, which has {had} to verify"
                )));
            };
            if kept[..i].iter().any(|other| other.0 == slot) {
                return Err(DeviceError::Batch(format!("slot {} is to be committed twice", slot.0)));
            }
            if rows > 1 {
                self.kept.push(Recorded { drafts: rows - 1, ..*found });
            }
        }
        Ok(())
    }
}

/// Takes down the inputs of one recurrence.
pub(super) struct Recorder<'a> {
    record: Shared<'a>,
    at: usize,
    inputs: Inputs,
    segments: &'a [Recorded],
}

impl Recorder<'_> {
    /// Whether a segment brings drafts, which wait for a commit.
    pub(super) fn wants(&self, segment: usize) -> bool {
        self.segments[segment].drafts > 0
    }

    /// Takes down columns of the rows that a segment's drafts are, at `column` of this recurrence's inputs.
    ///
    /// # Safety
    /// No other task takes down the same columns of the segment.
    pub(super) unsafe fn take_down(&self, segment: usize, column: usize, x: Rows<'_>) {
        let Recorded { first, drafts, .. } = self.segments[segment];
        assert!(x.count() == drafts && column + x.width() <= self.inputs.width(), "{drafts} rows, {column}");
        // SAFETY: the caller's promise; segments have rows of their own.
        let mut record = unsafe { self.record.part(first..first + drafts, self.at + column, x.width()) };
        for row in 0..drafts {
            record.row_mut(row).copy_from_slice(x.row(row));
        }
    }
}

impl CpuStage {
    /// Moves the recurrent states of some slots past the rows that are kept.
    pub(super) fn move_states(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
        self.rollback.keep(kept)?;
        let RollBack { layout, floats, kept: moving, parts, .. } = &self.rollback;
        let Machine { isa, pool, .. } = &mut self.machine;
        let (isa, width) = (*isa, layout.width);
        let record: &[f32] = cast_slice(floats.bytes());
        let (states, state_at) = self.state.recurrent_all();
        let moved = pool.run(moving.len() * parts.len(), |task, _| {
            let (session, (recurrence, part)) = (moving[task / parts.len()], parts[task % parts.len()]);
            let Recurrence { state, at, inputs } = layout.recurrences[recurrence];
            let first = state_at[state.0];
            let columns = |column: usize, columns: usize| {
                Rows::new(&record[session.first * width + at + column..], session.drafts, columns, width)
            };
            match inputs {
                Inputs::Convolution { kept, channels } => {
                    // SAFETY: tasks differ in the session, and so in the slot, or in the recurrence.
                    let mut state = unsafe { states.part(session.slot, first, kept, channels, channels) };
                    convolution::advance(&mut state, columns(0, channels));
                }
                Inputs::Delta(of) => {
                    let DeltaColumns { key_heads, key_dim, value_dim, .. } = of;
                    let first = first + part * key_dim * value_dim;
                    // SAFETY: as above, or in the head.
                    let mut state =
                        unsafe { states.part(session.slot, first, key_dim, value_dim, value_dim) };
                    let inputs = DeltaInputs {
                        k: columns(of.key(part % key_heads), key_dim),
                        v: columns(of.value(part), value_dim),
                        alpha: columns(of.alpha(part), 1),
                        beta: columns(of.beta(part), 1),
                    };
                    gated_delta::advance(isa, inputs, &mut state);
                }
            }
        });
        kept.iter().for_each(|&(slot, _)| self.rollback.waiting[slot.0 as usize] = None);
        moved.map_err(panicked)
    }
}
