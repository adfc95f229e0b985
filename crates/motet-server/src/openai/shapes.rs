//! The objects of responses, field by field as OpenAI documents them.
//!
//! What is motet's own and not OpenAI's: `seed` (the seed that makes this answer again), `reasoning_content`.

use std::time::Instant;

use serde::{Serialize, Serializer};

use crate::answer::{Reason, Tally};
use crate::app::{App, now};
use crate::params::{Params, random};

/// A whole answer (`chat.completion`, `text_completion`) or one chunk of it (`chat.completion.chunk`,
/// `text_completion`); `C` is the shape of its choices.
#[derive(Debug, Serialize)]
pub(crate) struct Reply<'a, C> {
    #[serde(flatten)]
    pub(crate) head: &'a Head,
    pub(crate) choices: Vec<C>,
    /// Left out; `null` on the chunks before the last when usage was asked for; the numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Option<Usage>>,
    /// As llama.cpp's clients read it; left out but on the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) timings: Option<Timings>,
}

/// What is the same in all chunks of an answer.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Head {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: &'static str,
    /// The seed of the answer: the request's, or the random one that was drawn for it.
    pub(crate) seed: i64,
}

impl Head {
    /// The head of an answer that begins now.
    pub(crate) fn new(prefix: &str, object: &'static str, app: &App, params: &Params) -> Head {
        Head {
            id: format!("{prefix}-{:016x}{:016x}", random(), random()),
            object,
            created: now(),
            model: app.model.name.clone(),
            system_fingerprint: concat!("motet-", env!("CARGO_PKG_VERSION")),
            seed: params.seed,
        }
    }
}

/// OpenAI's word for why an answer ended.
pub(crate) fn finish_reason(reason: &Reason) -> &'static str {
    match reason {
        Reason::End | Reason::StopString(_) => "stop",
        Reason::Length => "length",
        Reason::Calls => "tool_calls",
    }
}

/// Tokens and times as llama.cpp counts them; times in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Timings {
    /// Tokens of the prompt that were found in the cache.
    pub(crate) cache_n: usize,
    /// Tokens of the prompt that were read.
    pub(crate) prompt_n: usize,
    pub(crate) prompt_ms: f64,
    /// Tokens of the answer, the first one included, and the time from the first to the last.
    pub(crate) predicted_n: usize,
    pub(crate) predicted_ms: f64,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) draft_n: usize,
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) draft_n_accepted: usize,
}

impl From<&Tally> for Timings {
    fn from(tally: &Tally) -> Timings {
        let between = |from: Option<Instant>, to: Option<Instant>| {
            let (Some(from), Some(to)) = (from, to) else { return 0.0 };
            (to.saturating_duration_since(from).as_secs_f64() * 1e6).round() / 1e3
        };
        let times = &tally.times;
        Timings {
            cache_n: tally.cached,
            prompt_n: tally.prompt - tally.cached.min(tally.prompt),
            prompt_ms: between(times.started, times.first_token),
            predicted_n: tally.generated,
            predicted_ms: between(times.first_token, times.last_token),
            draft_n: tally.drafted,
            draft_n_accepted: tally.accepted,
        }
    }
}

/// Tokens, counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
    pub(crate) prompt_tokens_details: PromptDetails,
    pub(crate) completion_tokens_details: CompletionDetails,
}

/// Of the prompt's tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct PromptDetails {
    /// Those that were in the prefix cache and were not computed again.
    pub(crate) cached_tokens: usize,
}

/// Of the answer's tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct CompletionDetails {
    /// Those that were thinking.
    pub(crate) reasoning_tokens: usize,
    /// Tokens that a drafter proposed, if any were.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) drafted_tokens: usize,
    /// Of these, those that were chosen.
    #[serde(skip_serializing_if = "is_zero")]
    pub(crate) accepted_draft_tokens: usize,
}

impl From<&Tally> for Usage {
    fn from(tally: &Tally) -> Usage {
        Usage {
            prompt_tokens: tally.prompt,
            completion_tokens: tally.generated,
            total_tokens: tally.prompt + tally.generated,
            prompt_tokens_details: PromptDetails { cached_tokens: tally.cached },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: tally.reasoning,
                drafted_tokens: tally.drafted,
                accepted_draft_tokens: tally.accepted,
            },
        }
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// A choice of a whole chat answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: u32,
    pub(crate) message: ChatMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: &'static str,
}

/// The answer of the model.
#[derive(Debug, Serialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: &'static str,
    /// `null` where there are only calls.
    pub(crate) content: Option<String>,
    /// Thinking, under the two names that clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
    /// Always `null`: the model's refusals are text.
    pub(crate) refusal: Option<String>,
}

/// A call of a tool, whole or, in a chunk, a part of it.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ToolCall {
    /// Which of the answer's calls; in chunks only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<&'static str>,
    pub(crate) function: CalledFunction,
}

/// What is called.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CalledFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    /// JSON as text, or a piece of it.
    pub(crate) arguments: String,
}

/// A choice of a chunk of a chat answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: u32,
    pub(crate) delta: ChatDelta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

/// What a chunk adds.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) tool_calls: Vec<ToolCall>,
}

/// Log-probabilities in the shape of chat.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<ChatLogprob>,
    /// Always `null`.
    pub(crate) refusal: Option<Vec<ChatLogprob>>,
}

/// One token of the answer and its rivals.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprob {
    #[serde(flatten)]
    pub(crate) token: TokenLogprob,
    pub(crate) top_logprobs: Vec<TokenLogprob>,
}

/// A token with its log-probability.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct TokenLogprob {
    /// The token's text, or `bytes:…` where its bytes are no text by themselves.
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

/// A choice of a text completion, whole or chunk.
#[derive(Debug, Serialize)]
pub(crate) struct TextChoice {
    pub(crate) text: String,
    pub(crate) index: u32,
    pub(crate) logprobs: Option<TextLogprobs>,
    pub(crate) finish_reason: Option<&'static str>,
}

/// Log-probabilities in the shape of text completions: columns.
#[derive(Debug, Default, Serialize)]
pub(crate) struct TextLogprobs {
    pub(crate) tokens: Vec<String>,
    /// `null` for the first token of an echoed prompt, which nothing predicted.
    pub(crate) token_logprobs: Vec<Option<f32>>,
    pub(crate) top_logprobs: Vec<Option<Rivals>>,
    /// Where each token starts in the choice's text, in characters.
    pub(crate) text_offset: Vec<usize>,
}

/// The likeliest tokens in one place, best first: an object from text to log-probability.
#[derive(Debug)]
pub(crate) struct Rivals(pub(crate) Vec<(String, f32)>);

impl Serialize for Rivals {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(text, logprob)| (text, logprob)))
    }
}

/// How a token is written: its text, or `bytes:` and its bytes where they are no text by themselves, as OpenAI's
/// completions did, so that tokens that are parts of characters can be told apart.
pub(crate) fn token_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

/// `GET /v1/models`.
#[derive(Debug, Serialize)]
pub(crate) struct ModelList {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<ModelObject>,
}

/// One model of the list.
#[derive(Debug, Serialize)]
pub(crate) struct ModelObject {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) owned_by: &'static str,
    /// Tokens a conversation may have; left out while the model is loading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_model_len: Option<usize>,
}
