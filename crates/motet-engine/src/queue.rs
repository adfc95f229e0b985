//! The one bounded queue between front ends and the engine's thread.
//!
//! Requests wait here in order of arrival. A request whose reader has left gives its place back at once: nobody waits
//! behind the dead. The lock is held for moments only, never during a step. So here is also what can be known of the
//! engine's thread while it is in one, and what ends its streams if it never comes back.

use crate::engine::Health;
use crate::request::{EngineLimits, Request, SubmitError};
use crate::stream::{Breaker, Sender, Stream, StreamError, StreamSize, stream};
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
    /// Closed for good by the watchdog, with the engine's thread in a step.
    Stalled,
}

impl Door {
    fn is_shut(self) -> bool {
        matches!(self, Door::Closed | Door::Stalled)
    }
}

/// Told when the watchdog has bitten.
pub(crate) type OnStall = Box<dyn FnOnce() + Send>;

struct Inside {
    waiting: VecDeque<Waiting>,
    /// Of all streams that have not ended, also those whose requests have left the queue.
    breakers: Vec<Breaker>,
    on_stall: Option<OnStall>,
    /// Choices that left while they waited and were not counted yet.
    abandoned: u64,
    door: Door,
    loading: bool,
    /// The engine's thread is wanted for something else than requests.
    called: bool,
    /// When the last step ended, or the first rows became ready; `None` while there are no rows.
    busy_since: Option<Duration>,
    /// The thread has ended.
    gone: bool,
    /// A batch has come back from the stages since somebody waited for one.
    landed: bool,
}

/// The queue and what is known of the engine's thread.
pub(crate) struct Queue {
    inside: Mutex<Inside>,
    /// Something came in, or the door was moved.
    knock: Condvar,
    /// The thread has nothing left to do.
    rest: Condvar,
    /// The thread has something to do, or has ended.
    stir: Condvar,
    /// Choices that may wait.
    capacity: usize,
}

impl Queue {
    pub(crate) fn new(capacity: usize) -> Self {
        let inside = Inside {
            waiting: VecDeque::new(),
            breakers: Vec::new(),
            on_stall: None,
            abandoned: 0,
            door: Door::Open,
            loading: true,
            called: false,
            busy_since: None,
            gone: false,
            landed: false,
        };
        let (knock, rest, stir) = (Condvar::new(), Condvar::new(), Condvar::new());
        Self { inside: Mutex::new(inside), knock, rest, stir, capacity }
    }

    pub(crate) fn push(&self, waiting: Waiting) -> Result<(), SubmitError> {
        let mut inside = self.inside.lock();
        match inside.door {
            Door::Open => {}
            Door::Draining => return Err(SubmitError::Draining),
            Door::Closed | Door::Stalled => return Err(SubmitError::Closed),
        }
        inside.bury_the_dead();
        let choices = inside.choices();
        if choices + waiting.senders.len() > self.capacity {
            // A place is free when one that runs has finished; nobody knows when, so it is a guess by the length.
            let retry_after = Duration::from_secs(1 + choices as u64 / 8);
            return Err(SubmitError::QueueFull { waiting: choices, retry_after });
        }
        inside.breakers.retain(Breaker::is_of_use);
        inside.breakers.extend(waiting.senders.first().map(Sender::breaker));
        inside.waiting.push_back(waiting);
        self.knock.notify_one();
        Ok(())
    }

