//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use motet_text::Tokenizer;

use crate::answer::{Item, Part, Tally, Whole};
use crate::app::App;
use crate::ask::{self, Ask};
use crate::demand::read_demand;
use crate::errors::ApiError;
use crate::fields::Fields;
use crate::openai::messages::{read_messages, read_template_variables};
use crate::openai::shapes::{
    CalledFunction, ChatChoice, ChatChunkChoice, ChatDelta, ChatLogprob, ChatLogprobs, ChatMessage, Head,
    Reply, TokenLogprob, ToolCall, Usage, finish_reason, token_text,
};
use crate::params::{MAX_TOP, read_params};
use crate::reader::Said;
use crate::shape::{Events, Shape, json};
use crate::talk::{Ending, Talk};
use crate::voice::{Piece, Score};

/// Answers a conversation.
pub(crate) async fn chat(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    ask::answer(app, request, understand).await
}

fn understand(app: &App, fields: &Fields<'_>) -> Result<Ask, ApiError> {
    let params = read_params(fields, &app.model.tokenizer, 1)?;
    let logprobs = read_logprobs(fields)?;
    let streaming = read_stream(fields)?;
    let talk = read_talk(fields)?;
    let prompts = vec![talk.prompt(app, "messages")?];
    let object = if streaming.is_some() { "chat.completion.chunk" } else { "chat.completion" };
    let shape = ChatShape {
        head: Head::new("chatcmpl", object, app, &params),
        tokenizer: app.model.tokenizer.clone(),
        logprobs: logprobs.is_some(),
        usage: streaming.unwrap_or_default(),
    };
    Ok(Ask {
        params,
        prompts,
        logprobs,
        param: "messages",
        stream: streaming.is_some(),
        shape: Box::new(shape),
    })
}

/// The conversation of a body.
///
/// # Errors
/// 400 that names what is wrong.
pub(crate) fn read_talk(fields: &Fields<'_>) -> Result<Talk, ApiError> {
    let goes_on = fields.flag("continue_final_message")?.unwrap_or(false);
    let answers = fields.flag("add_generation_prompt")?;
    let ending = match (goes_on, answers) {
        (true, Some(true)) => {
            let what = "can't be true together with 'add_generation_prompt'";
            return Err(fields.wrong("continue_final_message", what));
        }
        (true, _) => Ending::LastMessage,
        (false, Some(false)) => Ending::Bare,
        (false, _) => Ending::Answer,
    };
    Ok(Talk {
        messages: read_messages(fields)?,
        demand: read_demand(fields)?,
        variables: read_template_variables(fields)?,
        ending,
    })
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

/// When a stream counts its tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct StreamUsage {
    /// In a last chunk without choices.
    pub(crate) at_the_end: bool,
    /// In all chunks.
    pub(crate) always: bool,
}

/// `stream` and `stream_options`; `None`: the whole answer at once.
///
/// # Errors
/// 400 where one is not what it must be.
pub(crate) fn read_stream(body: &Fields<'_>) -> Result<Option<StreamUsage>, ApiError> {
    let stream = body.flag("stream")?.unwrap_or(false);
    // Clients that don't stream send options all the same.
    let usage = match body.get("stream_options") {
        None => StreamUsage::default(),
        Some(options) => {
            let options = Fields::inside(options, "stream_options".to_string())?;
            StreamUsage {
                at_the_end: options.flag("include_usage")?.unwrap_or(false),
                always: options.flag("continuous_usage_stats")?.unwrap_or(false),
            }
        }
    };
    Ok(stream.then_some(usage))
}

impl StreamUsage {
    /// What a chunk before the last says of usage.
    pub(crate) fn so_far(self, tally: &Tally) -> Option<Option<Usage>> {
        if self.always { Some(Some(tally.into())) } else { self.at_the_end.then_some(None) }
    }
}

struct ChatShape {
    head: Head,
    tokenizer: Arc<Tokenizer>,
    /// Whether log-probabilities were asked for.
    logprobs: bool,
    usage: StreamUsage,
}

