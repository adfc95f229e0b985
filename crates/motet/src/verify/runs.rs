//! Runs conversations: each alone once, then together in one way after another, and compares.
//!
//! The engine's wheel is turned here, step by step: so a run is the same each time, arrivals come when the way says,
//! and the deadline is passed by one step at most. It knows devices only by a function that prepares a stage, so it
//! can be pointed at one that is wrong on purpose.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use motet_cpu::Isa;
use motet_engine::clock::RealClock;
use motet_engine::{Drafts, Driver, Engine, Options, Plan, Request, Stream, Turn};
use motet_model::{PAGE, Stage, Stages};
use serde::Serialize;

use super::conversation::{Conversation, Extent, MOST, Vocabulary};
use super::matrix::{Arrival, CHUNK, CONVERSATIONS, DRAFTS, Drafting, Heat, Named, PREFIX, Reuse, Way};
use super::transcript::{Difference, Transcript};
use super::witness::{Seen, Witness, Work};

/// Steps between arrivals that are staggered.
const APART: usize = 2;
/// Conversations for which there are pages beside the older one, when conversations are to step back.
const SEATED: usize = 3;
/// Behind so many steps the older conversation needs another page: all that have a seat have arrived, and none is over.
const CALM: usize = APART * SEATED;
/// Rows of the largest batch: a whole chunk has room beside others.
const ROWS: usize = 1024;

/// What a stage is prepared for.
pub(super) struct Setting {
    pub(super) threads: usize,
    pub(super) isa: Isa,
    pub(super) options: Options,
    /// With the least memory that the options allow.
    pub(super) tight: bool,
}

/// Plans, and loads the weights.
pub(super) type Prepare<'a> = &'a dyn Fn(Setting) -> Result<Prepared, Box<dyn Error>>;

/// A plan, and the stages that were loaded by it.
pub(super) type Prepared = (Plan, Vec<Box<dyn Stage>>);

/// The model under test.
pub(super) struct Subject<'a> {
    pub(super) prepare: Prepare<'a>,
    pub(super) vocabulary: Vocabulary,
    /// The stages behind which conversations run together; each alone runs on one.
    pub(super) stages: Stages,
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
    /// Rows of logits compared.
    pub(super) rows: usize,
    /// Rows that differ.
    pub(super) differing: usize,
    /// Where, for each conversation that differs.
    pub(super) differences: Vec<Found>,
    #[serde(flatten)]
    pub(super) observed: Observed,
    /// What the way says and the run did not do.
    pub(super) missed: Vec<Missed>,
    pub(super) seconds: f64,
}

/// What a run was seen to do.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Observed {
    /// Most conversations in one step.
    pub(super) together: usize,
    /// Most rows of one conversation in one step.
    pub(super) largest_chunk: usize,
    /// How often a conversation stepped back into the queue.
    pub(super) steps_back: u64,
    /// Tokens that were drafted, and those of them that were chosen.
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    /// Conversations that found pages of an earlier one.
    pub(super) found_prefixes: usize,
    /// Free pages filled with NaN before their first use.
    pub(super) fresh_pages: usize,
    /// The same of pages that conversations had given back.
    pub(super) returned_pages: usize,
}

/// A value of the way that the run did not live up to.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Missed {
    pub(super) dimension: &'static str,
    pub(super) reason: String,
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

impl Outcome {
    /// The values of the way that the run lived up to.
    pub(super) fn met(&self) -> Vec<Named> {
        let missed = |value: &Named| self.missed.iter().any(|missed| missed.dimension == value.0);
        self.way.values().into_iter().filter(|value| !missed(value)).collect()
    }
}

/// Runs ways and remembers what conversations are alone.
pub(super) struct Runs<'a> {
    subject: Subject<'a>,
    alone: HashMap<(Extent, Option<Heat>, usize), Transcript>,
    deadline: Option<Instant>,
    /// The longest that it took to prepare a stage.
    preparation: Duration,
}