    /// The request that has waited longest and still has a reader.
    pub(crate) fn pop(&self, now: Duration) -> Option<Waiting> {
        let mut inside = self.inside.lock();
        inside.bury_the_dead();
        let first = inside.waiting.pop_front()?;
        if inside.busy_since.is_none() {
            inside.busy_since = Some(now);
            self.stir.notify_all();
        }
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

    pub(crate) fn health(&self) -> Health {
        let inside = self.inside.lock();
        match inside.door {
            Door::Closed => Health::Closed,
            Door::Stalled => Health::Stalled,
            Door::Draining => Health::Draining,
            Door::Open if inside.loading => Health::Loading,
            Door::Open => Health::Ready,
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
        if inside.door != Door::Stalled {
            inside.door = Door::Closed;
        }
        self.knock.notify_one();
        self.rest.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.inside.lock().door.is_shut()
    }

    /// Ends the streams of all that wait.
    pub(crate) fn fail_all(&self, error: &StreamError) {
        let waiting = std::mem::take(&mut self.inside.lock().waiting);
        for mut sender in waiting.into_iter().flat_map(|w| w.senders) {
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
        if self.inside.lock().busy_since.replace(now).is_none() {
            self.stir.notify_all();
        }
    }

    /// No rows are ready.
    pub(crate) fn idle(&self) {
        self.inside.lock().busy_since = None;
        self.rest.notify_all();
    }

    /// Parks the engine's thread until a request waits, it is called, or the engine is closed.
    pub(crate) fn wait_for_work(&self) {
        let mut inside = self.inside.lock();
        while inside.waiting.is_empty() && !inside.called && !inside.door.is_shut() {
            self.knock.wait(&mut inside);
        }
        inside.called = false;
    }

    /// Has the engine's thread turn its wheel, work or none.
    pub(crate) fn call(&self) {
        self.inside.lock().called = true;
        self.knock.notify_one();
    }

    /// A batch has come back from the stages: whoever waits for it looks.
    pub(crate) fn landed(&self) {
        self.inside.lock().landed = true;
        self.knock.notify_one();
    }

    /// Parks the engine's thread until a batch has come back or the engine is closed; with `knock` also until a request
    /// waits.
    pub(crate) fn wait_for_landing(&self, knock: bool) {
        let mut inside = self.inside.lock();
        self.knock.wait_while(&mut inside, |i| {
            let knocked = knock && !i.waiting.is_empty();
            !i.landed && !knocked && !i.door.is_shut()
        });
        inside.landed = false;
    }

    /// Parks the caller until the engine has loaded and neither runs nor waits for anything; `false` if that takes
    /// longer than `most`.
    pub(crate) fn wait_for_rest(&self, most: Duration) -> bool {
        let until = Instant::now() + most;
        let mut inside = self.inside.lock();
        let working = |i: &mut Inside| {
            !i.door.is_shut() && (i.loading || i.busy_since.is_some() || !i.waiting.is_empty())
        };
        !self.rest.wait_while_until(&mut inside, working, until).timed_out()
    }

    /// Parks the caller until the engine has loaded; `false` if it closed instead.
    pub(crate) fn wait_until_loaded(&self) -> bool {
        let mut inside = self.inside.lock();
        self.rest.wait_while(&mut inside, |i| i.loading && !i.door.is_shut());
        !inside.loading
    }

    /// The engine's thread has ended, or never began.
    pub(crate) fn gone(&self) {
        self.close();
        self.inside.lock().gone = true;
        self.rest.notify_all();
        self.stir.notify_all();
    }

    /// Parks the caller until the engine's thread has ended; `false` if it never will.
    pub(crate) fn wait_until_gone(&self) -> bool {
        let mut inside = self.inside.lock();
        self.rest.wait_while(&mut inside, |i| !i.gone && i.door != Door::Stalled);
        inside.gone
    }

    /// Parks the watchdog for `pause`, and while there is nothing to watch; then the last heartbeat. `None` when the
    /// engine's thread has ended.
    pub(crate) fn next_heartbeat(&self, pause: Duration) -> Option<Duration> {
        let mut inside = self.inside.lock();
        self.stir.wait_while_for(&mut inside, |i| !i.gone, pause);
        self.stir.wait_while(&mut inside, |i| !i.gone && i.busy_since.is_none());
        inside.busy_since.filter(|_| !inside.gone)
    }

    /// Gives the engine up, unless its heart has beaten again: closes for good, ends all streams, and says so.
    pub(crate) fn stall(&self, heartbeat: Duration, error: &StreamError) -> bool {
        let mut inside = self.inside.lock();
        if inside.gone || inside.busy_since != Some(heartbeat) {
            return false;
        }
        inside.door = Door::Stalled;
        let (breakers, waiting) = (std::mem::take(&mut inside.breakers), std::mem::take(&mut inside.waiting));
        let on_stall = inside.on_stall.take();
        drop(inside);
        self.rest.notify_all();
        breakers.iter().for_each(|breaker| breaker.fail(error.clone()));
        drop(waiting);
        // A thread that waits for a stage ends; its streams have been told why.
        self.knock.notify_one();
        if let Some(tell) = on_stall {
            tell();
        }
        true
    }

    /// Calls `tell` when the watchdog bites; at once, if it has bitten.
    pub(crate) fn on_stall(&self, tell: OnStall) {
        let mut inside = self.inside.lock();
        if inside.door != Door::Stalled {
            inside.on_stall = Some(tell);
            return;
        }
        drop(inside);
        tell();
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
