//! The one bounded queue between front ends and the engine's thread.
//!
//! Requests wait here in order of arrival. A request whose reader has left gives its place back at once: nobody waits
//! behind the dead. The lock is held for moments only, never during a step.

use crate::engine::Health;
use crate::request::{EngineLimits, Request, SubmitError};
use crate::stream::{Sender, Stream, StreamError, StreamSize, stream};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

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
        let rows =
            if request.digests { answers + request.prompt.len() * request.choices as usize } else { 0 };
        let tops = answers * usize::from(request.logprobs.unwrap_or(0))
            + scores * usize::from(request.prompt_logprobs.unwrap_or(0));
        let (senders, stream) =
            stream(StreamSize { choices: request.choices, tokens: answers + scores + rows, tops });
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
    /// Choices that left while they waited and were not counted yet.
    abandoned: u64,
    door: Door,
    loading: bool,
    /// When the last step ended, or the first rows became ready; `None` while there are no rows.
    busy_since: Option<Duration>,
}

/// The queue and what is known of the engine's thread.
pub(crate) struct Queue {
    inside: Mutex<Inside>,
    /// Something came in, or the door was moved.
    knock: Condvar,
    /// The thread has nothing left to do.
    rest: Condvar,
    /// Choices that may wait.
    capacity: usize,
    /// A step that takes longer than this is overdue.
    overdue: Duration,
}

impl Queue {
    pub(crate) fn new(capacity: usize, overdue: Duration) -> Self {
        let inside = Inside {
            waiting: VecDeque::new(),
            abandoned: 0,
            door: Door::Open,
            loading: true,
            busy_since: None,
        };
        let (knock, rest) = (Condvar::new(), Condvar::new());
        Self { inside: Mutex::new(inside), knock, rest, capacity, overdue }
    }

    pub(crate) fn push(&self, waiting: Waiting) -> Result<(), SubmitError> {
        let mut inside = self.inside.lock();
        match inside.door {
            Door::Open => {}
            Door::Draining => return Err(SubmitError::Draining),
            Door::Closed => return Err(SubmitError::Closed),
        }
        inside.bury_the_dead();
        let choices = inside.choices();
        if choices + waiting.senders.len() > self.capacity {
            // A place is free when one that runs has finished; nobody knows when, so it is a guess by the length.
            let retry_after = Duration::from_secs(1 + choices as u64 / 8);
            return Err(SubmitError::QueueFull { waiting: choices, retry_after });
        }
        inside.waiting.push_back(waiting);
        self.knock.notify_one();
        Ok(())
    }

    /// The request that has waited longest and still has a reader.
    pub(crate) fn pop(&self, now: Duration) -> Option<Waiting> {
        let mut inside = self.inside.lock();
        inside.bury_the_dead();
        let first = inside.waiting.pop_front()?;
        inside.busy_since.get_or_insert(now);
        Some(first)
    }

    /// Choices that left while they waited, since the last call.
    pub(crate) fn take_abandoned(&self) -> u64 {
        let mut inside = self.inside.lock();
        inside.bury_the_dead();
        std::mem::take(&mut inside.abandoned)
    }

    /// Choices that wait.
    pub(crate) fn len(&self) -> usize {
        self.inside.lock().choices()
    }

    /// Rows that the first request would add.
    pub(crate) fn rows_wanted(&self) -> usize {
        self.inside.lock().waiting.front().map_or(0, |w| w.request.prompt.len())
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
        let mut inside = self.inside.lock();
        inside.door = Door::Closed;
        self.knock.notify_one();
        self.rest.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.inside.lock().door == Door::Closed
    }

    /// Ends the streams of all that wait.
    pub(crate) fn fail_all(&self, error: &StreamError) {
        let waiting = std::mem::take(&mut self.inside.lock().waiting);
        for sender in waiting.into_iter().flat_map(|w| w.senders) {
            sender.fail(error.clone());
        }
    }

    /// The thread begins to run steps.
    pub(crate) fn loaded(&self) {
        self.inside.lock().loading = false;
        self.rest.notify_all();
    }

    /// The heartbeat: rows are ready and the step before has ended.
    pub(crate) fn busy(&self, now: Duration) {
        self.inside.lock().busy_since = Some(now);
    }

    /// No rows are ready.
    pub(crate) fn idle(&self) {
        self.inside.lock().busy_since = None;
        self.rest.notify_all();
    }

    /// Parks the engine's thread until a request waits or the engine is closed.
    pub(crate) fn wait_for_work(&self) {
        let mut inside = self.inside.lock();
        while inside.waiting.is_empty() && inside.door != Door::Closed {
            self.knock.wait(&mut inside);
        }
    }

    /// Parks the caller until the engine has loaded and neither runs nor waits for anything; `false` if that takes
    /// longer than `most`.
    pub(crate) fn wait_for_rest(&self, most: Duration) -> bool {
        let until = Instant::now() + most;
        let mut inside = self.inside.lock();
        let working = |i: &mut Inside| {
            i.door != Door::Closed && (i.loading || i.busy_since.is_some() || !i.waiting.is_empty())
        };
        !self.rest.wait_while_until(&mut inside, working, until).timed_out()
    }

    /// Parks the caller until the engine has loaded; `false` if it closed instead.
    pub(crate) fn wait_until_loaded(&self) -> bool {
        let mut inside = self.inside.lock();
        self.rest.wait_while(&mut inside, |i| i.loading && i.door != Door::Closed);
        !inside.loading
    }
}

impl Inside {
    /// Nobody waits behind requests whose readers have left.
    fn bury_the_dead(&mut self) {
        let before = self.choices();
        self.waiting.retain(|w| !w.abandoned());
        self.abandoned += (before - self.choices()) as u64;
    }

    fn choices(&self) -> usize {
        self.waiting.iter().map(|w| w.senders.len()).sum()
    }
}
