//! The stream of one request's events: a small ring between the engine's thread and one reader.
//!
//! The request owns it: dropping the reading end is the cancellation, and when the writing ends are gone the stream
//! ends. The ring is sized for the whole answer when the request is submitted, so the engine never allocates and
//! never waits for a reader. No async runtime is needed; any executor can poll it, and so can a plain thread.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// What happens to a request, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A choice has a place and begins to run; once per choice.
    Started {
        /// Which of the request's choices.
        choice: u32,
        /// Tokens of the prompt that need not be read again.
        cached_tokens: usize,
        /// Key of the noise: the request's or a random one.
        seed: u64,
    },
    /// A row was run, if `digests` were asked for. It comes before the token that was chosen from the row.
    Row {
        /// Which of the request's choices.
        choice: u32,
        /// The row's position; a row that is run again comes again.
        position: usize,
        /// Digest of the bits of its logits.
        digest: u64,
    },
    /// The score of the prompt's next token (from the second on), if `prompt_logprobs` was asked for.
    Prompt(Scored),
    /// The next token of a choice.
    Token {
        /// Which of the request's choices.
        choice: u32,
        /// The token and what was asked about it.
        scored: Scored,
    },
    /// A choice is complete.
    Finished {
        /// Which of the request's choices.
        choice: u32,
        /// Why it ended.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
    /// The request failed as a whole; nothing follows.
    Failed(StreamError),
}

/// A token and what was asked about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Scored {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability under the raw logits, if asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens with their log-probabilities, best first, if asked for.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose this end token; it was not published.
    EndToken(u32),
    /// The request's [`Cut`](crate::Cut) said so; its last token was published.
    Cut,
    /// `max_tokens` or the end of the context.
    Length,
}

/// Tokens of one choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// In the prompt.
    pub prompt: usize,
    /// Of the prompt, found in the prefix cache.
    pub cached: usize,
    /// Chosen, the end token included.
    pub generated: usize,
    /// Proposed by a drafter.
    pub drafted: usize,
    /// Of those, chosen.
    pub accepted: usize,
}

/// Why a request that was running ended without an answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StreamError {
    /// The engine was closed.
    #[error("the engine was closed")]
    EngineClosed,
    /// A hidden row or a logit was not a number or infinite.
    #[error("the network produced a value that is not finite at position {position}")]
    NonFinite {
        /// First position of the rows in that step.
        position: usize,
    },
    /// The step that computed this request failed; others go on.
    #[error("the step failed: {0}")]
    DeviceFailed(String),
    /// The workspace could not grow to what the request needs.
    #[error("no memory for this request: {0}")]
    Memory(String),
    /// The answer can't keep to the form that was asked for.
    #[error("the answer can't keep to its form: {0}")]
    Form(String),
    /// A step did not end for so long that the engine was given up.
    #[error("a step has not ended within {0:?}; the engine has stopped")]
    Stalled(Duration),
}

/// An event as it lies in the ring: fixed size, its list of likely tokens beside it.
enum Item {
    Started { choice: u32, cached_tokens: usize, seed: u64 },
    Row { choice: u32, position: usize, digest: u64 },
    Prompt(Token),
    Token { choice: u32, token: Token },
    Finished { choice: u32, reason: FinishReason, usage: Usage },
    Failed(StreamError),
}

/// A scored token whose `top` entries lie in [`Ring::tops`].
#[derive(Clone, Copy)]
pub(crate) struct Token {
    pub(crate) token: u32,
    pub(crate) logprob: f32,
    top: u8,
}

impl Token {
    pub(crate) fn new(token: u32, logprob: f32) -> Self {
        Self { token, logprob, top: 0 }
    }
}

struct Ring {
    items: VecDeque<Item>,
    tops: VecDeque<(u32, f32)>,
    /// Choices that have not finished.
    open: u32,
    waker: Option<Waker>,
}

struct Channel {
    ring: Mutex<Ring>,
    arrived: Condvar,
    /// The reader is gone.
    abandoned: AtomicBool,
}

/// What a ring must hold at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StreamSize {
    pub(crate) choices: u32,
    /// Tokens over all choices, prompt scores and digests included. (Rows that are run again have digests beyond that;
    /// then the ring grows if nobody reads it.)
    pub(crate) tokens: usize,
    /// Likely tokens over all of them.
    pub(crate) tops: usize,
}

impl StreamSize {
    /// Bytes of a ring for `tokens` tokens without lists of likely ones: for the plan.
    pub(crate) fn bytes(tokens: usize) -> u64 {
        ((tokens + 2) * size_of::<Item>() + size_of::<Channel>()) as u64
    }
}

