//! A stage: a range of layers with its weights, workspace and part of every session's state.
//!
//! Here is the order of a step; [`run`] goes through the program's operations, [`answers`] through the questions to the
//! logits, [`draft`] through the passes of the draft head.
//! A step allocates nothing. A panic on a compute thread becomes the step's error.

mod answers;
mod draft;
mod experts;
mod feed;
mod lines;
mod products;
mod profile;
mod rollback;
mod row_wise;
mod run;
mod shared;
mod sizes;
mod stateful;

use bytemuck::{cast_slice, cast_slice_mut};
use motet_model::batch::{Batch, Commit, Fault, InFlight, Segment as BatchSegment, Slot, StateOp};
use motet_model::device::{DeviceError, Limits, Observer, Stage};
use motet_model::layout::WorkspaceLayout;
use motet_model::network::Network;
use motet_model::program::{BufferId, Op, Place as OpPlace, Program, RopeScaling};

use crate::activations::ActivationBlock;
use crate::arena::Arena;
use crate::device::unsupported;
use crate::isa::Isa;
use crate::kv::Segment;
use crate::pool::{Pool, WorkerPanic, pin_current_thread};
use crate::rows::elementwise::is_finite;
use crate::rows::rope::{Rope, RopeScaling as Scaling};
use crate::session_state::SessionState;
use crate::weights::Loaded;
use crate::workspace::{Buffers, Place};

use draft::DraftHead;
use feed::Feed;
use lines::Lines;
use profile::{Profile, Watch};
use rollback::RollBack;
use run::{Region, Run};
pub(crate) use sizes::Sizes;

/// The CPU's stage.
pub(crate) struct CpuStage {
    program: Program,
    /// What is done to all rows.
    layers: Vec<Region>,
    /// From rows of the trunk to logits; `None` on a stage that is not the last.
    output: Option<Head>,
    /// The network's draft head, where it is loaded.
    draft: Option<DraftHead>,
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
    profile: Profile,
}

/// The operations that end in logits.
#[derive(Debug)]
struct Head {
    /// What comes before the product.
    regions: Vec<Region>,
    /// The product, by index into the program.
    head: usize,
}

impl Head {
    /// Some operations of which the last is a head; `None` for no operations.
    fn of(program: &Program, mut ops: Vec<usize>) -> Option<Self> {
        let head = ops.pop()?;
        assert!(matches!(program.ops[head].1, Op::Head { .. }), "the last operation makes logits");
        Some(Self { regions: Region::all(program, &ops), head })
    }
}

/// What operations compute with.
pub(crate) struct Machine {
    isa: Isa,
    pool: Pool,
    weights: Vec<Loaded>,
    ropes: Vec<Rope>,
    /// The processor of the thread that runs the stage, if it has one of its own.
    core: Option<usize>,
}

impl Machine {
    /// The threads of `pool`, the first of them on `core`, with a stage's weights.
    pub(crate) fn new(
        program: &Program,
        weights: Vec<Loaded>,
        pool: Pool,
        isa: Isa,
        core: Option<usize>,
    ) -> Result<Self, DeviceError> {
        let ropes = program.ropes.iter().map(|r| rope(r, &weights)).collect::<Result<_, _>>()?;
        Ok(Self { isa, pool, weights, ropes, core })
    }
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
    /// The segments and tokens that the draft head is fed with, and the tokens of a pass of drafting: at most as many as
    /// rows; empty in between.
    fed: Vec<BatchSegment>,
    tokens: Vec<u32>,
}

impl Workspace {
    /// The first rows of a buffer that is there.
    fn rows(&self, buffer: BufferId, rows: usize) -> &[f32] {
        let Place { at, width } =
            self.places[buffer.0].expect("an operation of this stage touches the buffer");
        &self.floats.get()[at..at + rows * width]
    }

    /// As [`Workspace::rows`], to be written.
    fn rows_mut(&mut self, buffer: BufferId, rows: usize) -> &mut [f32] {
        let Place { at, width } =
            self.places[buffer.0].expect("an operation of this stage touches the buffer");
        &mut self.floats.all()[at..at + rows * width]
    }
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

    fn get(&self) -> &[f32] {
        self.0.as_ref().map_or(&[], |arena| cast_slice(arena.bytes()))
    }
}

