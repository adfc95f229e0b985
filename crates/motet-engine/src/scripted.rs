//! A device without weights: it stores what each row writes, page by page and slot by slot, and derives each token
//! from what it reads back. So a wrong page table, a stale page, a page that was not cleared, a bad checkpoint, rows with
//! drafts that were kept or not kept wrongly, or two sessions mixed up give a wrong token, and [`Solo`] says, from a
//! conversation's tokens alone, which one is right.
//!
//! Time can be simulated, real or none; troubles (a panic, a value that is not finite, a step that hangs) come when
//! they are asked for. It must never look at anything but its batch and its memory.

mod arithmetic;
mod control;
mod pipeline;
mod solo;
mod stage;

pub use control::Control;
pub(crate) use pipeline::Simulated;
pub use pipeline::StageTime;
pub use solo::Solo;

use crate::clock::{Clock, SimClock};
use crate::engine::Engine;
use crate::plan::{Machine, Options, Plan, PlanError};
use motet_gguf::ModelFile;
use motet_model::batch::Sampling;
use motet_model::device::DraftShare;
use motet_model::layout::StateLayout;
use motet_model::program::{State, StateKind};
use motet_model::split::MAX_STAGES;
use motet_model::{Device, DeviceError, Footprint, Limits, Network, PAGE, Program, Split, Stage};
use std::sync::Arc;
use std::time::Duration;

/// What a scripted network remembers of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sketch {
    /// Tokens.
    pub vocab: usize,
    /// Positions.
    pub context: usize,
    /// Whether it has a layer that sees all positions.
    pub full: bool,
    /// The window of its sliding layer, if it has one.
    pub window: Option<u32>,
    /// Whether it has recurrent state.
    pub recurrent: bool,
    /// Whether it has a draft head; it needs a layer that sees all positions then.
    pub head: bool,
}

impl Default for Sketch {
    fn default() -> Self {
        Self { vocab: 1000, context: 8192, full: true, window: None, recurrent: false, head: false }
    }
}

impl Sketch {
    /// A network of that shape: session state and nothing to compute, in as many layers as one likes.
    pub fn network(&self) -> Network {
        let kv = |window| StateKind::Kv { heads: 1, key_dim: 1, value_dim: 1, window };
        let kinds = [
            self.full.then(|| kv(None)),
            self.window.map(|w| kv(Some(w))),
            self.recurrent.then_some(StateKind::Delta { heads: 1, key_dim: 2, value_dim: 1 }),
        ];
        let states: Vec<State> =
            kinds.into_iter().flatten().enumerate().map(|(layer, kind)| State { layer, kind }).collect();
        let layers = states.len();
        // With the head come its own keys and values, and the last hidden row.
        let hidden = StateKind::Delta { heads: 1, key_dim: 1, value_dim: 1 };
        let of_head = [kv(None), hidden].map(|kind| State { layer: layers, kind });
        let draft = states.iter().cloned().chain(of_head).collect();
        let program = |states| Program { states, ..Program::default() };
        Network {
            architecture: "scripted".into(),
            name: None,
            vocab: self.vocab,
            d_model: 1,
            layers: MAX_STAGES,
            context: self.context,
            trunk: program(states),
            draft: self.head.then(|| program(draft)),
        }
    }
}

/// What a script answers after a history (prompt and answer so far), sampled in some way.
pub type AnswerFn = Arc<dyn Fn(&[u32], &Sampling) -> u32 + Send + Sync>;

/// How tokens come out of what was read back.
#[derive(Clone)]
pub enum Script {
    /// Any token, from a digest of all that was read and of the sampling; about every `mean`-th one is `end`.
    Random {
        /// The end token, if answers end by themselves.
        end: Option<u32>,
        /// Mean length of an answer.
        mean: u32,
    },
    /// A function of the tokens as they were read back. Needs a layer that sees all positions.
    Answers(AnswerFn),
}

/// How long steps take.
#[derive(Clone)]
pub enum Pace {
    /// No time.
    None,
    /// A clock is moved by the time of the number of rows.
    Simulated(Arc<SimClock>, Arc<dyn Fn(usize) -> Duration + Send + Sync>),
    /// The thread sleeps for the time of the number of rows.
    Real(Arc<dyn Fn(usize) -> Duration + Send + Sync>),
}

