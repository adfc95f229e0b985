//! The events of the engine's streams, as parts of one answer.
//!
//! An answer owns its streams: dropping it cancels what has not been computed yet. A request with several prompts has
//! a stream for each; their choices are numbered through.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use motet_engine::{Event, FinishReason, Scored, Stream, StreamError};

use crate::app::{AnswerGuard, sentence};
use crate::errors::ApiError;
use crate::reader::Said;
use crate::voice::{Piece, Score, Voice};

/// What the answer brings next.
#[derive(Debug)]
pub(crate) enum Part {
    /// The first choice has a place in the engine: the tokens of its prompt, and those that need not be read again.
    Started { prompt: usize, cached: usize },
    /// A choice begins. With its prompt and the prompt's scores, if they are to be echoed.
    Begin { index: u32, echo: Option<Arc<Echo>> },
    /// A choice goes on.
    Goes { index: u32, piece: Piece },
    /// A choice is complete.
    End { index: u32, reason: Reason },
}

/// Why a choice is complete.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Reason {
    /// The model ended it, or nothing may follow.
    #[default]
    End,
    /// A stop string, which is no part of it.
    StopString(String),
    /// It may not be longer, or the context is full.
    Length,
    /// It calls tools.
    Calls,
}

/// The tokens of an answer, counted, and the times it took.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    /// Tokens of the prompts; of these, those that were in the prefix cache.
    pub(crate) prompt: usize,
    pub(crate) cached: usize,
    /// Tokens that were chosen; of these, those that were thinking.
    pub(crate) generated: usize,
    pub(crate) reasoning: usize,
    /// Tokens that were proposed as drafts; of these, those that were chosen.
    pub(crate) drafted: usize,
    pub(crate) accepted: usize,
    pub(crate) times: Times,
}

/// When things happened to an answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) asked: Instant,
    /// Its first choice had a place.
    pub(crate) started: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) last_token: Option<Instant>,
}

impl Default for Times {
    fn default() -> Times {
        Times { asked: Instant::now(), started: None, first_token: None, last_token: None }
    }
}

/// A prompt that is part of the answer.
#[derive(Debug, Default)]
pub(crate) struct Echo {
    pub(crate) text: String,
    /// Its tokens with their scores, if these were asked for; at first without log-probabilities.
    pub(crate) scores: Vec<Score>,
    /// How many of them have theirs.
    scored: usize,
}

impl Echo {
    /// A prompt whose scores are still to come.
    pub(crate) fn new(text: String, scores: Vec<Score>) -> Echo {
        // Nothing predicts the first token.
        Echo { text, scores, scored: 1 }
    }

    fn score(&mut self, scored: Scored) {
        if let Some(score) = self.scores.get_mut(self.scored) {
            score.logprob = scored.logprob;
            score.top = scored.top;
        }
        self.scored += 1;
    }
}

/// One prompt's share of an answer.
#[derive(Debug)]
pub(crate) struct Share {
    /// Tokens of the prompt.
    pub(crate) prompt: usize,
    /// A voice for each choice.
    pub(crate) voices: Vec<Voice>,
    pub(crate) echo: Option<Echo>,
}

/// An answer under way.
pub(crate) struct Answer {
    sources: Vec<Source>,
    ready: VecDeque<Part>,
    tally: Tally,
    _under_way: AnswerGuard,
}

struct Source {
    stream: Stream,
    prompt: usize,
    over: bool,
    /// The index of this prompt's first choice.
    first: u32,
    choices: Vec<Choice>,
    echo: Option<Echo>,
    /// The same, once the choices have begun.
    echoed: Option<Arc<Echo>>,
    /// Whether the prompt's tokens are counted.
    counted: bool,
}

struct Choice {
    voice: Voice,
    begun: bool,
    finished: bool,
}