impl CpuStage {
    pub(crate) fn new(
        network: &Network,
        ops: Vec<usize>,
        limits: &Limits,
        sizes: Sizes,
        machine: Machine,
    ) -> Result<Self, DeviceError> {
        let program = network.program(limits.draft_head).clone();
        let layout = WorkspaceLayout::of(&program, &ops);
        let (mut layers, mut output) = (Vec::new(), Vec::new());
        let (mut keep, mut recall, mut feed, mut draft) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for op in ops {
            match program.ops[op].0 {
                OpPlace::Input | OpPlace::Layer(_) => layers.push(op),
                OpPlace::Output => output.push(op),
                OpPlace::Keep => keep.push(op),
                OpPlace::Recall => recall.push(op),
                OpPlace::Feed => feed.push(op),
                OpPlace::Draft => draft.push(op),
            }
        }
        let state = SessionState::new(
            sizes.pages.clone(),
            &limits.pages,
            sizes.recurrent_at.clone(),
            sizes.recurrent_floats,
            limits.sessions,
            limits.checkpoints,
        )?;
        let rollback = RollBack::new(sizes.rollback.clone(), limits)?;
        Ok(Self {
            layers: Region::all(&program, &layers),
            output: Head::of(&program, output),
            draft: DraftHead::of(&program, &recall, Feed::of(&program, &keep, &feed), draft),
            d_model: network.d_model,
            limits: limits.clone(),
            layout,
            machine,
            state,
            rollback,
            workspace: Workspace::default(),
            capacity: 0,
            observer: None,
            profile: Profile::default(),
            program,
            sizes,
        })
    }

    /// Refuses what this stage can't run, before anything changes.
    fn check(&self, work: &InFlight) -> Result<(), DeviceError> {
        let batch = &work.batch;
        batch.check(self.limits.pages.len()).map_err(DeviceError::Batch)?;
        let (rows, most) = (self.rows_of(batch), self.limits.batch.rows);
        if rows > most || work.hidden.len() < rows * self.d_model {
            let hidden = work.hidden.len();
            return Err(DeviceError::Batch(format!(
                "{rows} rows, at most {most}; a hand-off of {hidden} floats"
            )));
        }
        if batch.segments.len() > self.limits.batch.segments {
            let (found, most) = (batch.segments.len(), self.limits.batch.segments);
            return Err(DeviceError::Batch(format!("{found} segments, at most {most}")));
        }
        let vocab = self.sizes.vocab;
        let mut tokens = batch.tokens.iter().chain(&batch.behind);
        if let Some(token) = tokens.find(|&&t| t as usize >= vocab) {
            return Err(DeviceError::Batch(format!("token {token}, the vocabulary has {vocab}")));
        }
        if let Some(s) = batch.segments.iter().find(|s| (s.slot.0 as usize) >= self.limits.sessions) {
            return Err(DeviceError::Batch(format!("slot {} of {}", s.slot.0, self.limits.sessions)));
        }
        Ok(())
    }

    /// As [`CpuStage::check`], for the rows of a step.
    fn check_step(&self, work: &InFlight) -> Result<(), DeviceError> {
        self.check(work)?;
        for s in &work.batch.segments {
            let drafts = self.limits.batch.drafts;
            if s.commit == Commit::Verify && (drafts == 0 || s.rows.len() > 1 + drafts) {
                let rows = s.rows.len();
                return Err(DeviceError::Batch(format!("{rows} verify rows for at most {drafts} drafts")));
            }
        }
        Ok(())
    }

    /// Rows that are run at a time for a batch: its own, or those that the draft head is fed with.
    fn rows_of(&self, batch: &Batch) -> usize {
        if self.draft.is_some() { batch.fed_rows().max(batch.rows()) } else { batch.rows() }
    }

    /// Marks the first hidden row of each segment that is not finite.
    fn find_faults(&self, work: &mut InFlight) {
        let (d, isa) = (self.d_model, self.machine.isa);
        for (i, segment) in work.batch.segments.iter().enumerate() {
            let hidden = &work.hidden[segment.rows.start as usize * d..segment.rows.end as usize * d];
            if !is_finite(isa, hidden) {
                let broken =
                    hidden.chunks_exact(d).zip(segment.rows.clone()).find(|(x, _)| !is_finite(isa, x));
                work.faults.extend(broken.map(|(_, row)| Fault { segment: i as u32, row }));
            }
        }
    }
}