impl<'a> Runs<'a> {
    /// Nothing begins or goes on behind the deadline.
    pub(super) fn new(subject: Subject<'a>, deadline: Option<Instant>) -> Self {
        Self { subject, alone: HashMap::new(), deadline, preparation: Duration::ZERO }
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
        let mut conversations = Conversation::all(vocabulary, extent, way.conversations.min(MOST), *context);
        let heat = way.drafts.map(|(_, heat)| heat);
        if let Some(heat) = heat {
            conversations.iter_mut().for_each(|conversation| conversation.repeat_at(heat));
        }
        for (number, conversation) in conversations.iter().enumerate() {
            if !self.alone.contains_key(&(extent, heat, number)) {
                let Some(alone) = self.alone(conversation)? else { return Ok(None) };
                self.alone.insert((extent, heat, number), alone);
            }
        }
        let Some((heard, observed, missed)) = self.together(way, &conversations)? else { return Ok(None) };
        let mut outcome = Outcome {
            way,
            rows: 0,
            differing: 0,
            differences: Vec::new(),
            observed,
            missed,
            seconds: begun.elapsed().as_secs_f64(),
        };
        for (number, transcript) in heard.into_iter().enumerate() {
            let comparison = transcript.compare(&self.alone[&(extent, heat, number)]);
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
    fn alone(&mut self, conversation: &Conversation) -> Result<Option<Transcript>, Box<dyn Error>> {
        let options = Options {
            sessions: 1,
            context: Some((conversation.pages() * PAGE).min(self.subject.context)),
            prefill_chunk: Some(512),
            poison: true,
            ..Options::default()
        };
        let setting = Setting { threads: 1, isa: Isa::best(), options, tight: false };
        let Some(mut wheel) = self.wheel(setting)? else { return Ok(None) };
        let mut alone = wheel.submit(conversation.request())?;
        if !wheel.turn_until(&mut alone, |heard| heard.is_over)? {
            return Ok(None);
        }
        match alone.heard.failure {
            Some(failure) => Err(format!("a conversation alone failed: {failure}").into()),
            None => Ok(Some(alone.heard)),
        }
    }

    /// All conversations in one engine: what was heard of each, what was seen, and what the way says and was not seen.
    #[allow(clippy::type_complexity, reason = "the parts go separate ways at once")]
    fn together(
        &mut self,
        way: Way,
        conversations: &[Conversation],
    ) -> Result<Option<(Vec<Transcript>, Observed, Vec<Missed>)>, Box<dyn Error>> {
        let elder = Elder::beside(way, conversations);
        let Some(mut wheel) = self.wheel(self.setting(way, conversations, elder))? else { return Ok(None) };
        let vocabulary = &self.subject.vocabulary;
        let warm = |c: &Conversation| way.reuse == Reuse::Warm && c.can_be_warm();
        for (number, conversation) in conversations.iter().enumerate().filter(|(_, c)| warm(c)) {
            let mut forerunner = wheel.submit(conversation.forerunner(number, vocabulary))?;
            if !wheel.turn_until(&mut forerunner, |heard| heard.is_over)? {
                return Ok(None);
            }
        }
        let mut present = None;
        if let Some(elder) = elder {
            let request = Conversation::elder(vocabulary, elder.pages, CALM).request();
            // A token a step, so that it needs its page when it is expected to.
            let elder = present.insert(wheel.submit(Request { drafts: false, ..request })?);
            if !wheel.turn_until(elder, |heard| heard.answered() > 0)? {
                return Ok(None);
            }
        }
        wheel.seen.forget_sizes();
        let Some(heard) = wheel.converse(conversations, way.arrival, present)? else { return Ok(None) };
        let Work { together, chunk, fresh_pages, returned_pages } = wheel.seen.work();
        let metrics = wheel.engine.metrics();
        let found = |(c, heard): &(&Conversation, &Transcript)| warm(c) && heard.cached > 0;
        let observed = Observed {
            together,
            largest_chunk: chunk,
            steps_back: metrics.num_preemptions,
            drafted: metrics.num_draft_tokens,
            accepted: metrics.num_accepted_tokens,
            found_prefixes: conversations.iter().zip(&heard).filter(found).count(),
            fresh_pages,
            returned_pages,
        };
        let prefixes = conversations.iter().filter(|c| warm(c)).count();
        Ok(Some((heard, observed, observed.missed(way, prefixes))))
    }

    /// The engine's setting for a way.
    fn setting(&self, way: Way, conversations: &[Conversation], elder: Option<Elder>) -> Setting {
        let longest = conversations.iter().map(Conversation::pages).max().unwrap_or(1);
        let pages = match (way.reuse, elder) {
            (_, Some(elder)) => elder.pool,
            (Reuse::Warm, _) => 2 * longest,
            _ => longest,
        };
        let checkpoints = 4 * conversations.len() as u64 * self.subject.recurrent;
        let (drafts, look_up) = match way.drafts.map(|(drafting, _)| drafting) {
            None | Some(Drafting::Off) => (Drafts::Off, false),
            Some(Drafting::Exactly(count)) => (Drafts::Exactly(count), false),
            Some(Drafting::Adaptive) => (Drafts::Auto, false),
            Some(Drafting::LookUp) => (Drafts::Exactly(3), true),
        };
        let options = Options {
            drafts,
            look_up,
            stages: self.subject.stages.clone(),
            sessions: conversations.len() + usize::from(elder.is_some()),
            context: Some((pages * PAGE).min(self.subject.context)),
            rows: ROWS,
            prefill_chunk: Some(way.chunk),
            checkpoint_memory: (way.reuse != Reuse::Cold).then_some(checkpoints),
            headroom: if elder.is_some() { 0 } else { Options::default().headroom },
            poison: true,
            ..Options::default()
        };
        Setting { threads: way.threads, isa: way.isa, options, tight: elder.is_some() }
    }

    /// An engine; `None` if the deadline is likely to come before it is ready.
    fn wheel(&mut self, setting: Setting) -> Result<Option<Wheel>, Box<dyn Error>> {
        let begun = Instant::now();
        if self.deadline.is_some_and(|deadline| begun + self.preparation >= deadline) {
            return Ok(None);
        }
        let (plan, stages) = (self.subject.prepare)(setting)?;
        let (stages, seen) = Witness::of(stages);
        let (engine, driver) = Engine::by_hand(plan, Arc::new(RealClock::default()), stages)?;
        self.preparation = self.preparation.max(begun.elapsed());
        Ok(Some(Wheel { engine, driver, seen, deadline: self.deadline }))
    }
}

/// A conversation that is older than those compared, for ways in which these are to step back: when all that have a
/// seat have arrived, pages have run out and the elder needs one more.
#[derive(Debug, Clone, Copy)]
struct Elder {
    /// Pages that it fills when it needs one more.
    pages: usize,
    /// Pages that there are.
    pool: usize,
}

impl Elder {
    fn beside(way: Way, conversations: &[Conversation]) -> Option<Self> {
        if way.reuse != Reuse::SteppingBack {
            return None;
        }
        let first = way.arrival.order(conversations.len()).take(SEATED);
        let seats: usize = first.map(|number| conversations[number].prompt_pages()).sum();
        let longest = conversations.iter().map(Conversation::pages).max().unwrap_or(1);
        let pages = longest.saturating_sub(seats).max(1);
        Some(Self { pages, pool: seats + pages })
    }
}

impl Observed {
    /// What the way says and was not seen; `prefixes` conversations could have found theirs.
    fn missed(&self, way: Way, prefixes: usize) -> Vec<Missed> {
        let mut missed = Vec::new();
        let mut miss = |dimension, reason| missed.push(Missed { dimension, reason });
        // Where conversations step back, some wait for others.
        if way.reuse != Reuse::SteppingBack && self.together != way.conversations {
            miss(CONVERSATIONS.0, format!("at most {} conversations ran in one step", self.together));
        }
        if !(way.least_chunk()..=way.chunk).contains(&self.largest_chunk) {
            miss(CHUNK.0, format!("the largest chunk had {} rows", self.largest_chunk));
        }
        if way.reuse == Reuse::SteppingBack && self.steps_back == 0 {
            miss(PREFIX, "no conversation stepped back".into());
        }
        if way.reuse == Reuse::Warm && (self.found_prefixes < prefixes || prefixes == 0) {
            miss(PREFIX, format!("{} of {prefixes} conversations found their prefix", self.found_prefixes));
        }
        let drafts = way.drafts.is_some_and(|(drafting, _)| drafting != Drafting::Off);
        if drafts != (self.drafted > 0) {
            miss(DRAFTS, format!("{} tokens were drafted", self.drafted));
        }
        missed
    }
}

/// An engine that is turned by hand.
struct Wheel {
    engine: Engine,
    driver: Driver,
    seen: Seen,
    deadline: Option<Instant>,
}

/// A conversation on its way.
struct Listener {
    stream: Stream,
    heard: Transcript,
}

impl Listener {
    fn listen(&mut self) {
        while let Some(event) = self.stream.try_next() {
            self.heard.hear(event);
        }
    }
}

impl Wheel {
    fn submit(&self, request: Request) -> Result<Listener, Box<dyn Error>> {
        Ok(Listener { stream: self.engine.submit(request)?, heard: Transcript::default() })
    }

    /// One step; `false`, and no step, if the deadline has come.
    fn turn(&mut self) -> Result<bool, Box<dyn Error>> {
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            return Ok(false);
        }
        match self.driver.turn() {
            Turn::Ran => Ok(true),
            Turn::Idle | Turn::Closed => Err("the engine rests while conversations wait".into()),
        }
    }

    /// Steps until enough was heard of one conversation; `false` if the deadline comes before.
    fn turn_until(
        &mut self,
        listener: &mut Listener,
        enough: impl Fn(&Transcript) -> bool,
    ) -> Result<bool, Box<dyn Error>> {
        while !enough(&listener.heard) {
            if !self.turn()? {
                return Ok(false);
            }
            listener.listen();
        }
        Ok(true)
    }

    /// Lets conversations arrive and hears them to their ends; `None` if the deadline comes before. The elder leaves
    /// when somebody has stepped back.
    fn converse(
        &mut self,
        conversations: &[Conversation],
        arrival: Arrival,
        mut elder: Option<Listener>,
    ) -> Result<Option<Vec<Transcript>>, Box<dyn Error>> {
        let mut to_come = arrival.order(conversations.len()).enumerate().peekable();
        let mut present: Vec<(usize, Listener)> = Vec::new();
        let mut step = 0;
        while to_come.peek().is_some() || present.iter().any(|(_, l)| !l.heard.is_over) {
            let has_come =
                |&(place, _): &(usize, usize)| arrival != Arrival::Staggered || place * APART <= step;
            while let Some((_, number)) = to_come.next_if(has_come) {
                present.push((number, self.submit(conversations[number].request())?));
            }
            if !self.turn()? {
                return Ok(None);
            }
            step += 1;
            present.iter_mut().for_each(|(_, listener)| listener.listen());
            elder = elder.filter(|_| self.engine.metrics().num_preemptions == 0);
        }
        present.sort_unstable_by_key(|&(number, _)| number);
        Ok(Some(present.into_iter().map(|(_, listener)| listener.heard).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::matrix::Matrix;
    use super::*;
    use motet_engine::Machine;
    use motet_engine::scripted::{Pace, Script, Scripted, Sketch};
    use std::sync::atomic::{AtomicUsize, Ordering};

    const WHOLE: Sketch =
        Sketch { vocab: 1000, context: 2048, full: true, window: None, recurrent: false, head: false };

    /// A scripted stage; with two threads it has `other` instead.
    fn prepare(sketch: &Sketch, other: &Sketch, setting: Setting) -> Result<Prepared, Box<dyn Error>> {
        let network = if setting.threads == 2 { other } else { sketch }.network();
        let device = Scripted::new(Script::Random { end: None, mean: 100 });
        let plan = |options: &Options| Plan::new(&network, options, Machine { memory: None }, &device);
        let mut options = setting.options;
        if setting.tight {
            options.memory = Some(plan(&options)?.smallest_memory);
        }
        let plan = plan(&options)?;
        let stage = device.stage(&network, plan.limits());
        Ok((plan, vec![stage]))
    }

    fn outcomes(sketch: Sketch, other: Sketch, slow_in_scalar: bool, ways: Vec<Way>) -> Vec<Outcome> {
        let prepare = |setting: Setting| prepare(&sketch, &other, setting);
        let subject = Subject {
            stages: Stages::default(),
            prepare: &prepare,
            vocabulary: Vocabulary::new(sketch.vocab, |token| token < 3),
            context: sketch.context,
            recurrent: sketch.network().state(false).recurrent_floats as u64 * 4,
            slow_in_scalar,
        };
        let mut runs = Runs::new(subject, None);
        ways.into_iter().map(|way| runs.run(way).unwrap().unwrap()).collect()
    }

    /// Runs are the same each time, so what is seen here is seen with any network with these kinds of state.
    #[test]
    fn every_way_is_lived_up_to_with_every_kind_of_state() {
        for (window, recurrent) in [(None, false), (Some(100), false), (Some(512), false), (None, true)] {
            let sketch = Sketch { window, recurrent, ..WHOLE };
            for slow_in_scalar in [false, true] {
                let matrix = Matrix::new(vec![Isa::Scalar], slow_in_scalar);
                let ways = if slow_in_scalar { matrix.covering() } else { matrix.product() };
                for outcome in outcomes(sketch, sketch, slow_in_scalar, ways) {
                    let way = format!("{sketch:?}, {}: {:?}", outcome.way, outcome.observed);
                    assert_eq!(outcome.differing, 0, "{way}: {:?}", outcome.differences);
                    assert!(outcome.missed.is_empty(), "{way}: {:?}", outcome.missed);
                    let is_back = outcome.way.reuse == Reuse::SteppingBack;
                    assert_eq!(outcome.observed.steps_back > 0, is_back, "{way}");
                    assert_eq!(outcome.met(), outcome.way.values());
                }
            }
        }
    }

    #[test]
    fn an_engine_that_forgets_is_found_out() {
        // With two threads, only the last 200 positions are seen: the first difference is at the row that should see
        // one more.
        let forgetful = Sketch { full: false, window: Some(200), ..WHOLE };
        let ways = Matrix::new(vec![Isa::Scalar], false).covering();
        for outcome in outcomes(WHOLE, forgetful, false, ways) {
            assert_eq!(outcome.differing > 0, outcome.way.threads == 2, "{}", outcome.way);
        }
    }

    #[test]
    fn what_was_not_seen_is_missed() {
        let way = Matrix::new(vec![Isa::Scalar], false)
            .product()
            .into_iter()
            .find(|way| (way.conversations, way.chunk, way.reuse) == (4, 32, Reuse::SteppingBack));
        let way = way.unwrap();
        let seen = Observed {
            together: 4,
            largest_chunk: 32,
            steps_back: 1,
            drafted: 0,
            accepted: 0,
            found_prefixes: 3,
            fresh_pages: 0,
            returned_pages: 0,
        };
        let missed = |observed: Observed, reuse| -> Vec<&str> {
            observed.missed(Way { reuse, ..way }, 3).iter().map(|missed| missed.dimension).collect()
        };
        for reuse in [Reuse::Cold, Reuse::Warm, Reuse::SteppingBack] {
            assert!(missed(seen, reuse).is_empty());
            assert_eq!(missed(Observed { largest_chunk: 7, ..seen }, reuse), ["chunk"]);
            assert_eq!(missed(Observed { largest_chunk: 33, ..seen }, reuse), ["chunk"]);
        }
        assert_eq!(missed(Observed { together: 3, ..seen }, Reuse::Cold), ["conversations"]);
        assert_eq!(missed(Observed { found_prefixes: 2, ..seen }, Reuse::Warm), ["prefix"]);
        assert_eq!(missed(Observed { steps_back: 0, ..seen }, Reuse::SteppingBack), ["prefix"]);
    }

    #[test]
    fn nothing_runs_behind_the_deadline() {
        let prepare = |_: Setting| -> Result<_, Box<dyn Error>> { panic!("too late to prepare anything") };
        let vocabulary = Vocabulary::new(1000, |_| false);
        let subject = Subject {
            prepare: &prepare,
            vocabulary,
            stages: Stages::default(),
            context: 8192,
            recurrent: 0,
            slow_in_scalar: false,
        };
        let mut runs = Runs::new(subject, Some(Instant::now()));
        assert!(runs.run(Matrix::new(vec![Isa::Scalar], false).covering()[0]).unwrap().is_none());
    }

    #[test]
    fn the_deadline_is_passed_by_one_step_at_most() {
        let network = WHOLE.network();
        let deadline = Instant::now() + Duration::from_millis(100);
        let late_steps = Arc::new(AtomicUsize::new(0));
        let prepare = |setting: Setting| -> Result<Prepared, Box<dyn Error>> {
            let late_steps = Arc::clone(&late_steps);
            let time = move |_| {
                late_steps.fetch_add(usize::from(Instant::now() >= deadline), Ordering::Relaxed);
                Duration::from_millis(20)
            };
            let script = Script::Random { end: None, mean: 100 };
            let device = Scripted { pace: Pace::Real(Arc::new(time)), ..Scripted::new(script) };
            let plan = Plan::new(&network, &setting.options, Machine { memory: None }, &device)?;
            let stage = device.stage(&network, plan.limits());
            Ok((plan, vec![stage]))
        };
        let vocabulary = Vocabulary::new(1000, |_| false);
        let subject = Subject {
            prepare: &prepare,
            vocabulary,
            stages: Stages::default(),
            context: 8192,
            recurrent: 0,
            slow_in_scalar: false,
        };
        // Alone, the first conversation takes 17 steps.
        let mut runs = Runs::new(subject, Some(deadline));
        assert!(runs.run(Matrix::new(vec![Isa::Scalar], false).covering()[0]).unwrap().is_none());
        assert!(late_steps.load(Ordering::Relaxed) <= 1);
    }
}
