//! What a person chooses, and whether it makes sense. Nothing here knows what it costs.

use super::{Line, PlanError};
use crate::drafts::{Drafts, MAX_DRAFTS};
use motet_model::{KvFormat, Network, PartCosts, Stages};
use std::time::Duration;

/// When the workspace is allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Workspace {
    /// With the weights: a server that has started has what it needs.
    #[default]
    AtStart,
    /// With the first session, and then as sessions need more, between steps: for use as a library.
    WithSessions,
}

/// What a person chooses.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Conversations that run at once.
    pub sessions: usize,
    /// Positions per conversation; `None`: what the model was trained for, at most 8,192.
    pub context: Option<usize>,
    /// Bytes of the whole process at most; `None`: the pools hold sessions × context.
    pub memory: Option<u64>,
    /// Bytes for checkpoints of recurrent state; `None`: a quarter of the pool.
    pub checkpoint_memory: Option<u64>,
    /// Format of keys and values.
    pub kv: KvFormat,
    /// Rows of logits computed at a time.
    pub max_logit_rows: usize,
    /// Rows of the largest batch.
    pub rows: usize,
    /// What a step should take at most while somebody waits for the next token.
    pub step: Duration,
    /// Tokens of the answer that a session has pages reserved for when it starts.
    pub headroom: usize,
    /// Requests (choices) that may wait.
    pub queue: usize,
    /// What the front end may hold at most beside the engine: connections, requests being read.
    pub front_end: Vec<Line>,
    /// Forces the rows of a prefill chunk; `None`: what `step` leaves room for.
    pub prefill_chunk: Option<usize>,
    /// How many tokens are drafted for a session in a step. They come from the network's head if it has one; with
    /// [`Drafts::Auto`] they are looked up where the session's text repeats itself and that pays more.
    pub drafts: Drafts,
    /// They are looked up in the session's own tokens, even if the network has a draft head.
    pub look_up: bool,
    /// The stages that the layers are split into.
    pub stages: Stages,
    /// Measured costs by which stages are balanced; `None`: the program's cost model.
    pub layer_costs: Option<PartCosts>,
    /// Only one batch is in flight: several stages run one after the other on all rows, as others do it. What the
    /// pipeline is compared with.
    pub in_turn: bool,
    /// When the workspace is allocated.
    pub workspace: Workspace,
    /// The engine is given up, and all streams end, when a step takes longer; `None`: never.
    pub watchdog: Option<Duration>,
    /// Free pages are filled with NaN before each step: a check that they are never read.
    pub poison: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sessions: 4,
            context: None,
            memory: None,
            checkpoint_memory: None,
            kv: KvFormat::F16,
            max_logit_rows: 16,
            rows: 512,
            step: Duration::from_millis(50),
            headroom: 256,
            queue: 128,
            front_end: Vec::new(),
            prefill_chunk: None,
            drafts: Drafts::Off,
            look_up: false,
            stages: Stages::default(),
            layer_costs: None,
            in_turn: false,
            workspace: Workspace::AtStart,
            watchdog: None,
            poison: false,
        }
    }
}

/// Checks the options; returns the context.
pub(super) fn check(network: &Network, options: &Options) -> Result<usize, PlanError> {
    let context = options.context.unwrap_or(network.context.min(8192));
    let counts = [
        ("sessions", options.sessions, 4096),
        ("ctx", context, network.context),
        ("rows", options.rows, 1 << 16),
        ("queue", options.queue, 1 << 20),
        ("max-logit-rows", options.max_logit_rows, 1 << 12),
        ("drafts", options.drafts.most(false).max(1), MAX_DRAFTS),
        ("prefill-chunk", options.prefill_chunk.unwrap_or(1), options.rows),
    ];
    match counts.into_iter().find(|&(_, value, most)| !(1..=most).contains(&value)) {
        Some((option, found, most)) => Err(PlanError::Option { option, found, most }),
        None => Ok(context),
    }
}
