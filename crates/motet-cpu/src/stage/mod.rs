//! A stage: a range of layers with its weights, workspace and part of every session's state.
//!
//! Here is the order of a step; [`run`] goes through the program's operations, [`answers`] through the questions to the
//! logits.
//! A step allocates nothing. A panic on a compute thread becomes the step's error.

mod answers;
mod experts;
mod products;
mod rollback;
mod row_wise;
mod run;
mod shared;
mod sizes;
mod stateful;

use bytemuck::cast_slice_mut;
use motet_model::batch::{Batch, Commit, InFlight, Slot};
use motet_model::device::{DeviceError, Limits, Observer, Stage};
use motet_model::layout::WorkspaceLayout;
use motet_model::network::Network;
use motet_model::program::{Place as OpPlace, Program, RopeScaling};

use crate::activations::ActivationBlock;
use crate::arena::Arena;
use crate::device::unsupported;
use crate::isa::Isa;
use crate::kv::Segment;
use crate::pool::{Pool, WorkerPanic};
use crate::rows::elementwise::is_finite;
use crate::rows::rope::{Rope, RopeScaling as Scaling};
use crate::session_state::SessionState;
use crate::weights::Loaded;
use crate::workspace::{Buffers, Place};

use rollback::RollBack;
use run::{Region, Run};
pub(crate) use sizes::Sizes;

/// The CPU's stage.
pub(crate) struct CpuStage {
    program: Program,
    /// What is done to all rows.
    layers: Vec<Region>,
    /// What is done to the rows that want logits, before the head.
    output: Vec<Region>,
    /// The head, by index into the program.
    head: Option<usize>,
    d_model: usize,
    limits: Limits,
    layout: WorkspaceLayout,
    sizes: Sizes,
    machine: Machine,
    state: SessionState,
    rollback: RollBack,
    /// The workspace for `capacity` rows.
    workspace: Workspace,
    capacity: usize,
    observer: Option<Box<dyn Observer>>,
}

/// What operations compute with.
pub(crate) struct Machine {
    isa: Isa,
    pool: Pool,
    weights: Vec<Loaded>,
    ropes: Vec<Rope>,
}

/// Memory that does not survive a step.
#[derive(Default)]
pub(crate) struct Workspace {
    places: Vec<Option<Place>>,
    floats: Floats,
    scratch: Scratch,
    /// Rows that want logits, `[logit_rows, d_model]`, and their logits, `[logit_rows, vocab]`.
    asked: Vec<f32>,
    logits: Vec<f32>,
    sampler: Vec<f32>,
}

/// What operations need beside the row buffers.
#[derive(Default)]
pub(crate) struct Scratch {
    /// The rows that the next products take, as int8.
    quantised: Vec<ActivationBlock>,
    /// The cosines and sines of all rows, encoding by encoding: `[rows, table]` each.
    rotations: Vec<f32>,
    attention: Vec<f32>,
    /// The states on which verify rows are run, one to a thread.
    states: Vec<f32>,
    /// The segments of a batch with their pages; empty between operations.
    tables: Vec<Segment<'static>>,
    /// Entries of experts: which there are, and their products before they go to their rows.
    chosen: Vec<u32>,
    entries: Vec<u32>,
    offsets: Vec<u32>,
    experts: Vec<f32>,
}

/// Floats of an anonymous mapping.
#[derive(Default)]
struct Floats(Option<Arena>);

impl Floats {
    fn all(&mut self) -> &mut [f32] {
        self.0.as_mut().map_or(&mut [], |arena| cast_slice_mut(arena.bytes_mut()))
    }
}

impl CpuStage {
    pub(crate) fn new(
        network: &Network,
        ops: Vec<usize>,
        limits: &Limits,
        sizes: Sizes,
        weights: Vec<Loaded>,
        pool: Pool,
        isa: Isa,
    ) -> Result<Self, DeviceError> {
        let program = network.trunk.clone();
        let layout = WorkspaceLayout::of(&program, &ops);
        let is_output = |op: &usize| program.ops[*op].0 == OpPlace::Output;
        let (mut output, layers): (Vec<usize>, Vec<usize>) = ops.into_iter().partition(is_output);
        let head = output.pop();
        let state = SessionState::new(
            sizes.pages.clone(),
            &limits.pages,
            sizes.recurrent_at.clone(),
            sizes.recurrent_floats,
            limits.sessions,
            limits.checkpoints,
        )?;
        let rollback = RollBack::new(sizes.rollback.clone(), limits.batch.segments)?;
        let ropes = program.ropes.iter().map(|r| rope(r, &weights)).collect::<Result<_, _>>()?;
        Ok(Self {
            layers: Region::all(&program, &layers),
            output: Region::all(&program, &output),
            head,
            d_model: network.d_model,
            limits: limits.clone(),
            layout,
            machine: Machine { isa, pool, weights, ropes },
            state,
            rollback,
            workspace: Workspace::default(),
            capacity: 0,
            observer: None,
            program,
            sizes,
        })
    }