impl Answer {
    /// The answer of these streams, one for each share.
    pub(crate) fn new(streams: Vec<Stream>, shares: Vec<Share>, under_way: AnswerGuard) -> Answer {
        let mut first = 0;
        let source = |(stream, share): (Stream, Share)| {
            let begin = first;
            first += share.voices.len() as u32;
            let choice = |voice| Choice { voice, begun: false, finished: false };
            Source {
                stream,
                prompt: share.prompt,
                over: false,
                first: begin,
                choices: share.voices.into_iter().map(choice).collect(),
                echo: share.echo,
                echoed: None,
                counted: false,
            }
        };
        let sources = streams.into_iter().zip(shares).map(source).collect();
        Answer { sources, ready: VecDeque::new(), tally: Tally::default(), _under_way: under_way }
    }

    /// The next part; `None` when all choices are complete. After an error there is nothing more.
    pub(crate) async fn next(&mut self) -> Option<Result<Part, ApiError>> {
        loop {
            if let Some(part) = self.ready.pop_front() {
                return Some(Ok(part));
            }
            let (source, event) = std::future::poll_fn(|context| self.poll_event(context)).await?;
            if let Err(error) = self.take(source, event) {
                self.sources.clear();
                return Some(Err(error));
            }
        }
    }

    /// The tokens of everything so far.
    pub(crate) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// An event of any stream; `None` if all are over.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Option<Event>)>> {
        let mut all_over = true;
        for (index, source) in self.sources.iter_mut().enumerate().filter(|(_, source)| !source.over) {
            all_over = false;
            if let Poll::Ready(event) = source.stream.poll_next(context) {
                return Poll::Ready(Some((index, event)));
            }
        }
        if all_over { Poll::Ready(None) } else { Poll::Pending }
    }

    /// Turns an event into parts.
    fn take(&mut self, source: usize, event: Option<Event>) -> Result<(), ApiError> {
        let source = &mut self.sources[source];
        match event {
            None => {
                source.over = true;
                let complete = source.choices.iter().all(|choice| choice.finished);
                if complete { Ok(()) } else { Err(failure(&StreamError::EngineClosed)) }
            }
            Some(Event::Started { cached_tokens, .. }) => {
                if self.tally.times.started.is_none() {
                    self.tally.times.started = Some(Instant::now());
                    self.ready.push_back(Part::Started { prompt: source.prompt, cached: cached_tokens });
                }
                Ok(())
            }
            Some(Event::Row { .. }) => Ok(()),
            Some(Event::Prompt(scored)) => {
                if let Some(echo) = &mut source.echo {
                    echo.score(scored);
                }
                Ok(())
            }
            Some(Event::Token { choice, scored }) => {
                let now = Instant::now();
                self.tally.times.first_token.get_or_insert(now);
                self.tally.times.last_token = Some(now);
                source.begin(choice, &mut self.ready);
                source.speak(choice, scored, &mut self.ready);
                Ok(())
            }
            Some(Event::Finished { choice, reason, usage }) => {
                source.begin(choice, &mut self.ready);
                let reasoning = source.finish(choice, reason, &mut self.ready);
                // The choices of a prompt share it.
                if !std::mem::replace(&mut source.counted, true) {
                    self.tally.prompt += usage.prompt;
                    self.tally.cached += usage.cached;
                }
                self.tally.generated += usage.generated;
                self.tally.reasoning += reasoning;
                self.tally.drafted += usage.drafted;
                self.tally.accepted += usage.accepted;
                Ok(())
            }
            Some(Event::Failed(error)) => Err(failure(&error)),
        }
    }
}

impl Source {
    fn begin(&mut self, choice: u32, ready: &mut VecDeque<Part>) {
        if !std::mem::replace(&mut self.choices[choice as usize].begun, true) {
            if let Some(echo) = self.echo.take() {
                self.echoed = Some(Arc::new(echo));
            }
            ready.push_back(Part::Begin { index: self.first + choice, echo: self.echoed.clone() });
        }
    }

    fn speak(&mut self, choice: u32, scored: Scored, ready: &mut VecDeque<Part>) {
        let Scored { token, logprob, top, .. } = scored;
        let score = logprob.map(|logprob| Score { token, logprob: Some(logprob), top, offset: 0 });
        let piece = self.choices[choice as usize].voice.push(token, score);
        if !piece.is_empty() {
            ready.push_back(Part::Goes { index: self.first + choice, piece });
        }
    }