/// Whether the draft head proposes the token that will be chosen: after so many drafts, by chance (the last number
/// is a random one), for a session that samples in this way.
pub type AgreeFn = Arc<dyn Fn(&Sampling, usize, u64) -> bool + Send + Sync>;

/// A device that follows a script.
#[derive(Clone)]
pub struct Scripted {
    /// How tokens are made.
    pub script: Script,
    /// How long steps take.
    pub pace: Pace,
    /// When the draft head is right.
    pub agree: AgreeFn,
    /// How long a pass of the draft head over so many sessions takes, in simulated time.
    pub draft_pass: Arc<dyn Fn(usize) -> Duration + Send + Sync>,
    /// Troubles to come.
    pub control: Arc<Control>,
}

impl Scripted {
    /// A device with that script whose steps take no time, and whose draft head is right seven times of ten.
    pub fn new(script: Script) -> Self {
        Self {
            script,
            pace: Pace::None,
            agree: Arc::new(|_, _, random| random % 10 < 7),
            draft_pass: Arc::new(|_| Duration::ZERO),
            control: Arc::default(),
        }
    }

    /// A stage for the whole network; no model file is needed.
    pub fn stage(&self, network: &Network, limits: &Limits) -> Box<dyn Stage> {
        Box::new(stage::ScriptedStage::new(self.clone(), network, limits, 0, 1))
    }

    /// So many stages for the whole network each: every one keeps all state, and answers what the others answer.
    pub fn stages(&self, network: &Network, limits: &Limits, stages: usize) -> Vec<Box<dyn Stage>> {
        let stage = |number| {
            let stage = stage::ScriptedStage::new(self.clone(), network, limits, number, stages);
            Box::new(stage) as Box<dyn Stage>
        };
        (0..stages).map(stage).collect()
    }

    /// An engine over this device, with a thread of its own.
    ///
    /// # Errors
    /// Options that make no sense.
    pub fn start(&self, sketch: &Sketch, options: &Options) -> Result<Engine, PlanError> {
        let network = sketch.network();
        let plan = Plan::new(&network, options, Machine { memory: None }, self)?;
        let (device, limits, stages) = (self.clone(), plan.limits().clone(), plan.split().stages());
        let open = move || Ok(device.stages(&network, &limits, stages));
        Ok(match &self.pace {
            Pace::Simulated(clock, _) => {
                Engine::start_with_clock(plan, clock.clone() as Arc<dyn Clock>, open)
            }
            _ => Engine::start(plan, open),
        })
    }
}

impl Device for Scripted {
    fn name(&self) -> String {
        "scripted".into()
    }

    fn footprint(
        &self,
        network: &Network,
        split: &Split,
        limits: &Limits,
    ) -> Result<Vec<Footprint>, DeviceError> {
        let layout: StateLayout = network.state(limits.draft_head);
        let full = layout.pools.first().is_some_and(|p| p.window.is_none());
        if matches!(self.script, Script::Answers(_)) && !full {
            let what = "answers by history need a layer that sees all positions".into();
            return Err(DeviceError::Unsupported { device: self.name(), what });
        }
        let stage = Footprint {
            weights: 0,
            workspace_parts: vec![("history".into(), 4 * network.context as u64)],
            page: vec![(PAGE * size_of::<arithmetic::Cell>()) as u64; layout.pools.len()],
            recurrent: 4 * layout.recurrent_floats as u64,
            rollback: arithmetic::rollback_bytes(limits.batch.segments, limits.batch.drafts),
            draft: match limits.draft_head {
                true => DraftShare { weights: 0, page: vec![0; layout.pools.len()], recurrent: 4 },
                false => DraftShare::default(),
            },
        };
        Ok(vec![stage; split.stages()])
    }

    fn prepare(
        &self,
        network: &Network,
        _file: &ModelFile,
        split: &Split,
        limits: &Limits,
    ) -> Result<Vec<Box<dyn Stage>>, DeviceError> {
        Ok(self.stages(network, limits, split.stages()))
    }
}
