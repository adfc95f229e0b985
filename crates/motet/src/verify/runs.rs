//! Runs conversations: each alone once, then together in one way after another, and compares.
//!
//! The engine's wheel is turned here, step by step, and by its clock every step takes as long: so a run is the same each
//! time, arrivals come when the way says, and the deadline is passed by one step at most. It knows devices only by a
//! function that prepares a stage, so it can be pointed at one that is wrong on purpose.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use motet_cpu::Isa;
use motet_engine::clock::SimClock;
use motet_engine::{Drafts, Driver, Engine, Options, Plan, Request, Stream, Turn};
use motet_model::{PAGE, Stage, Stages};

use super::conversation::{Conversation, Extent, MOST, Vocabulary};
use super::matrix::{Arrival, Drafting, Heat, Reuse, Way};
use super::outcome::{Found, Missed, Observed, Outcome};
use super::transcript::Transcript;
use super::witness::{Seen, Witness, Work};

/// Steps between arrivals that are staggered.
const APART: usize = 2;
/// Conversations for which there are pages beside the older one, when conversations are to step back.
const SEATED: usize = 3;
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
            let request = Conversation::elder(vocabulary, elder.pages, elder.calm).request();
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
        let clock = Arc::new(SimClock::default());
        let (stages, seen) = Witness::of(stages, &clock);
        let (engine, driver) = Engine::by_hand(plan, clock, stages)?;
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
    /// Steps behind which it needs that page: all that have a seat have arrived, and none is over.
    calm: usize,
}

impl Elder {
    fn beside(way: Way, conversations: &[Conversation]) -> Option<Self> {
        if way.reuse != Reuse::SteppingBack {
            return None;
        }
        let seated = conversations.len().min(SEATED);
        let first = way.arrival.order(conversations.len()).take(seated);
        let seats: usize = first.map(|number| conversations[number].prompt_pages()).sum();
        let arriving = if way.arrival == Arrival::Staggered { APART * (seated - 1) } else { 0 };
        let longest = conversations.iter().map(Conversation::pages).max().unwrap_or(1);
        let pages = longest.saturating_sub(seats).max(1);
        Some(Self { pages, pool: seats + pages, calm: arriving + 1 })
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
    use super::super::conversation::REPEATED;
    use super::super::matrix::Matrix;
    use super::*;
    use motet_engine::Machine;
    use motet_engine::scripted::{AnswerFn, Pace, Script, Scripted, Sketch};
    use std::sync::atomic::{AtomicUsize, Ordering};

    const WHOLE: Sketch =
        Sketch { vocab: 1000, context: 2048, full: true, window: None, recurrent: false, head: false };

    const RANDOM: Script = Script::Random { end: None, mean: 100 };

    /// A scripted stage; with two threads it has `other` instead.
    fn prepare(
        script: &Script,
        sketch: &Sketch,
        other: &Sketch,
        setting: Setting,
    ) -> Result<Prepared, Box<dyn Error>> {
        let network = if setting.threads == 2 { other } else { sketch }.network();
        let device = Scripted { agree: Arc::new(|_, _, _| true), ..Scripted::new(script.clone()) };
        let plan = |options: &Options| Plan::new(&network, options, Machine { memory: None }, &device);
        let mut options = setting.options;
        if setting.tight {
            options.memory = Some(plan(&options)?.smallest_memory);
        }
        let plan = plan(&options)?;
        let stage = device.stage(&network, plan.limits());
        Ok((plan, vec![stage]))
    }

    fn outcomes(
        script: &Script,
        sketch: Sketch,
        other: Sketch,
        slow_in_scalar: bool,
        ways: Vec<Way>,
    ) -> Vec<Outcome> {
        let prepare = |setting: Setting| prepare(script, &sketch, &other, setting);
        let subject = Subject {
            stages: Stages::default(),
            prepare: &prepare,
            vocabulary: Vocabulary::new(sketch.vocab, |token| token < 3),
            context: sketch.context,
            recurrent: sketch.network().state(sketch.head).recurrent_floats as u64 * 4,
            slow_in_scalar,
        };
        let mut runs = Runs::new(subject, None);
        ways.into_iter().map(|way| runs.run(way).unwrap().unwrap()).collect()
    }

    /// Runs are the same each time, so what is seen here is seen with any network with these kinds of state.
    fn assert_lived_up_to(sketch: Sketch, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let way = format!("{sketch:?}, {}: {:?}", outcome.way, outcome.observed);
            assert_eq!(outcome.differing, 0, "{way}: {:?}", outcome.differences);
            assert!(outcome.missed.is_empty(), "{way}: {:?}", outcome.missed);
            let is_back = outcome.way.reuse == Reuse::SteppingBack;
            assert_eq!(outcome.observed.steps_back > 0, is_back, "{way}");
            assert_eq!(outcome.met(), outcome.way.values());
        }
    }

    #[test]
    fn every_way_is_lived_up_to_with_every_kind_of_state() {
        for (window, recurrent) in [(None, false), (Some(100), false), (Some(512), false), (None, true)] {
            let sketch = Sketch { window, recurrent, ..WHOLE };
            for slow_in_scalar in [false, true] {
                let matrix = Matrix::new(vec![Isa::Scalar], slow_in_scalar);
                let ways = if slow_in_scalar { matrix.covering() } else { matrix.product() };
                let outcomes = outcomes(&RANDOM, sketch, sketch, slow_in_scalar, ways);
                assert_lived_up_to(sketch, &outcomes);
            }
        }
    }

    #[test]
    fn every_way_with_drafts_is_lived_up_to_whether_they_come_true_or_not() {
        // What a text that repeats itself goes on with; its head is always right.
        let again: AnswerFn = Arc::new(|history, _| history[history.len() - REPEATED.min(history.len())]);
        let again = Script::Answers(again);
        for (script, head, come_true) in
            [(&again, false, true), (&again, true, true), (&RANDOM, true, true), (&RANDOM, false, false)]
        {
            for (window, recurrent) in [(None, false), (Some(100), false), (None, true)] {
                let sketch = Sketch { vocab: 30, window, recurrent, head, ..WHOLE };
                for slow_in_scalar in [false, true] {
                    let ways = Matrix::new(vec![Isa::Scalar], slow_in_scalar).with_drafts().covering();
                    let outcomes = outcomes(script, sketch, sketch, slow_in_scalar, ways);
                    assert_lived_up_to(sketch, &outcomes);
                    let drafted: u64 = outcomes.iter().map(|o| o.observed.drafted).sum();
                    let accepted: u64 = outcomes.iter().map(|o| o.observed.accepted).sum();
                    assert_eq!(2 * accepted > drafted, come_true, "{accepted} of {drafted}");
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
        for outcome in outcomes(&RANDOM, WHOLE, forgetful, false, ways) {
            assert_eq!(outcome.differing > 0, outcome.way.threads == 2, "{}", outcome.way);
        }
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
