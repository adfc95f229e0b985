//! Runs conversations: each alone once, then together in one way after another, and compares.
//!
//! It knows engines only by a function that starts one, so it can be pointed at an engine that is wrong on purpose.

use std::collections::HashMap;
use std::error::Error;
use std::thread::sleep;
use std::time::{Duration, Instant};

use motet_cpu::Isa;
use motet_engine::{Engine, Options, Stream};
use motet_model::PAGE;
use serde::Serialize;

use super::conversation::{Conversation, Extent, MOST, Vocabulary};
use super::matrix::{Arrival, Reuse, Way};
use super::transcript::{Difference, Transcript};

/// How often streams are read.
const POLL: Duration = Duration::from_micros(500);

/// What an engine is started with.
pub(super) struct Setting {
    pub(super) threads: usize,
    pub(super) isa: Isa,
    pub(super) options: Options,
    /// With the least memory that the options allow.
    pub(super) tight: bool,
}

/// Starts an engine; its weights are loaded when this returns.
pub(super) type Start<'a> = &'a dyn Fn(Setting) -> Result<Engine, Box<dyn Error>>;

/// The model under test.
pub(super) struct Subject<'a> {
    pub(super) start: Start<'a>,
    pub(super) vocabulary: Vocabulary,
    /// Positions of a conversation at most.
    pub(super) context: usize,
    /// Bytes of one conversation's recurrent state.
    pub(super) recurrent: u64,
    /// Whether the scalar definition is too slow for whole conversations.
    pub(super) slow_in_scalar: bool,
}

/// What came of one way.
#[derive(Debug, Serialize)]
pub(super) struct Outcome {
    pub(super) way: Way,
    /// Conversations that ran.
    pub(super) conversations: usize,
    /// Rows of logits compared.
    pub(super) rows: usize,
    /// Rows that differ.
    pub(super) differing: usize,
    /// Where, for each conversation that differs.
    pub(super) differences: Vec<Found>,
    /// Why the run did not do what its way says, if it did not.
    pub(super) not_exercised: Option<String>,
    pub(super) seconds: f64,
}

/// A conversation that differs or failed.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    pub(super) conversation: usize,
    pub(super) rows: usize,
    #[serde(flatten)]
    pub(super) first: Option<Difference>,
    pub(super) failure: Option<String>,
}

/// Runs ways and remembers what conversations are alone.
pub(super) struct Runs<'a> {
    subject: Subject<'a>,
    alone: HashMap<(Extent, usize), Transcript>,
    deadline: Option<Instant>,
}