/// The reading end. Dropping it cancels the request.
pub struct Stream {
    channel: Arc<Channel>,
}

/// The writing end of one choice. Dropping it before the choice has finished fails the stream with `EngineClosed`.
pub(crate) struct Sender {
    channel: Arc<Channel>,
    choice: u32,
    done: bool,
}

/// A stream with the writing ends of its choices.
pub(crate) fn stream(size: StreamSize) -> (Vec<Sender>, Stream) {
    let ring = Ring {
        items: VecDeque::with_capacity(size.tokens + 2 * size.choices as usize + 1),
        tops: VecDeque::with_capacity(size.tops),
        open: size.choices,
        waker: None,
    };
    let (arrived, abandoned) = (Condvar::new(), AtomicBool::new(false));
    let channel = Arc::new(Channel { ring: Mutex::new(ring), arrived, abandoned });
    let senders =
        (0..size.choices).map(|choice| Sender { channel: channel.clone(), choice, done: false }).collect();
    (senders, Stream { channel })
}

/// Ends a stream while its writing ends are out of reach, on a thread that hangs. It keeps nothing alive.
pub(crate) struct Breaker(Weak<Channel>);

impl Breaker {
    /// Whether there is a stream that has not ended.
    pub(crate) fn is_of_use(&self) -> bool {
        self.0.upgrade().is_some_and(|channel| channel.ring.lock().open > 0)
    }

    pub(crate) fn fail(&self, error: StreamError) {
        if let Some(channel) = self.0.upgrade() {
            channel.push(Item::Failed(error), &[]);
        }
    }
}

impl Sender {
    /// What ends the stream in this sender's place.
    pub(crate) fn breaker(&self) -> Breaker {
        Breaker(Arc::downgrade(&self.channel))
    }

    /// Whether the reader has left: nothing more should be computed for it.
    pub(crate) fn abandoned(&self) -> bool {
        self.channel.abandoned.load(Ordering::Acquire)
    }

    pub(crate) fn started(&self, cached_tokens: usize, seed: u64) {
        self.channel.push(Item::Started { choice: self.choice, cached_tokens, seed }, &[]);
    }

    pub(crate) fn row(&self, position: usize, digest: u64) {
        self.channel.push(Item::Row { choice: self.choice, position, digest }, &[]);
    }

    pub(crate) fn prompt(&self, token: Token, top: &[(u32, f32)]) {
        self.channel.push(Item::Prompt(Token { top: top.len() as u8, ..token }), top);
    }

    pub(crate) fn token(&self, token: Token, top: &[(u32, f32)]) {
        let token = Token { top: top.len() as u8, ..token };
        self.channel.push(Item::Token { choice: self.choice, token }, top);
    }

    pub(crate) fn finish(mut self, reason: FinishReason, usage: Usage) {
        self.done = true;
        self.channel.push(Item::Finished { choice: self.choice, reason, usage }, &[]);
    }

