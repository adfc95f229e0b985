//! The contract between conversations and what computes them.
//!
//! The engine knows devices only through these traits: it decides which rows run and where state lies (slots,
//! pages, checkpoints, all as numbers), the device owns the memory and the arithmetic. A device never decides
//! which session runs, and keeps DESIGN law 2: a row's bits depend on its own conversation only.

use crate::batch::{BatchLimits, InFlight, Slot, StateOp};
use crate::network::Network;
use crate::split::Split;
use motet_gguf::ModelFile;
use std::fmt;
use std::str::FromStr;

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[allow(non_camel_case_types, reason = "the name that the field uses")]
pub enum KvFormat {
    /// Half precision, saturating at ±65,504.
    #[default]
    F16,
    /// Single precision.
    F32,
    /// int8 with a scale per 32 values.
    Q8_0,
}

impl KvFormat {
    /// All formats.
    pub const ALL: [KvFormat; 3] = [KvFormat::F16, KvFormat::F32, KvFormat::Q8_0];

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F16 => "f16",
            KvFormat::F32 => "f32",
            KvFormat::Q8_0 => "q8_0",
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// There is no KV format of that name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown KV format {found:?}: expected f16, f32 or q8_0")]
pub struct UnknownKvFormat {
    /// The name that was given.
    pub found: String,
}

impl FromStr for KvFormat {
    type Err = UnknownKvFormat;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        KvFormat::ALL
            .into_iter()
            .find(|format| format.name() == name)
            .ok_or_else(|| UnknownKvFormat { found: name.to_owned() })
    }
}

/// What a stage is sized for. The same limits go to [`Device::footprint`] and [`Device::prepare`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Lengths of a batch.
    pub batch: BatchLimits,
    /// Sessions that may have recurrent state at once (slots `0..sessions`).
    pub sessions: usize,
    /// Positions per session.
    pub context: usize,
    /// Rows of logits computed at a time (default 16).
    pub logit_rows: usize,
    /// Pages of each pool of `StateLayout::pools`.
    pub pages: Vec<usize>,
    /// Places for saved recurrent state.
    pub checkpoints: usize,
    /// Format of keys and values.
    pub kv: KvFormat,
    /// Whether the network's own draft head is loaded, fed with the rows of conversations and asked by [`Stage::draft`].
    pub draft_head: bool,
}

/// What a stage will take, in bytes, known from the header alone. DESIGN law 4.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Footprint {
    /// Weights as the device holds them.
    pub weights: u64,
    /// The workspace, by part; [`Footprint::workspace`] is their sum.
    pub workspace_parts: Vec<(String, u64)>,
    /// One page of each pool, all layers of the stage.
    pub page: Vec<u64>,
    /// Recurrent state of one session; a checkpoint takes the same.
    pub recurrent: u64,
    /// What the stage keeps of drafts until they are committed: `segments × drafts` rows.
    pub rollback: u64,
    /// What the draft head takes of `weights`, `page` and `recurrent`; zero without one.
    pub draft: DraftShare,
}

/// The draft head's share of a [`Footprint`], in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DraftShare {
    /// Weights that the trunk does not read.
    pub weights: u64,
    /// Keys and values in a page of each pool.
    pub page: Vec<u64>,
    /// The last hidden rows, which a session remembers until the head is fed with them.
    pub recurrent: u64,
}

impl Footprint {
    /// The workspace in bytes.
    pub fn workspace(&self) -> u64 {
        self.workspace_parts.iter().map(|(_, b)| b).sum()
    }
}

/// Why a device refused or failed.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Something in the network that this device cannot run.
    #[error("the device {device} can't run this network: {what}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// What is missing.
        what: String,
    },
    /// The model file does not hold what its header promised.
    #[error("tensor {tensor}: {what}")]
    Tensor {
        /// The tensor's name.
        tensor: String,
        /// Expected and found.
        what: String,
    },
    /// The system did not give the memory that was planned.
    #[error("{bytes} bytes for {what} could not be had: {source}")]
    Memory {
        /// What for.
        what: &'static str,
        /// How much.
        bytes: u64,
        /// The system's word.
        source: std::io::Error,
    },
    /// A compute thread panicked; the step's sessions fail, the stage goes on.
    #[error("a compute thread panicked: {0}")]
    Panic(String),
    /// The batch broke a rule (`Batch::check`).
    #[error("malformed batch: {0}")]
    Batch(String),
}

/// What watches the inside of a step: imatrix and tools. The default methods look away.
pub trait Observer: Send {
    /// The input rows `[rows, width]` of the product with weight `tensor`; for experts with the expert's number.
    fn product(&mut self, tensor: &str, expert: Option<usize>, rows: &[f32], width: usize) {
        let _ = (tensor, expert, rows, width);
    }
    /// Raw logits `[vocab]` of a row that was asked for.
    fn logits(&mut self, row: u32, logits: &[f32]) {
        let _ = (row, logits);
    }
    /// Raw logits `[vocab]` of the draft head for the draft `depth` (from 0) of a segment of [`Stage::draft`].
    fn draft_logits(&mut self, segment: usize, depth: usize, logits: &[f32]) {
        let _ = (segment, depth, logits);
    }
    /// The final hidden row `[d_model]`, after the output norm, of a row that was asked for.
    fn hidden(&mut self, row: u32, hidden: &[f32]) {
        let _ = (row, hidden);
    }
}