impl<'a> Runs<'a> {
    /// Nothing begins or goes on behind the deadline.
    pub(super) fn new(subject: Subject<'a>, deadline: Option<Instant>) -> Self {
        Self { subject, alone: HashMap::new(), deadline }
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Runs one way; `None` if the deadline came before its end.
    ///
    /// # Errors
    /// An engine that does not start or does not take a request.
    pub(super) fn run(&mut self, way: Way) -> Result<Option<Outcome>, Box<dyn Error>> {
        let begun = Instant::now();
        let short = self.subject.slow_in_scalar && way.isa == Isa::Scalar;
        let extent = if short { Extent::Short } else { Extent::Whole };
        let Subject { vocabulary, context, .. } = &self.subject;
        let conversations = Conversation::all(vocabulary, extent, way.conversations.min(MOST), *context);
        for (number, conversation) in conversations.iter().enumerate() {
            if !self.alone.contains_key(&(extent, number)) {
                let Some(alone) = self.alone(conversation)? else { return Ok(None) };
                self.alone.insert((extent, number), alone);
            }
        }
        if self.is_late() {
            return Ok(None);
        }
        let Some((heard, not_exercised)) = self.together(way, &conversations)? else { return Ok(None) };
        let mut outcome = Outcome {
            way,
            conversations: conversations.len(),
            rows: 0,
            differing: 0,
            differences: Vec::new(),
            not_exercised,
            seconds: begun.elapsed().as_secs_f64(),
        };
        for (number, transcript) in heard.into_iter().enumerate() {
            let comparison = transcript.compare(&self.alone[&(extent, number)], way.reuse != Reuse::Warm);
            outcome.rows += comparison.rows;
            outcome.differing += comparison.differing;
            if comparison.differing > 0 || transcript.failure.is_some() {
                outcome.differences.push(Found {
                    conversation: number,
                    rows: comparison.differing,
                    first: comparison.first,
                    failure: transcript.failure,
                });
            }
        }
        Ok(Some(outcome))
    }

    /// The conversation alone: a fresh engine, one thread, whole chunks.
    fn alone(&self, conversation: &Conversation) -> Result<Option<Transcript>, Box<dyn Error>> {
        let options = Options {
            sessions: 1,
            context: Some((conversation.pages() * PAGE).min(self.subject.context)),
            prefill_chunk: Some(512),
            ..Options::default()
        };
        let engine = (self.subject.start)(Setting { threads: 1, isa: Isa::best(), options, tight: false })?;
        let alone = std::slice::from_ref(conversation);
        let heard = self.converse(&engine, alone, true, Arrival::AtOnce)?;
        let Some(transcript) = heard.and_then(|mut heard| heard.pop()) else { return Ok(None) };
        match &transcript.failure {
            Some(failure) => Err(format!("a conversation alone failed: {failure}").into()),
            None => Ok(Some(transcript)),
        }
    }

    /// All conversations in one engine, and why that was not what the way says, if it was not.
    #[allow(clippy::type_complexity)]
    fn together(
        &self,
        way: Way,
        conversations: &[Conversation],
    ) -> Result<Option<(Vec<Transcript>, Option<String>)>, Box<dyn Error>> {
        let vocabulary = &self.subject.vocabulary;
        let engine = (self.subject.start)(self.setting(way, conversations))?;
        let warm: Vec<bool> =
            conversations.iter().map(|c| way.reuse == Reuse::Warm && c.can_be_warm()).collect();
        for (number, conversation) in conversations.iter().enumerate().filter(|&(number, _)| warm[number]) {
            let mut stream = engine.submit(conversation.forerunner(number, vocabulary))?;
            while !stream.is_over() {
                if self.is_late() {
                    return Ok(None);
                }
                while stream.try_next().is_some() {}
                sleep(POLL);
            }
        }
        let elder = match way.reuse {
            Reuse::SteppingBack => Some(engine.submit(Conversation::elder(vocabulary).request(false))?),
            _ => None,
        };
        let heard = self.converse(&engine, conversations, way.reuse != Reuse::Warm, way.arrival)?;
        drop(elder);
        let Some(heard) = heard else { return Ok(None) };
        let found = heard.iter().zip(&warm).filter(|(t, warm)| **warm && t.cached > 0).count();
        let wanted = warm.iter().filter(|&&warm| warm).count();
        let not_exercised = match way.reuse {
            Reuse::SteppingBack if engine.metrics().num_preemptions == 0 => {
                Some("no conversation stepped back".into())
            }
            Reuse::Warm if found < wanted => {
                Some(format!("{found} of {wanted} conversations found their prefix"))
            }
            _ => None,
        };
        Ok(Some((heard, not_exercised)))
    }

    /// The engine of a way. To make conversations step back there are just the pages of all prompts and of one more,
    /// older conversation.
    fn setting(&self, way: Way, conversations: &[Conversation]) -> Setting {
        let longest = conversations.iter().map(Conversation::pages).max().unwrap_or(1);
        let tight = way.reuse == Reuse::SteppingBack;
        let pages = match way.reuse {
            Reuse::Cold => longest,
            Reuse::Warm => 2 * longest,
            Reuse::SteppingBack => {
                let prompts: usize = conversations.iter().map(Conversation::prompt_pages).sum();
                longest.max(prompts + 1).max(3)
            }
        };
        let sessions = conversations.len() + usize::from(tight);
        let checkpoints = 4 * conversations.len() as u64 * self.subject.recurrent;
        let options = Options {
            sessions,
            context: Some((pages * PAGE).min(self.subject.context)),
            prefill_chunk: Some(way.chunk),
            checkpoint_memory: (way.reuse == Reuse::Warm).then_some(checkpoints),
            headroom: if tight { 0 } else { Options::default().headroom },
            poison: true,
            ..Options::default()
        };
        Setting { threads: way.threads, isa: way.isa, options, tight }
    }

    /// Lets conversations arrive and hears them to their ends; `None` if the deadline comes before.
    fn converse(
        &self,
        engine: &Engine,
        conversations: &[Conversation],
        digests_of_prompts: bool,
        arrival: Arrival,
    ) -> Result<Option<Vec<Transcript>>, Box<dyn Error>> {
        let mut heard: Vec<Transcript> =
            conversations.iter().map(|c| Transcript::new(c.prompt.len())).collect();
        let mut streams: Vec<(usize, Stream)> = Vec::new();
        let mut to_come: Vec<usize> = (0..conversations.len()).collect();
        if arrival != Arrival::Reversed {
            to_come.reverse(); // they are taken from the end
        }
        while !to_come.is_empty() || heard.iter().any(|t| !t.is_over) {
            while let Some(&next) = to_come.last() {
                let waits = streams.last().is_some_and(|(before, _)| {
                    arrival == Arrival::Staggered && heard[*before].generated == 0 && !heard[*before].is_over
                });
                if waits {
                    break;
                }
                to_come.pop();
                streams.push((next, engine.submit(conversations[next].request(digests_of_prompts))?));
            }
            for (number, stream) in &mut streams {
                while let Some(event) = stream.try_next() {
                    heard[*number].hear(event);
                }
            }
            if self.is_late() {
                return Ok(None);
            }
            sleep(POLL);
        }
        Ok(Some(heard))
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::Matrix;
    use super::*;
    use motet_engine::scripted::{Pace, Script, Scripted, Sketch};
    use motet_engine::{Machine, Plan};
    use std::sync::Arc;

    /// An engine over a scripted device; with two threads it has `other` instead.
    fn start(sketch: &Sketch, other: &Sketch, setting: Setting) -> Result<Engine, Box<dyn Error>> {
        let sketch = if setting.threads == 2 { other } else { sketch };
        let script = Scripted::new(Script::Random { end: None, mean: 100 });
        let device = Scripted { pace: Pace::Real(Arc::new(|_| Duration::from_micros(50))), ..script };
        let mut options = setting.options;
        if setting.tight {
            let plan = Plan::new(&sketch.network(), &options, Machine { memory: None }, &device)?;
            options.memory = Some(plan.smallest_memory);
        }
        let engine = device.start(sketch, &options)?;
        engine.wait_until_loaded()?;
        Ok(engine)
    }

    fn outcomes(sketch: Sketch, other: Sketch) -> Vec<Outcome> {
        let start = |setting: Setting| start(&sketch, &other, setting);
        let subject = Subject {
            start: &start,
            vocabulary: Vocabulary::new(sketch.vocab, |token| token < 3),
            context: sketch.context,
            recurrent: sketch.network().state().recurrent_floats as u64 * 4,
            slow_in_scalar: false,
        };
        let mut runs = Runs::new(subject, None);
        let ways = Matrix::new(vec![Isa::Scalar]).covering();
        ways.into_iter().map(|way| runs.run(way).unwrap().unwrap()).collect()
    }

    #[test]
    fn a_faithful_engine_passes_and_is_put_to_the_test() {
        for (window, recurrent) in [(None, false), (Some(100), false), (None, true)] {
            let sketch = Sketch { window, recurrent, ..Sketch::default() };
            let outcomes = outcomes(sketch, sketch);
            for outcome in &outcomes {
                assert!(outcome.rows > 0);
                assert_eq!(outcome.differing, 0, "{}: {:?}", outcome.way, outcome.differences);
            }
            // Prefixes are always found; who steps back, and when, is a matter of time.
            let exercised = |reuse| {
                outcomes.iter().filter(move |o| o.way.reuse == reuse).map(|o| o.not_exercised.is_none())
            };
            assert!(exercised(Reuse::Warm).all(|yes| yes));
            assert!(exercised(Reuse::SteppingBack).any(|yes| yes));
        }
    }

    #[test]
    fn an_engine_that_forgets_is_found_out() {
        let whole = Sketch::default();
        // With two threads, only the last 200 positions are seen: the first difference is at the row that should see
        // one more.
        let forgetful = Sketch { full: false, window: Some(200), ..whole };
        for outcome in outcomes(whole, forgetful) {
            assert_eq!(outcome.differing > 0, outcome.way.threads == 2, "{}", outcome.way);
        }
    }

    #[test]
    fn nothing_runs_behind_the_deadline() {
        let sketch = Sketch::default();
        let start = |setting: Setting| start(&sketch, &sketch, setting);
        let vocabulary = Vocabulary::new(sketch.vocab, |_| false);
        let subject =
            Subject { start: &start, vocabulary, context: 8192, recurrent: 0, slow_in_scalar: false };
        let mut runs = Runs::new(subject, Some(Instant::now()));
        assert!(runs.run(Matrix::new(vec![Isa::Scalar]).covering()[0]).unwrap().is_none());
    }
}
