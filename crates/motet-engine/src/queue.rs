//! The one bounded queue between front ends and the engine's thread.
//!
//! Requests wait here in order of arrival. A request whose reader has left gives its place back at once: nobody waits
//! behind the dead. The lock is held for moments only, never during a step.

use crate::engine::Health;
use crate::request::{EngineLimits, Request, SubmitError};
use crate::stream::{Sender, Stream, StreamSize, stream};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::time::Duration;

/// A request that waits, with the writing ends of its choices.
pub(crate) struct Waiting {
    pub(crate) request: Request,
    pub(crate) senders: Vec<Sender>,
    /// Tokens of each answer at most.
    pub(crate) answer: usize,
    pub(crate) arrived: Duration,
}

impl Waiting {
    /// A checked request with its stream, which is sized for all that can come.
    pub(crate) fn new(request: Request, limits: &EngineLimits, now: Duration) -> (Self, Stream) {
        let answer = request.answer_limit(limits.context);
        let answers = answer * request.choices as usize;
        let scores = if request.prompt_logprobs.is_some() { request.prompt.len() } else { 0 };
        let tops = answers * usize::from(request.logprobs.unwrap_or(0))
            + scores * usize::from(request.prompt_logprobs.unwrap_or(0));
        let (senders, stream) =
            stream(StreamSize { choices: request.choices, tokens: answers + scores, tops });
        (Self { request, senders, answer, arrived: now }, stream)
    }

    fn abandoned(&self) -> bool {
        self.senders.iter().all(Sender::abandoned)
    }
}

/// Whether requests are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    Open,
    Draining,
    Closed,
}

struct Inside {
    waiting: VecDeque<Waiting>,
    door: Door,
    loading: bool,
    /// When the last step ended, while rows are ready.
    busy_since: Option<Duration>,
}

/// The queue and the state of the engine's thread.
pub(crate) struct Queue {
    inside: Mutex<Inside>,
    knock: Condvar,
    /// Choices that may wait.
    capacity: usize,
    /// A step that takes longer than this is overdue.
    overdue: Duration,
}

impl Queue {
    pub(crate) fn new(capacity: usize, overdue: Duration) -> Self {
        let inside = Inside { waiting: VecDeque::new(), door: Door::Open, loading: true, busy_since: None };
        Self { inside: Mutex::new(inside), knock: Condvar::new(), capacity, overdue }
    }

    pub(crate) fn push(&self, waiting: Waiting) -> Result<(), SubmitError> {
        let mut inside = self.inside.lock();
        match inside.door {
            Door::Open => {}
            Door::Draining => return Err(SubmitError::Draining),
            Door::Closed => return Err(SubmitError::Closed),
        }
        inside.waiting.retain(|w| !w.abandoned());
        let choices: usize = inside.waiting.iter().map(|w| w.senders.len()).sum();
        if choices + waiting.senders.len() > self.capacity {
            // A place is free when one that runs has finished; nobody knows when, so it is a guess by the length.
            let retry_after = Duration::from_secs(1 + choices as u64 / 8);
            return Err(SubmitError::QueueFull { waiting: choices, retry_after });
        }
        inside.waiting.push_back(waiting);
        self.knock.notify_one();
        Ok(())
    }

    pub(crate) fn health(&self, now: Duration) -> Health {
        let inside = self.inside.lock();
        let since = inside.busy_since.map(|t| now.saturating_sub(t));
        match (inside.door, since) {
            (Door::Closed, _) => Health::Closed,
            (_, Some(since)) if since > self.overdue => Health::Overdue { since },
            (Door::Draining, _) => Health::Draining,
            _ if inside.loading => Health::Loading,
            _ => Health::Ready,
        }
    }

    pub(crate) fn drain(&self) {
        let mut inside = self.inside.lock();
        if inside.door == Door::Open {
            inside.door = Door::Draining;
        }
        self.knock.notify_one();
    }

    pub(crate) fn close(&self) {
        self.inside.lock().door = Door::Closed;
        self.knock.notify_one();
    }
}