    /// Refuses what this stage can't run, before anything changes.
    fn check(&self, work: &InFlight) -> Result<(), DeviceError> {
        let batch = &work.batch;
        batch.check(self.limits.pages.len()).map_err(DeviceError::Batch)?;
        let rows = batch.rows();
        if rows > self.limits.batch.rows || work.hidden.len() < rows * self.d_model {
            let (most, hidden) = (self.limits.batch.rows, work.hidden.len());
            return Err(DeviceError::Batch(format!(
                "{rows} rows, at most {most}; a hand-off of {hidden} floats"
            )));
        }
        if batch.segments.len() > self.limits.batch.segments {
            let (found, most) = (batch.segments.len(), self.limits.batch.segments);
            return Err(DeviceError::Batch(format!("{found} segments, at most {most}")));
        }
        let vocab = self.sizes.vocab;
        if let Some(token) = batch.tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(DeviceError::Batch(format!("token {token}, the vocabulary has {vocab}")));
        }
        for s in &batch.segments {
            if (s.slot.0 as usize) >= self.limits.sessions {
                return Err(DeviceError::Batch(format!("slot {} of {}", s.slot.0, self.limits.sessions)));
            }
            let drafts = self.limits.batch.drafts;
            if s.commit == Commit::Verify && (drafts == 0 || s.rows.len() > 1 + drafts) {
                let rows = s.rows.len();
                return Err(DeviceError::Batch(format!("{rows} verify rows for at most {drafts} drafts")));
            }
        }
        Ok(())
    }

    /// Marks the segments of which a row is not finite.
    fn find_faults(&self, work: &mut InFlight) {
        for (i, segment) in work.batch.segments.iter().enumerate() {
            let rows = segment.rows.start as usize * self.d_model..segment.rows.end as usize * self.d_model;
            if !is_finite(self.machine.isa, &work.hidden[rows]) {
                work.faults.push(i as u32);
            }
        }
    }
}

impl Stage for CpuStage {
    fn reserve(&mut self, rows: usize) -> Result<(), DeviceError> {
        let rows = rows.min(self.limits.batch.rows);
        if rows > self.capacity {
            self.workspace = self.sizes.allocate(rows, &self.layout, &self.program)?;
            self.capacity = rows;
        }
        Ok(())
    }

    fn step(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        self.check(work)?;
        self.reserve(work.batch.rows())?;
        work.answers.clear();
        work.top.clear();
        work.faults.clear();
        self.rollback.begin(&work.batch);
        for op in &work.batch.before {
            self.state.apply(op);
        }
        let rows = work.batch.rows();
        if rows == 0 {
            return Ok(());
        }
        self.run_layers(work).map_err(panicked)?;
        self.find_faults(work);
        if self.head.is_some() {
            self.answer(work).map_err(panicked)?;
        }
        Ok(())
    }

    fn commit(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
        // Keys and values past the kept rows are dead and will be overwritten before they can be read.
        self.move_states(kept)
    }

    fn poison(&mut self, pool: usize, page: u32) {
        self.state.poison(pool, page);
    }

    fn observe(&mut self, observer: Option<Box<dyn Observer>>) {
        self.observer = observer;
    }
}

impl CpuStage {
    /// The operations on all rows.
    fn run_layers(&mut self, work: &mut InFlight) -> Result<(), WorkerPanic> {
        let rows = work.batch.rows();
        let w = &mut self.workspace;
        fill_rotations(&self.machine.ropes, &work.batch, &mut w.scratch.rotations);
        let mut run = Run {
            program: &self.program,
            machine: &mut self.machine,
            buffers: Buffers::new(&mut work.hidden, self.d_model, w.floats.all(), &w.places, rows),
            batch: &work.batch,
            state: &mut self.state,
            rollback: &mut self.rollback,
            scratch: &mut w.scratch,
            quantised_of: None,
            observer: self.observer.as_deref_mut(),
        };
        run.regions(&self.layers, None)
    }
}

/// The cosines and sines of all rows, encoding by encoding: `[rows, table]` each.
fn fill_rotations(ropes: &[Rope], batch: &Batch, out: &mut [f32]) {
    let rows = batch.rows();
    let mut rest = out;
    for rope in ropes {
        let len = rope.table_len();
        let (table, behind) = rest.split_at_mut(rows * len);
        rest = behind;
        let positions =
            batch.segments.iter().flat_map(|s| s.first_position..s.first_position + s.rows.len() as u32);
        for (row, position) in table.chunks_exact_mut(len).zip(positions) {
            rope.fill(position, row);
        }
    }
}

pub(crate) fn panicked(panic: WorkerPanic) -> DeviceError {
    DeviceError::Panic(panic.to_string())
}

/// The rotation that the program describes.
fn rope(rope: &motet_model::program::Rope, weights: &[Loaded]) -> Result<Rope, DeviceError> {
    let scaling = match rope.scaling {
        RopeScaling::None => Scaling::None,
        RopeScaling::Linear { factor } => Scaling::Linear { factor: factor.into() },
        RopeScaling::Yarn { factor, original_context, attention_factor, beta_fast, beta_slow } => {
            Scaling::Yarn {
                factor: factor.into(),
                original_context: original_context.into(),
                attention_factor: attention_factor.into(),
                beta_fast: beta_fast.into(),
                beta_slow: beta_slow.into(),
            }
        }
    };
    let factors = match rope.factors.map(|id| &weights[id.0]) {
        Some(Loaded::Vector(factors)) => Some(factors.as_slice()),
        _ => None,
    };
    Rope::new(rope.style, rope.rot, rope.base.into(), scaling, factors)
        .map_err(|e| unsupported(e.to_string()))
}
