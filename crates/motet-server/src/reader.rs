//! What an answer says, told apart: thinking, text, calls of tools.

use motet_text::{Parts, ReasoningSplit};

/// What an answer says next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Said {
    /// Thinking goes on.
    Reasoning(String),
    /// The answer's text goes on.
    Text(String),
    /// A call begins.
    CallBegin { index: u32, id: String, name: String },
    /// The arguments of a call go on: a piece of JSON.
    CallArguments { index: u32, fragment: String },
    /// A call is complete.
    CallEnd { index: u32 },
}

/// Reads an answer.
#[derive(Debug, Clone)]
pub(crate) struct AnswerReader(ReasoningSplit);

impl AnswerReader {
    pub(crate) fn new(split: ReasoningSplit) -> AnswerReader {
        AnswerReader(split)
    }

    pub(crate) fn plain() -> AnswerReader {
        AnswerReader(ReasoningSplit::off())
    }

    pub(crate) fn push(&mut self, text: &str, out: &mut Vec<Said>) {
        say(self.0.push(text), out);
    }

    pub(crate) fn finish(&mut self, out: &mut Vec<Said>) {
        say(self.0.finish(), out);
    }

    pub(crate) fn wants(&self, _token: u32) -> bool {
        false
    }

    pub(crate) fn push_special(&mut self, _token: u32, _name: &str, _out: &mut Vec<Said>) {}

    pub(crate) fn in_call(&self) -> bool {
        false
    }

    pub(crate) fn calls(&self) -> u32 {
        0
    }
}

fn say(parts: &Parts, out: &mut Vec<Said>) {
    if !parts.reasoning.is_empty() {
        out.push(Said::Reasoning(parts.reasoning.clone()));
    }
    if !parts.content.is_empty() {
        out.push(Said::Text(parts.content.clone()));
    }
}
