//! How an answer looks in one of the interfaces: as a whole, or as the events of a stream.
//!
//! One core makes the parts of an answer; an interface only gives them its shape. A shape never sees tokens of anybody
//! else and never waits.

use std::collections::VecDeque;

use serde::Serialize;

use crate::answer::{Part, Tally, Whole};
use crate::errors::ApiError;

/// An interface's way to write an answer.
pub(crate) trait Shape: Send + 'static {
    /// How its events follow each other.
    fn framing(&self) -> Framing {
        Framing::ServerSentEvents
    }

    /// The stream begins; nothing is known of the answer yet.
    fn open(&mut self, _events: &mut Events) {}

    /// The answer goes on.
    fn part(&mut self, part: Part, tally: &Tally, events: &mut Events);

    /// The answer is complete.
    fn close(&mut self, tally: &Tally, events: &mut Events);

    /// The answer ends before its time.
    fn fail(&mut self, error: &ApiError, events: &mut Events);

    /// The whole answer as JSON.
    fn whole(&mut self, choices: Vec<Whole>, tally: &Tally) -> String;
}

/// How the events of a stream are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// `event: NAME`, `data: JSON` and an empty line.
    ServerSentEvents,
    /// A line of JSON each.
    JsonLines,
}

/// Events that have not gone out yet.
#[derive(Debug, Default)]
pub(crate) struct Events(VecDeque<Event>);

/// An event of a stream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) name: Option<&'static str>,
    pub(crate) data: String,
}

impl Events {
    /// An event without a name.
    pub(crate) fn push(&mut self, object: &impl Serialize) {
        self.0.push_back(Event { name: None, data: json(object) });
    }

    /// An event with a name.
    pub(crate) fn push_named(&mut self, name: &'static str, object: &impl Serialize) {
        self.0.push_back(Event { name: Some(name), data: json(object) });
    }

    /// An event that is no JSON.
    pub(crate) fn push_word(&mut self, word: &str) {
        self.0.push_back(Event { name: None, data: word.to_owned() });
    }

    /// Takes the oldest.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        self.0.pop_front()
    }
}

/// An object of ours as JSON. These have text keys and finite numbers only, so there is nothing that JSON can't say.
pub(crate) fn json(object: &impl Serialize) -> String {
    serde_json::to_string(object).unwrap_or_default()
}
