//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use motet_text::{Conversation, ReasoningSplit, Special, Tokenizer};

use crate::answer::{Part, Whole};
use crate::app::{App, Model};
use crate::ask::{self, Ask, Prompt, Shape};
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::messages::{read_messages, read_template_variables, read_tools};
use crate::params::{MAX_TOP, read_params};
use crate::shapes::{
    ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprob, ChatLogprobs, ChatMessage, TokenLogprob,
};
use crate::voice::Score;

/// Answers a conversation.
pub(crate) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    ask::answer(app, request, understand).await
}

fn understand(model: &Model, fields: &Fields<'_>) -> Result<Ask<ChatShape>, ApiError> {
    let params = read_params(fields, model.tokenizer.vocab_len(), 1)?;
    let logprobs = read_logprobs(fields)?;
    let messages = read_messages(fields)?;
    let tools = read_tools(fields)?;
    let variables = read_template_variables(fields)?;
    let conversation = Conversation {
        messages: &messages,
        tools: (!tools.is_empty()).then_some(tools.as_slice()),
        add_generation_prompt: true,
        kwargs: Some(&variables),
    };
    let rendered = model.template.render(&conversation).map_err(|error| {
        ApiError::invalid(Some("messages".to_string()), error.to_string()).code("template_error")
    })?;
    let (tokens, marks) = model.tokenizer.encode_marked(&rendered.prompt, Special::Parse, &rendered.marks);
    let split = if model.template.has_reasoning() {
        ReasoningSplit::after_prompt(&rendered.prompt)
    } else {
        ReasoningSplit::off()
    };
    let prompt = Prompt { tokens, marks, split, echo: None };
    let shape = ChatShape { tokenizer: model.tokenizer.clone(), logprobs: logprobs.is_some() };
    Ok(Ask { params, prompts: vec![prompt], logprobs, param: "messages", shape })
}

/// `logprobs` and `top_logprobs`.
fn read_logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=MAX_TOP)?;
    if top.is_some_and(|top| top > 0) && !wanted {
        let message = "'top_logprobs' needs 'logprobs' to be true.".to_string();
        return Err(ApiError::invalid(Some("top_logprobs".to_string()), message));
    }
    Ok(wanted.then_some(top.unwrap_or(0) as u8))
}

struct ChatShape {
    tokenizer: Arc<Tokenizer>,
    /// Whether log-probabilities were asked for.
    logprobs: bool,
}

impl Shape for ChatShape {
    type Choice = ChatChoice;
    type Chunk = ChatChunkChoice;
    const ID: &'static str = "chatcmpl";
    const OBJECTS: [&'static str; 2] = ["chat.completion", "chat.completion.chunk"];

    fn choice(&self, index: u32, whole: Whole) -> ChatChoice {
        let said = whole.said;
        let message = ChatMessage {
            role: "assistant",
            content: said.content,
            reasoning_content: Some(said.reasoning).filter(|thoughts| !thoughts.is_empty()),
            refusal: None,
        };
        ChatChoice { index, message, logprobs: self.logprobs(said.scores), finish_reason: whole.reason }
    }

    fn chunk(&mut self, part: Part) -> Option<ChatChunkChoice> {
        Some(match part {
            Part::Begin { index, .. } => {
                let delta = ChatDelta {
                    role: Some("assistant"),
                    content: Some(String::new()),
                    ..ChatDelta::default()
                };
                ChatChunkChoice { index, delta, logprobs: None, finish_reason: None }
            }
            Part::Text { index, piece } => {
                let thought = !piece.reasoning.is_empty();
                let delta = ChatDelta {
                    role: None,
                    content: (!thought || !piece.content.is_empty()).then_some(piece.content),
                    reasoning_content: thought.then_some(piece.reasoning),
                };
                ChatChunkChoice { index, delta, logprobs: self.logprobs(piece.scores), finish_reason: None }
            }
            Part::End { index, reason } => {
                let delta = ChatDelta::default();
                ChatChunkChoice { index, delta, logprobs: None, finish_reason: Some(reason) }
            }
        })
    }
}

impl ChatShape {
    fn logprobs(&self, scores: Vec<Score>) -> Option<ChatLogprobs> {
        let token = |token, logprob| {
            let bytes = self.tokenizer.piece(token);
            TokenLogprob {
                token: String::from_utf8_lossy(bytes).into_owned(),
                logprob: finite(logprob),
                bytes: bytes.to_vec(),
            }
        };
        let content = |score: Score| ChatLogprob {
            token: token(score.token, score.logprob.unwrap_or(f32::NEG_INFINITY)),
            top_logprobs: score.top.into_iter().map(|(rival, logprob)| token(rival, logprob)).collect(),
        };
        let logprobs = || ChatLogprobs { content: scores.into_iter().map(content).collect(), refusal: None };
        self.logprobs.then(logprobs)
    }
}

/// JSON has no infinity; OpenAI writes -9999 for a token that cannot be.
pub(crate) fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}
