//! A conversation as all chat interfaces come to it, and the prompt that it makes.

use motet_text::{Conversation, ReasoningSplit};
use serde_json::{Map, Value};

use crate::app::App;
use crate::ask::Prompt;
use crate::demand::{Choice, Demand};
use crate::errors::ApiError;
use crate::reader::AnswerReader;

/// A conversation that is to go on.
#[derive(Debug, Default)]
pub(crate) struct Talk {
    /// Messages as templates take them: text in `content`, calls in `tool_calls`, thinking in `reasoning_content`.
    pub(crate) messages: Vec<Value>,
    pub(crate) demand: Demand,
    /// More variables of the template.
    pub(crate) variables: Map<String, Value>,
    pub(crate) ending: Ending,
}

/// How the prompt ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Ending {
    /// With the beginning of an answer.
    #[default]
    Answer,
    /// Behind the last message.
    Bare,
    /// Within the last message, which goes on.
    LastMessage,
}

impl Talk {
    /// The prompt; `param` is the field that holds the messages.
    ///
    /// # Errors
    /// 400 where the model's template refuses the conversation.
    pub(crate) fn prompt(&self, app: &App, param: &str) -> Result<Prompt, ApiError> {
        // What is accepted is enforced.
        if self.demand.form.is_some() || matches!(self.demand.choice, Choice::Required | Choice::Named(_)) {
            let message = "Answers cannot be held to a form on this server.".to_string();
            return Err(
                ApiError::invalid(Some("response_format".to_string()), message).code("unsupported_value")
            );
        }
        let model = &app.model;
        let tools = &self.demand.tools;
        let conversation = Conversation {
            messages: &self.messages,
            tools: (!tools.is_empty()).then_some(tools.as_slice()),
            add_generation_prompt: self.ending == Ending::Answer,
            kwargs: Some(&self.variables),
        };
        let rendered = model.template.render(&conversation).map_err(|error| {
            ApiError::invalid(Some(param.to_string()), error.to_string()).code("template_error")
        })?;
        let (tokens, marks) = model.tokenizer.encode_prompt_of(&rendered.prompt, &[], &rendered.marks);
        let reader = if model.template.has_reasoning() {
            AnswerReader::new(ReasoningSplit::after_prompt(&rendered.prompt))
        } else {
            AnswerReader::plain()
        };
        Ok(Prompt { tokens, marks, reader, echo: None })
    }
}