impl Stage for CpuStage {
    fn enter(&mut self) {
        // Where the system refuses, the stage is slower and right all the same; loading has already been refused then.
        let _ = self.machine.core.is_none_or(pin_current_thread);
    }

    fn reserve(&mut self, rows: usize) -> Result<(), DeviceError> {
        let rows = rows.min(self.limits.batch.rows);
        if rows > self.capacity {
            self.workspace = self.sizes.allocate(rows, &self.layout, &self.program)?;
            self.capacity = rows;
        }
        Ok(())
    }

    fn step(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        self.check_step(work)?;
        self.reserve(self.rows_of(&work.batch))?;
        work.answers.clear();
        work.top.clear();
        work.faults.clear();
        self.rollback.begin(&work.batch);
        self.change(&work.batch.before);
        let rows = work.batch.rows();
        if rows == 0 {
            return Ok(());
        }
        let InFlight { batch, hidden, .. } = work;
        self.run(Section::Layers, Lines::of(batch), hidden).map_err(panicked)?;
        self.find_faults(work);
        if self.output.is_some() {
            self.answer(work).map_err(panicked)?;
        }
        self.keep_rows(work).map_err(panicked)
    }

    fn draft(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        self.check_draft(work)?;
        self.reserve(self.rows_of(&work.batch))?;
        self.change(&work.batch.before);
        self.draft_all(work).map_err(panicked)
    }

    fn change(&mut self, changes: &[StateOp]) {
        changes.iter().for_each(|change| self.state.apply(change));
    }

    fn commit(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
        // Keys and values past the kept rows are dead and will be overwritten before they can be read.
        self.move_states(kept)
    }

    fn bytes_for_drafts(&self, drafts: usize) -> u64 {
        let grown = self.sizes.with_drafts(drafts, self.machine.pool.threads());
        grown.draft_bytes().saturating_sub(self.sizes.draft_bytes())
    }

    fn allow_drafts(&mut self, drafts: usize) -> Result<(), DeviceError> {
        if drafts <= self.limits.batch.drafts {
            return Ok(());
        }
        let sizes = self.sizes.with_drafts(drafts, self.machine.pool.threads());
        let rollback = RollBack::new(sizes.rollback.clone(), &self.limits)?;
        if self.capacity > 0 && self.workspace.scratch.states.is_empty() {
            self.workspace.scratch.states = sizes.states()?;
        }
        (self.sizes, self.rollback, self.limits.batch.drafts) = (sizes, rollback, drafts);
        Ok(())
    }

    fn poison(&mut self, pool: usize, page: u32) {
        self.state.poison(pool, page);
    }

    fn observe(&mut self, observer: Option<Box<dyn Observer>>) {
        self.observer = observer;
    }
}

/// Operations that run on all rows of a batch, or of a pass.
#[derive(Debug, Clone, Copy)]
enum Section {
    /// The trunk's layers.
    Layers,
    /// What the draft head is fed with.
    Feed,
    /// From the rows that were kept to those that the draft head begins with.
    Recall,
    /// The draft head's layer.
    Draft,
}

impl CpuStage {
    /// Runs a section on some rows and their residual stream.
    fn run(&mut self, section: Section, lines: Lines<'_>, hidden: &mut [f32]) -> Result<(), WorkerPanic> {
        let regions: &[Region] = match (section, &self.draft) {
            (Section::Layers, _) => &self.layers,
            (Section::Feed, Some(draft)) => &draft.feed.feed,
            (Section::Recall, Some(draft)) => &draft.recall,
            (Section::Draft, Some(draft)) => &draft.layer,
            (_, None) => return Ok(()),
        };
        let w = &mut self.workspace;
        if regions.iter().any(|region| region.rotates) {
            let watch = Watch::start();
            lines.fill_rotations(self.machine.isa, &self.machine.ropes, &mut w.scratch.rotations);
            watch.other(&mut self.profile, "rotations", lines.tokens.len());
        }
        let mut run = Run {
            program: &self.program,
            machine: &mut self.machine,
            buffers: Buffers::new(hidden, self.d_model, w.floats.all(), &w.places, lines.tokens.len()),
            lines,
            state: &mut self.state,
            rollback: &mut self.rollback,
            scratch: &mut w.scratch,
            quantised_of: None,
            observer: self.observer.as_deref_mut(),
            profile: &mut self.profile,
        };
        run.regions(regions, None)
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