/// Something that computes: the CPU, later accelerators.
pub trait Device: Send + Sync {
    /// A word for people: "cpu avx512, 2 threads".
    fn name(&self) -> String;

    /// The bytes that each stage of `split` would take: the weights of its layers (the first stage also holds the
    /// embedding, the last the heads), its workspace, its part of every session's state. What stages share is counted
    /// once, for the first of them. Reads the network's description only.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`].
    fn footprint(
        &self,
        network: &Network,
        split: &Split,
        limits: &Limits,
    ) -> Result<Vec<Footprint>, DeviceError>;

    /// Loads the weights and allocates everything that [`Device::footprint`] names, stage by stage; the workspaces may
    /// wait for [`Stage::reserve`].
    ///
    /// # Errors
    /// Any [`DeviceError`] but a panic; nothing stays allocated then.
    fn prepare(
        &self,
        network: &Network,
        file: &ModelFile,
        split: &Split,
        limits: &Limits,
    ) -> Result<Vec<Box<dyn Stage>>, DeviceError>;
}

/// A range of layers with its weights, workspace and part of every session's state.
pub trait Stage: Send {
    /// Called once by the thread that will ask for everything else, so that it can take its place on the machine.
    fn enter(&mut self) {}

    /// Makes the workspace hold batches of `rows` rows, at most `Limits::batch.rows`. Called before the first step
    /// and between steps, never for fewer rows than before. A stage that has it all from the start has nothing to do.
    ///
    /// # Errors
    /// [`DeviceError::Memory`]; the workspace is then as it was.
    fn reserve(&mut self, rows: usize) -> Result<(), DeviceError> {
        let _ = rows;
        Ok(())
    }

    /// Runs the batch's state operations, then its rows: reads `hidden` (or the tokens, on the first stage),
    /// leaves `hidden` or, on the last stage, answers (and nothing of use in `hidden`). State of [`Commit::All`](crate::batch::Commit) segments has
    /// advanced when it returns.
    ///
    /// # Errors
    /// [`DeviceError::Panic`] and [`DeviceError::Batch`]; the state of the batch's sessions is then undefined and
    /// must be discarded, all else is untouched.
    fn step(&mut self, work: &mut InFlight) -> Result<(), DeviceError>;

    /// Makes the state operations of a batch that failed in another stage, so that this one stays in step with it. Its
    /// rows never run.
    fn change(&mut self, changes: &[StateOp]);

    /// Keeps the first `n_keep ≥ 1` rows of each segment of an earlier step whose commit is
    /// [`Commit::Verify`](crate::batch::Commit::Verify): recurrent states move there. Must name every such segment
    /// whose session goes on, before anything else is asked of the stage for that session; steps of others may lie in
    /// between.
    ///
    /// # Errors
    /// [`DeviceError::Batch`] for a slot without verify rows, or with fewer than are to be kept: nothing has changed
    /// then. [`DeviceError::Panic`]: the state of the named sessions is undefined and must be discarded.
    fn commit(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError>;

    /// Drafts tokens with the network's own head. `work.batch` has one row for each segment: the token that is certain
    /// and not yet run, at its position; `Batch::drafts` says how many to draft, the asks how to choose (with the
    /// same noise as the trunk will). The head is first fed with what it lacks, as the segments say, and in drafting with
    /// the row that is certain; what it was fed with stays. Leaves the tokens in [`InFlight::drafted`]. Each session's
    /// pages cover its row and its drafts; the head must be fed with those drafts that are kept. Changes no other state.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] without a draft head; else as [`Stage::step`], but no session is harmed: drafts
    /// are only missing.
    fn draft(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        let _ = work;
        Err(DeviceError::Unsupported { device: "stage".into(), what: "it has no draft head".into() })
    }

    /// Bytes that [`Stage::allow_drafts`] would take beyond what the stage has.
    fn bytes_for_drafts(&self, drafts: usize) -> u64 {
        let _ = drafts;
        0
    }

    /// Makes room for `drafts` drafts to a segment instead of `BatchLimits::drafts`: in the record of verify rows, and in
    /// the workspace if what it has does not do. Called between steps; never for fewer than before.
    ///
    /// # Errors
    /// [`DeviceError::Memory`]: the stage is then as it was. [`DeviceError::Unsupported`] by a stage that verifies none.
    fn allow_drafts(&mut self, drafts: usize) -> Result<(), DeviceError> {
        let what = format!("{drafts} drafts that come later");
        Err(DeviceError::Unsupported { device: "stage".into(), what })
    }

    /// Fills a page with NaN: a check that free pages are never read (`motet verify`).
    fn poison(&mut self, pool: usize, page: u32);

    /// Sets or removes the observer.
    fn observe(&mut self, observer: Option<Box<dyn Observer>>);
}