    /// Ends a choice; returns how many of its tokens were thinking.
    fn finish(&mut self, choice: u32, reason: FinishReason, ready: &mut VecDeque<Part>) -> usize {
        let index = self.first + choice;
        let choice = &mut self.choices[choice as usize];
        choice.finished = true;
        let piece = choice.voice.finish();
        if !piece.is_empty() {
            ready.push_back(Part::Goes { index, piece });
        }
        let reason = match (choice.voice.hit(), reason) {
            (Some(stop), _) => Reason::StopString(stop.to_owned()),
            (None, FinishReason::Length) => Reason::Length,
            (None, _) if choice.voice.calls() > 0 => Reason::Calls,
            (None, FinishReason::EndToken(_) | FinishReason::Cut) => Reason::End,
        };
        ready.push_back(Part::End { index, reason });
        choice.voice.reasoning_tokens()
    }
}

/// Why the engine gave up, in the interface's words.
fn failure(error: &StreamError) -> ApiError {
    match error {
        StreamError::EngineClosed => ApiError::unavailable("engine_closed", sentence(error), 5),
        StreamError::NonFinite { .. } => ApiError::failed("non_finite", sentence(error)),
        StreamError::DeviceFailed(_) => ApiError::failed("device_failed", sentence(error)),
        StreamError::Form(_) => ApiError::failed("form_failed", sentence(error)),
        StreamError::Memory(_) => ApiError::unavailable("out_of_memory", sentence(error), 5),
        StreamError::Stalled(_) => ApiError::unavailable("engine_stalled", sentence(error), 5),
    }
}

/// One choice of an answer, whole.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub(crate) echo: Option<Arc<Echo>>,
    pub(crate) items: Vec<Item>,
    pub(crate) scores: Vec<Score>,
    pub(crate) reason: Reason,
}

/// A part of a whole choice, in the order in which they were said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item {
    /// Thinking.
    Reasoning(String),
    /// Text.
    Text(String),
    /// A call of a tool, with its arguments as JSON.
    Call { id: String, name: String, arguments: String },
}

impl Whole {
    fn add(&mut self, piece: Piece) {
        self.scores.extend(piece.scores);
        for said in piece.said {
            match (said, self.items.last_mut()) {
                (Said::Reasoning(more), Some(Item::Reasoning(text)))
                | (Said::Text(more), Some(Item::Text(text)))
                | (Said::CallArguments { fragment: more, .. }, Some(Item::Call { arguments: text, .. })) => {
                    text.push_str(&more);
                }
                (Said::Reasoning(text), _) => self.items.push(Item::Reasoning(text)),
                (Said::Text(text), _) => self.items.push(Item::Text(text)),
                (Said::CallBegin { id, name, .. }, _) => {
                    self.items.push(Item::Call { id, name, arguments: String::new() });
                }
                (Said::CallArguments { .. } | Said::CallEnd { .. }, _) => {}
            }
        }
    }

    /// All text together.
    pub(crate) fn text(&self) -> String {
        let text = |item: &Item| match item {
            Item::Text(text) => Some(text.clone()),
            Item::Reasoning(_) | Item::Call { .. } => None,
        };
        self.items.iter().filter_map(text).collect()
    }

    /// All thinking together.
    pub(crate) fn reasoning(&self) -> String {
        let thoughts = |item: &Item| match item {
            Item::Reasoning(text) => Some(text.clone()),
            Item::Text(_) | Item::Call { .. } => None,
        };
        self.items.iter().filter_map(thoughts).collect()
    }
}

/// Waits for a whole answer: its choices in order, and its tokens counted.
///
/// # Errors
/// What ended the answer before its time.
pub(crate) async fn whole(mut answer: Answer) -> Result<(Vec<Whole>, Tally), ApiError> {
    let count = answer.sources.iter().map(|source| source.choices.len()).sum();
    let mut choices: Vec<Whole> = std::iter::repeat_with(Whole::default).take(count).collect();
    while let Some(part) = answer.next().await {
        match part? {
            Part::Started { .. } => {}
            Part::Begin { index, echo } => choices[index as usize].echo = echo,
            Part::Goes { index, piece } => choices[index as usize].add(piece),
            Part::End { index, reason } => choices[index as usize].reason = reason,
        }
    }
    Ok((choices, *answer.tally()))
}