    /// Ends the stream with an error, if it has not ended yet.
    pub(crate) fn fail(&mut self, error: StreamError) {
        if !std::mem::replace(&mut self.done, true) {
            self.channel.push(Item::Failed(error), &[]);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if !self.done {
            self.channel.push(Item::Failed(StreamError::EngineClosed), &[]);
        }
    }
}

impl Channel {
    /// Appends an item unless the stream has ended, and wakes the reader.
    fn push(&self, item: Item, top: &[(u32, f32)]) {
        let mut ring = self.ring.lock();
        if ring.open == 0 {
            return;
        }
        match item {
            Item::Finished { .. } => ring.open -= 1,
            Item::Failed(_) => {
                ring.open = 0;
                // The other choices of a failed request have nobody to talk to.
                self.abandoned.store(true, Ordering::Release);
            }
            _ => {}
        }
        ring.items.push_back(item);
        ring.tops.extend(top);
        let waker = ring.waker.take();
        drop(ring);
        self.arrived.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Ring {
    fn pop(&mut self) -> Option<Event> {
        Some(match self.items.pop_front()? {
            Item::Started { choice, cached_tokens, seed } => Event::Started { choice, cached_tokens, seed },
            Item::Row { choice, position, digest } => Event::Row { choice, position, digest },
            Item::Prompt(token) => Event::Prompt(self.scored(token)),
            Item::Token { choice, token } => Event::Token { choice, scored: self.scored(token) },
            Item::Finished { choice, reason, usage } => Event::Finished { choice, reason, usage },
            Item::Failed(error) => Event::Failed(error),
        })
    }

    fn scored(&mut self, token: Token) -> Scored {
        Scored {
            token: token.token,
            logprob: (!token.logprob.is_nan()).then_some(token.logprob),
            top: self.tops.drain(..token.top as usize).collect(),
        }
    }
}

impl Stream {
    /// The next event; `None` once every choice has finished or the request has failed.
    pub async fn next(&mut self) -> Option<Event> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// The same for hand-written futures.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        let mut ring = self.channel.ring.lock();
        if let Some(event) = ring.pop() {
            return Poll::Ready(Some(event));
        }
        if ring.open == 0 {
            return Poll::Ready(None);
        }
        ring.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    /// The next event; parks the calling thread until there is one.
    pub fn blocking_next(&mut self) -> Option<Event> {
        let mut ring = self.channel.ring.lock();
        loop {
            if let Some(event) = ring.pop() {
                return Some(event);
            }
            if ring.open == 0 {
                return None;
            }
            self.channel.arrived.wait(&mut ring);
        }
    }

    /// The next event if there is one now.
    pub fn try_next(&mut self) -> Option<Event> {
        self.channel.ring.lock().pop()
    }

    /// Whether every choice has finished (or the request failed) and all events were read.
    pub fn is_over(&self) -> bool {
        let ring = self.channel.ring.lock();
        ring.open == 0 && ring.items.is_empty()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.channel.abandoned.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Wake;

    fn one() -> (Sender, Stream) {
        let (mut senders, stream) = stream(StreamSize { choices: 1, tokens: 4, tops: 0 });
        (senders.remove(0), stream)
    }

    struct Flag(AtomicBool);

    impl Wake for Flag {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_waiting_task_is_woken_by_the_next_event() {
        let (sender, mut stream) = one();
        let flag = Arc::new(Flag(AtomicBool::new(false)));
        let waker = flag.clone().into();
        let mut cx = Context::from_waker(&waker);
        assert!(stream.poll_next(&mut cx).is_pending());
        sender.token(Token::new(5, f32::NAN), &[]);
        assert!(flag.0.load(Ordering::SeqCst));
        let scored = Scored { token: 5, logprob: None, top: vec![] };
        assert_eq!(stream.poll_next(&mut cx), Poll::Ready(Some(Event::Token { choice: 0, scored })));
        sender.finish(FinishReason::Length, Usage::default());
        assert!(matches!(stream.poll_next(&mut cx), Poll::Ready(Some(Event::Finished { .. }))));
        assert_eq!(stream.poll_next(&mut cx), Poll::Ready(None));
    }

    #[test]
    fn a_parked_thread_gets_every_event_in_order() {
        let (sender, mut stream) = one();
        let reader = std::thread::spawn(move || {
            let mut tokens = Vec::new();
            while let Some(Event::Token { scored, .. }) = stream.blocking_next() {
                tokens.push(scored.token);
            }
            tokens
        });
        (0..1000).for_each(|t| sender.token(Token::new(t, 0.0), &[(1, 2.0)]));
        sender.finish(FinishReason::Length, Usage::default());
        assert_eq!(reader.join().unwrap(), (0..1000).collect::<Vec<_>>());
    }

    #[test]
    fn a_sender_that_vanishes_is_an_engine_that_closed() {
        let (sender, mut stream) = one();
        drop(sender);
        assert_eq!(stream.blocking_next(), Some(Event::Failed(StreamError::EngineClosed)));
        assert_eq!(stream.blocking_next(), None);
    }

    #[test]
    fn a_stream_that_was_broken_off_has_no_more_to_say() {
        let (sender, mut stream) = one();
        let breaker = sender.breaker();
        assert!(breaker.is_of_use());
        sender.token(Token::new(5, 0.0), &[]);
        let error = StreamError::Stalled(Duration::from_secs(30));
        breaker.fail(error.clone());
        assert!(!breaker.is_of_use() && sender.abandoned());
        sender.token(Token::new(6, 0.0), &[]);
        sender.finish(FinishReason::Length, Usage::default());
        assert!(matches!(stream.blocking_next(), Some(Event::Token { .. })));
        assert_eq!(stream.blocking_next(), Some(Event::Failed(error)));
        assert_eq!(stream.blocking_next(), None);
    }

    #[test]
    fn a_reader_that_leaves_is_noticed() {
        let (sender, stream) = one();
        assert!(!sender.abandoned());
        drop(stream);
        assert!(sender.abandoned());
    }
}
