//! The objects of responses, field by field as OpenAI documents them.
//!
//! What is motet's own and not OpenAI's: `seed` (the seed that makes this answer again), `reasoning_content`.

use serde::{Serialize, Serializer};

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
    pub(crate) content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// Always `null`: the model's refusals are text.
    pub(crate) refusal: Option<String>,
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
    /// The token's text; bytes that are no UTF-8 by themselves show as U+FFFD.
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

/// The likeliest tokens in one place, best first: an object from text to log-probability. Of tokens with the same text
/// (bytes that are no UTF-8) the likeliest stands for all.
#[derive(Debug)]
pub(crate) struct Rivals(pub(crate) Vec<(String, f32)>);

impl Serialize for Rivals {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let likelier = |index: usize, text: &String| self.0[..index].iter().any(|(other, _)| other == text);
        let first = self.0.iter().enumerate().filter(|(index, (text, _))| !likelier(*index, text));
        serializer.collect_map(first.map(|(_, (text, logprob))| (text, logprob)))
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
