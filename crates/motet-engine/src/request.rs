//! What a front end asks for: a prompt, how to choose tokens, and when to stop.
//!
//! A request is complete when it is submitted: everything that can be wrong with it is found by
//! [`Request::check`] before it enters the queue. It knows nothing of text, only of tokens.

use crate::constraint::ConstraintMaker;
use crate::sampling::SamplingOptions;

/// The most log-probabilities per token that can be asked for.
pub const MAX_TOP: u8 = 20;

/// One prompt and what to do with it.
pub struct Request {
    /// The tokens of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// Offsets into `prompt` where messages end, ascending: the next turn will share the prompt up to one of them, so
    /// recurrent state is saved at the last page border before each. Ignored by models without recurrent state.
    pub marks: Vec<usize>,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// How many answers to the one prompt (`n`); they share its pages.
    pub choices: u32,
    /// Tokens of an answer at most; `None`: the rest of the context. 0 reads the prompt only.
    pub max_tokens: Option<usize>,
    /// Tokens that end an answer. They are counted but not published.
    pub end_tokens: Vec<u32>,
    /// Makes what watches each choice's tokens for stop strings.
    pub cut: Option<CutMaker>,
    /// Makes the form that each choice's answer must keep to.
    pub constraint: Option<ConstraintMaker>,
    /// The log-probability of each token, and of this many most likely ones (0–20).
    pub logprobs: Option<u8>,
    /// The same for the prompt's own tokens but the first, whose probability has no meaning. The prompt is then
    /// read in full, whatever the prefix cache holds.
    pub prompt_logprobs: Option<u8>,
    /// A digest of the logits of every row that is run for this request, told as `Event::Row`: also of rows that are
    /// run again after stepping back, and of those behind a prefix that was found; only the last row of a prompt
    /// without an answer has none (`motet verify`).
    pub digests: bool,
    /// Whether drafts may be made for it, where the engine makes any. They never change a token.
    pub drafts: bool,
}

impl Request {
    /// A prompt with default sampling, one choice and no limit but the context.
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            marks: Vec::new(),
            sampling: SamplingOptions::default(),
            choices: 1,
            max_tokens: None,
            end_tokens: Vec::new(),
            cut: None,
            constraint: None,
            logprobs: None,
            prompt_logprobs: None,
            digests: false,
            drafts: true,
        }
    }

    /// Tokens of an answer at most, in a context of `context` positions that the prompt fits into.
    pub fn answer_limit(&self, context: usize) -> usize {
        let rest = context.saturating_sub(self.prompt.len());
        self.max_tokens.map_or(rest, |m| m.min(rest))
    }

    /// Checks everything that does not depend on what else is running.
    ///
    /// # Errors
    /// [`SubmitError::Invalid`] names the field; [`SubmitError::TooLong`] if the prompt leaves no room in the context
    /// for one token (a prompt that is only read may fill it).
    pub fn check(&self, limits: &EngineLimits) -> Result<(), SubmitError> {
        let invalid = |field, what: String| Err(SubmitError::Invalid { field, what });
        let strange = |tokens: &[u32]| tokens.iter().copied().find(|&t| t as usize >= limits.vocab);
        if self.prompt.is_empty() {
            return invalid("prompt", "at least one token is needed".into());
        }
        if let Some(token) = strange(&self.prompt).or_else(|| strange(&self.end_tokens)) {
            return invalid("prompt", format!("token {token} is outside the vocabulary of {}", limits.vocab));
        }
        if !self.marks.is_sorted() || self.marks.last().is_some_and(|&m| m > self.prompt.len()) {
            return invalid("marks", "offsets into the prompt must ascend".into());
        }
        if self.choices == 0 || self.choices as usize > limits.queue {
            return invalid(
                "n",
                format!("{} choices, between 1 and {} can be had", self.choices, limits.queue),
            );
        }
        if [self.logprobs, self.prompt_logprobs].iter().flatten().any(|&n| n > MAX_TOP) {
            return invalid("top_logprobs", format!("at most {MAX_TOP} can be had"));
        }
        let room = usize::from(self.max_tokens != Some(0));
        if self.prompt.len() + room > limits.context {
            return Err(SubmitError::TooLong { prompt: self.prompt.len(), context: limits.context });
        }
        self.sampling.check(limits.vocab)
    }
}

/// Makes a [`Cut`] for one choice of a request.
pub type CutMaker = Box<dyn Fn() -> Box<dyn Cut> + Send>;

/// Decides after each token whether the answer ends with it: stop strings, the end of a tool call.
///
/// It runs on the engine's thread between two steps, so it must be quick, must not block and must not call the engine.
pub trait Cut: Send {
    /// Takes the next token; `true` ends the answer with this token, which is still published.
    fn push(&mut self, token: u32) -> bool;
}

/// What a front end must know to check a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLimits {
    /// Positions per conversation, prompt and answer together.
    pub context: usize,
    /// Conversations that run at once.
    pub sessions: usize,
    /// Requests (choices) that may wait.
    pub queue: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
}

/// Why a request was not taken. Nothing of it was started.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The prompt leaves no room in the context.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context} with the answer; shorten the prompt"
    )]
    TooLong {
        /// Tokens in the prompt.
        prompt: usize,
        /// Positions of a conversation.
        context: usize,
    },
    /// Prompt and answer would not fit even alone.
    #[error(
        "prompt and answer need {needed} pages, but the pool has {pages}; lower max_tokens or raise the memory"
    )]
    NeverFits {
        /// Pages needed.
        needed: usize,
        /// Pages there are.
        pages: usize,
    },
    /// Too many requests wait.
    #[error("{waiting} requests are waiting already; try again in {} s", retry_after.as_secs().max(1))]
    QueueFull {
        /// Requests in the queue.
        waiting: usize,
        /// When a place is likely to be free.
        retry_after: std::time::Duration,
    },
    /// A field that makes no sense.
    #[error("{field}: {what}")]
    Invalid {
        /// The field, as OpenAI's API calls it.
        field: &'static str,
        /// What was found and expected.
        what: String,
    },
    /// The engine finishes what runs and takes nothing new.
    #[error("the engine is draining and takes no new requests")]
    Draining,
    /// The engine is gone.
    #[error("the engine is closed")]
    Closed,
}