impl Shape for ChatShape {
    fn part(&mut self, part: Part, tally: &Tally, events: &mut Events) {
        let mut chunk = |choice: ChatChunkChoice, last: bool| {
            events.push(&Reply {
                head: &self.head,
                choices: vec![choice],
                usage: self.usage.so_far(tally),
                timings: last.then(|| tally.into()),
            });
        };
        match part {
            Part::Started { .. } => {}
            Part::Begin { index, .. } => {
                let delta = ChatDelta {
                    role: Some("assistant"),
                    content: Some(String::new()),
                    ..ChatDelta::default()
                };
                chunk(ChatChunkChoice { index, delta, logprobs: None, finish_reason: None }, false);
            }
            Part::Goes { index, piece: Piece { said, scores } } => {
                let mut logprobs = self.logprobs(scores);
                // Scores come with the text that they belong to, or with none.
                let mut deltas: Vec<ChatDelta> = said.into_iter().filter_map(delta).collect();
                if deltas.is_empty() && logprobs.is_some() {
                    deltas.push(ChatDelta { content: Some(String::new()), ..ChatDelta::default() });
                }
                for delta in deltas {
                    let logprobs = logprobs.take();
                    chunk(ChatChunkChoice { index, delta, logprobs, finish_reason: None }, false);
                }
            }
            Part::End { index, reason } => {
                let delta = ChatDelta::default();
                let finish_reason = Some(finish_reason(&reason));
                chunk(ChatChunkChoice { index, delta, logprobs: None, finish_reason }, true);
            }
        }
    }

    fn close(&mut self, tally: &Tally, events: &mut Events) {
        if self.usage.at_the_end {
            let usage = Some(Some(tally.into()));
            let timings = Some(tally.into());
            events.push(&Reply::<ChatChunkChoice> { head: &self.head, choices: Vec::new(), usage, timings });
        }
        events.push_word("[DONE]");
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.push(&error.envelope());
    }

    fn whole(&mut self, choices: Vec<Whole>, tally: &Tally) -> String {
        let choices = (0..).zip(choices).map(|(index, whole)| self.choice(index, whole)).collect();
        json(&Reply {
            head: &self.head,
            choices,
            usage: Some(Some(tally.into())),
            timings: Some(tally.into()),
        })
    }
}

/// What a chunk adds; nothing where a call only ends.
fn delta(said: Said) -> Option<ChatDelta> {
    let call = |call| ChatDelta { tool_calls: vec![call], ..ChatDelta::default() };
    Some(match said {
        Said::Reasoning(text) => {
            ChatDelta { reasoning_content: Some(text.clone()), reasoning: Some(text), ..ChatDelta::default() }
        }
        Said::Text(text) => ChatDelta { content: Some(text), ..ChatDelta::default() },
        Said::CallBegin { index, id, name } => call(ToolCall {
            index: Some(index),
            id: Some(id),
            kind: Some("function"),
            function: CalledFunction { name: Some(name), arguments: String::new() },
        }),
        Said::CallArguments { index, fragment } => call(ToolCall {
            index: Some(index),
            function: CalledFunction { name: None, arguments: fragment },
            ..ToolCall::default()
        }),
        Said::CallEnd { .. } => return None,
    })
}

impl ChatShape {
    fn choice(&self, index: u32, whole: Whole) -> ChatChoice {
        let (text, reasoning) =
            (whole.text(), Some(whole.reasoning()).filter(|thoughts| !thoughts.is_empty()));
        let call = |item| match item {
            Item::Call { id, name, arguments } => Some(ToolCall {
                index: None,
                id: Some(id),
                kind: Some("function"),
                function: CalledFunction { name: Some(name), arguments },
            }),
            Item::Reasoning(_) | Item::Text(_) => None,
        };
        let tool_calls: Vec<ToolCall> = whole.items.into_iter().filter_map(call).collect();
        let message = ChatMessage {
            role: "assistant",
            content: Some(text).filter(|text| !text.is_empty() || tool_calls.is_empty()),
            reasoning_content: reasoning.clone(),
            reasoning,
            tool_calls,
            refusal: None,
        };
        let finish_reason = finish_reason(&whole.reason);
        ChatChoice { index, message, logprobs: self.logprobs(whole.scores), finish_reason }
    }

    fn logprobs(&self, scores: Vec<Score>) -> Option<ChatLogprobs> {
        let token = |token, logprob| {
            let bytes = self.tokenizer.piece(token);
            TokenLogprob { token: token_text(bytes), logprob: finite(logprob), bytes: bytes.to_vec() }
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
