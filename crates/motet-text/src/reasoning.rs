//! Telling a model's thinking from its answer.
//!
//! Models with `<think>` templates write `<think>…</think>` first, then the answer; some templates open the tag
//! themselves. White space around the tags belongs to neither. The parts do not depend on how the text arrives.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// Splits a stream of text into reasoning and content.
#[derive(Debug, Clone)]
pub struct ReasoningSplit {
    state: State,
    /// Text that may turn out to be (part of) a tag, or white space before one.
    held: String,
    parts: Parts,
}

/// New text of both kinds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parts {
    /// Thinking: OpenAI's `reasoning_content`.
    pub reasoning: String,
    /// The answer.
    pub content: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// At the start: a tag may open.
    Start,
    /// After the opening tag, before any thought: white space is dropped.
    Opened,
    Reasoning,
    /// After the closing tag, before the answer: white space is dropped.
    Closed,
    Content,
}

impl ReasoningSplit {
    /// For an answer to this prompt. If the prompt ends by opening the tag, thinking goes on from there; if it ends by
    /// closing it, thinking is off; else the model may open it as its first word.
    pub fn after_prompt(prompt: &str) -> ReasoningSplit {
        let prompt = prompt.trim_end();
        let state = if prompt.ends_with(OPEN) {
            State::Opened
        } else if prompt.ends_with(CLOSE) {
            State::Closed
        } else {
            State::Start
        };
        ReasoningSplit { state, held: String::new(), parts: Parts::default() }
    }

    /// For a model without thinking: everything is content.
    pub fn off() -> ReasoningSplit {
        ReasoningSplit { state: State::Content, held: String::new(), parts: Parts::default() }
    }

    /// Takes the next text of the stream and returns what is certain by now.
    pub fn push(&mut self, text: &str) -> &Parts {
        self.parts.reasoning.clear();
        self.parts.content.clear();
        self.held.push_str(text);
        while self.step() {}
        &self.parts
    }

    /// What was still held back at the end of the stream.
    pub fn finish(&mut self) -> &Parts {
        self.parts.reasoning.clear();
        self.parts.content.clear();
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Opened | State::Reasoning => self.parts.reasoning.push_str(held.trim_end()),
            State::Start | State::Content => self.parts.content.push_str(&held),
            State::Closed => {}
        }
        self.state = State::Content;
        &self.parts
    }

    /// One step; whether there is another.
    fn step(&mut self) -> bool {
        match self.state {
            State::Start => {
                let word = self.held.trim_start();
                if let Some(thought) = word.strip_prefix(OPEN) {
                    self.held = thought.to_owned();
                    self.state = State::Opened;
                } else if OPEN.starts_with(word) {
                    return false;
                } else {
                    self.state = State::Content;
                }
                true
            }
            State::Opened | State::Closed => {
                let blank = self.held.len() - self.held.trim_start().len();
                self.held.drain(..blank);
                if self.held.is_empty() {
                    return false;
                }
                self.state = if self.state == State::Opened { State::Reasoning } else { State::Content };
                true
            }
            State::Reasoning => {
                if let Some(end) = self.held.find(CLOSE) {
                    self.parts.reasoning.push_str(self.held[..end].trim_end());
                    self.held.drain(..end + CLOSE.len());
                    self.state = State::Closed;
                    return true;
                }
                let tag = (1..CLOSE.len()).rev().find(|&length| self.held.ends_with(&CLOSE[..length]));
                let safe = self.held[..self.held.len() - tag.unwrap_or(0)].trim_end().len();
                self.parts.reasoning.extend(self.held.drain(..safe));
                false
            }
            State::Content => {
                self.parts.content.push_str(&self.held);
                self.held.clear();
                false
            }
        }
    }
}
