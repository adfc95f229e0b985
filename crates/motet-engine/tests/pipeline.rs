//! Several stages at work at the same time, in simulated time: how busy they are beside what their times allow, and that
//! nothing is lost between them.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::clock::{Clock, SimClock};
use motet_engine::scripted::{Pace, Scripted, Sketch, StageTime};
use motet_engine::{
    Drafts, Driver, Engine, Event, Machine, Options, Plan, Request, SamplingOptions, Stream, StreamError,
    Turn,
};
use motet_model::batch::StateOp;
use motet_model::device::Observer;
use motet_model::{DeviceError, InFlight, Slot, Stage, Stages};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A stage's time: so many microseconds a batch and a row.
#[derive(Debug, Clone, Copy)]
struct Cost {
    batch: u64,
    row: u64,
}

impl Cost {
    fn of(self, rows: f64) -> f64 {
        self.batch as f64 + self.row as f64 * rows
    }
}

struct Line {
    engine: Engine,
    driver: Driver,
    clock: Arc<SimClock>,
    costs: Vec<Cost>,
}

impl Line {
    fn new(costs: &[Cost], sessions: usize, context: usize) -> Self {
        Self::of(SKETCHES[0], costs, sessions, context)
    }

    fn of(sketch: Sketch, costs: &[Cost], sessions: usize, context: usize) -> Self {
        let options = Options {
            stages: Stages::Balanced(costs.len()),
            checkpoint_memory: None,
            ..options(sessions, context)
        };
        let device = Scripted { pace: Pace::None, ..Scripted::new(random(1_000_000)) };
        let network = sketch.network();
        let plan = Plan::new(&network, &options, Machine { memory: None }, &device).unwrap();
        let stages = device.stages(&network, plan.limits(), costs.len());
        let clock = Arc::new(SimClock::default());
        let of_stage = costs.to_vec();
        let time: StageTime =
            Arc::new(move |stage, rows| Duration::from_micros(of_stage[stage].of(rows as f64) as u64));
        let (engine, driver) = Engine::simulated(plan, clock.clone(), stages, time).unwrap();
        Self { engine, driver, clock, costs: costs.to_vec() }
    }

    fn submit(&self, seed: u64, prompt: usize, answer: usize) -> Stream {
        let sampling = SamplingOptions { seed: Some(seed), ..SamplingOptions::greedy() };
        let prompt = Rng(seed).tokens(prompt);
        self.engine.submit(Request { sampling, max_tokens: Some(answer), ..Request::new(prompt) }).unwrap()
    }

    /// Turns until the counter of tokens has reached `tokens`; the time that has passed.
    fn until(&mut self, tokens: u64) -> Duration {
        let begun = self.clock.now();
        while self.engine.metrics().generation_tokens < tokens {
            assert_eq!(self.driver.turn(), Turn::Ran);
        }
        self.clock.now() - begun
    }

    /// The least time in which `sessions` sessions can all have their next token: over the number of batches, what the
    /// dearest stage takes for all of them, or a batch for its way through all stages.
    fn bound(&self, sessions: usize) -> Duration {
        let round = |batches: usize| {
            let rows = sessions as f64 / batches as f64;
            let dearest = self.costs.iter().map(|cost| cost.of(rows)).fold(0.0, f64::max);
            let all: f64 = self.costs.iter().map(|cost| cost.of(rows)).sum();
            (batches as f64 * dearest).max(all)
        };
        Duration::from_nanos((1..=sessions).map(round).fold(f64::INFINITY, f64::min).mul_add(1e3, 0.0) as u64)
    }
}

/// Decoding with two sessions a stage or more runs at 0.95 of what the stages' times allow, or better.
#[test]
fn stages_are_as_busy_as_their_times_allow() {
    let even = |stages| vec![Cost { batch: 400, row: 100 }; stages];
    let mut lines: Vec<(Vec<Cost>, usize)> = Vec::new();
    for stages in [2, 3, 4, 8, 16] {
        for each in [2, 3, 4, 8] {
            lines.push((even(stages), (stages * each).min(64)));
        }
        let uneven = (0..stages as u64).map(|i| Cost { batch: 200 + 150 * (i % 3), row: 60 + 40 * (i % 2) });
        lines.push((uneven.collect(), 4 * stages));
        let heavy_end = (0..stages as u64)
            .map(|i| Cost { batch: 300, row: if i + 1 == stages as u64 { 250 } else { 50 } });
        lines.push((heavy_end.collect(), 2 * stages + 1));
    }
    for (costs, sessions) in lines {
        let what = format!("{} stages, {sessions} sessions, {:?}", costs.len(), &costs[..2]);
        let mut line = Line::new(&costs, sessions, 1024);
        let streams: Vec<Stream> = (0..sessions as u64).map(|i| line.submit(i, 5, 900)).collect();
        // All decide, and the number of batches has settled.
        line.until(60 * sessions as u64);
        let rounds = 200;
        let before = line.engine.metrics().generation_tokens;
        let took = line.until(before + rounds * sessions as u64);
        let share = line.bound(sessions).as_secs_f64() * rounds as f64 / took.as_secs_f64();
        assert!(share >= 0.95, "{what}: {share:.3} of the bound, {:?}", line.engine.metrics().stage_busy);
        assert!(share <= 1.01, "{what}: {share:.3}: more than the stages can do");
        drop(streams);
    }
}

/// Parts of one prompt follow each other through the stages, also if sessions have pages for a sliding window only.
#[test]
fn one_long_prompt_keeps_all_stages_at_work() {
    for (stages, sketch) in [(2, 0), (4, 0), (2, 1), (4, 4)] {
        let costs = vec![Cost { batch: 400, row: 100 }; stages];
        let mut line = Line::of(SKETCHES[sketch], &costs, 1, 8192);
        let stream = line.submit(1, 4096, 1);
        let took = line.until(1).as_secs_f64();
        let alone = Cost { batch: 400, row: 100 };
        // 32 parts of 128 rows, one stage after the other.
        let in_turn = stages as f64 * 32.0 * alone.of(128.0) * 1e-6;
        assert!(in_turn / took > 0.88 * stages as f64, "{stages} stages: {:.2} times", in_turn / took);
        drop(stream);
    }
}

/// Where a later stage is quicker than the first, as the one with the head is while a prompt is read, there is little to
/// do when the first has run all. With parts of 128 rows to the end it would be 0.95 and 0.86 of what the first takes.
#[test]
fn behind_a_lone_prompts_last_part_little_is_left_to_do() {
    let first = Cost { batch: 160, row: 53 };
    let quicker = Cost { batch: 140, row: 46 };
    for (costs, least) in [(vec![first, quicker], 0.97), (vec![first, quicker, quicker, quicker], 0.88)] {
        let mut line = Line::new(&costs, 1, 8192);
        // The times of the stages are known.
        let known = line.submit(1, 1024, 1);
        line.until(1);
        let stream = line.submit(2, 2048, 1);
        let took = line.until(2).as_secs_f64();
        let of_first = 16.0 * first.of(128.0) * 1e-6;
        assert!(of_first / took > least, "{} stages: {:.3}", costs.len(), of_first / took);
        drop((known, stream));
    }
}

/// The least time in which the parts of a prompt pass equal stages if each ends at the next of `borders`, over the rows
/// that a part may have: one stage runs all of them, the others the greatest before or behind it.
fn bound_of_prompt(borders: &[usize], stages: usize, cost: Cost) -> Duration {
    let all_parts = |most: usize| {
        let (mut all, mut greatest, mut from) = (0.0, 0.0_f64, 0);
        for &to in borders {
            for first in (from..to).step_by(most) {
                let time = cost.of(most.min(to - first) as f64);
                (all, greatest) = (all + time, greatest.max(time));
            }
            from = to;
        }
        all + (stages - 1) as f64 * greatest
    };
    Duration::from_secs_f64((1..=512).map(all_parts).fold(f64::INFINITY, f64::min) * 1e-6)
}

/// They do so where recurrent state is saved between them, at marks and every 512 positions; and all that was to be
/// saved is found afterwards, and right.
#[test]
fn a_prompt_does_not_wait_where_its_state_is_saved() {
    let (cost, length) = (Cost { batch: 400, row: 100 }, 4000);
    for (sketch, stages, every) in [(2, 2, 0), (5, 2, 300), (5, 3, 0), (2, 4, 300), (3, 5, 0)] {
        let sketch = SKETCHES[sketch];
        let what = format!("{sketch:?}, {stages} stages, a mark every {every} tokens");
        let mut line = Line::of(sketch, &vec![cost; stages], 1, 8192);
        let marks: Vec<usize> = (1..length / every.max(1)).map(|i| i * every).filter(|&at| at > 0).collect();
        let ends = marks.iter().copied().chain((512..length).step_by(512)).chain([length - 1]);
        let mut borders: Vec<usize> = ends.map(|end| end / 64 * 64).collect();
        borders.sort_unstable();
        borders.dedup();
        let asks = |prompt| Request { max_tokens: Some(1), ..request(prompt, 1) };
        let text = Rng(1).tokens(length);
        let marked = Request { marks, ..asks(text.clone()) };
        let mut stream = line.engine.submit(marked).unwrap();
        let took = line.until(1);
        let script = random(1_000_000);
        let says = |stream: &mut Stream, prompt| {
            let said = answers(stream).remove(0);
            assert_same(&said, &expected(sketch, &script, 8192, &asks(prompt), 0), &what);
            said.cached
        };
        assert_eq!(says(&mut stream, text.clone()), Some(0), "{what}");
        let share = bound_of_prompt(&[&borders[..], &[length]].concat(), stages, cost).as_secs_f64()
            / took.as_secs_f64();
        assert!(share >= 0.95, "{what}: {share:.3} of the bound");
        // Conversations that begin alike up to some place behind each border. Of a sliding window only the last is kept.
        let kept = if sketch.window.is_some() { borders.len() - 1 } else { 0 };
        for (i, &border) in borders.iter().enumerate().skip(kept) {
            let mut prompt = text[..border + 1 + i % 60].to_vec();
            prompt.push(7);
            let mut stream = line.engine.submit(asks(prompt.clone())).unwrap();
            while line.driver.turn() == Turn::Ran {}
            assert_eq!(says(&mut stream, prompt), Some(border), "{what}");
        }
        assert!(line.driver.at_rest(), "{what}");
    }
}

/// Prompts come while others decide: stages do nothing less than a twentieth of the time.
#[test]
fn prompts_beside_next_tokens_leave_no_bubbles() {
    for stages in [2, 4, 8] {
        let costs = vec![Cost { batch: 400, row: 100 }; stages];
        let mut line = Line::new(&costs, 4 * stages, 2048);
        let talks: Vec<Stream> = (0..3 * stages as u64).map(|i| line.submit(i, 5, 1500)).collect();
        line.until(30 * stages as u64);
        let begun = (line.clock.now(), line.engine.metrics().stage_busy);
        // More prompts than there are places: some is always being read, but for the last ones.
        let count = 6 * stages as u64;
        let prompts: Vec<Stream> = (0..count).map(|i| line.submit(100 + i, 1000, 1)).collect();
        let end = line.engine.metrics().prompt_tokens_computed + count * 1000 * 4 / 5;
        while line.engine.metrics().prompt_tokens_computed < end {
            assert_eq!(line.driver.turn(), Turn::Ran);
        }
        let passed = (line.clock.now() - begun.0).as_secs_f64();
        for (stage, (after, before)) in line.engine.metrics().stage_busy.iter().zip(&begun.1).enumerate() {
            let busy = (*after - *before).as_secs_f64() / passed;
            assert!(busy > 0.95, "stage {stage} of {stages} worked {busy:.2} of the time");
        }
        drop((talks, prompts));
    }
}

/// Each of several flights drafts for some sessions as if all room were theirs; what goes in one batch has room in it.
#[test]
fn drafts_of_several_flights_fit_into_a_batch() {
    for stages in [2, 3, 5] {
        let sketch = Sketch { head: true, ..SKETCHES[0] };
        let options = Options {
            drafts: Drafts::Exactly(16),
            rows: 24,
            stages: Stages::Balanced(stages),
            ..options(8, 1024)
        };
        let mut rig = Rig::new(sketch, random(1_000_000), &options);
        let ask = |seed| Request { max_tokens: Some(200), ..request(Rng(seed).tokens(20), seed) };
        let mut streams: Vec<Stream> = (0..8).map(|seed| rig.engine.submit(ask(seed)).unwrap()).collect();
        rig.run();
        for (seed, stream) in streams.iter_mut().enumerate() {
            let expected = rig.expected(&ask(seed as u64)).remove(0);
            assert_same(&answers(stream)[0], &expected, &format!("{stages} stages, seed {seed}"));
        }
        assert!(rig.driver.at_rest() && rig.engine.metrics().num_accepted_tokens > 100);
    }
}

/// A stage whose own code panics when it is told to.
struct Panics {
    inner: Box<dyn Stage>,
    next: Arc<AtomicBool>,
}

impl Stage for Panics {
    fn step(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        assert!(!self.next.swap(false, Ordering::Relaxed), "a bug in the stage");
        self.inner.step(work)
    }

    fn change(&mut self, changes: &[StateOp]) {
        self.inner.change(changes);
    }

    fn commit(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
        self.inner.commit(kept)
    }

    fn poison(&mut self, pool: usize, page: u32) {
        self.inner.poison(pool, page);
    }

    fn observe(&mut self, observer: Option<Box<dyn Observer>>) {
        self.inner.observe(observer);
    }
}

/// The sessions of the batch fail with what the panic said; the stage, its thread and everybody else go on.
#[test]
fn a_panic_in_a_stages_own_code_is_the_error_of_its_batch() {
    for (stages, which) in [(1, 0), (2, 0), (2, 1), (3, 1)] {
        let (sketch, script) = (SKETCHES[3], random(1_000_000));
        let device = Scripted::new(script.clone());
        let network = sketch.network();
        let options = Options { stages: Stages::Balanced(stages), ..options(3, 2048) };
        let plan = Plan::new(&network, &options, Machine { memory: None }, &device).unwrap();
        let mut line = device.stages(&network, plan.limits(), stages);
        let next = Arc::new(AtomicBool::new(false));
        let inner = line.remove(which);
        line.insert(which, Box::new(Panics { inner, next: next.clone() }));
        let engine = Engine::start(plan, move || Ok(line));
        let submit = |seed| {
            let request = Request { max_tokens: Some(300), ..request(Rng(seed).tokens(70), seed) };
            engine.submit(request).unwrap()
        };
        device.control.hold();
        let mut first = submit(1);
        next.store(true, Ordering::Relaxed);
        device.control.resume();
        let last = std::iter::from_fn(|| first.blocking_next()).last();
        let Some(Event::Failed(StreamError::DeviceFailed(said))) = last else { panic!("{last:?}") };
        assert!(said.contains("a bug in the stage"), "{said}");
        for seed in 1..4 {
            let (mut stream, mut said) = (submit(seed), Vec::new());
            while let Some(event) = stream.blocking_next() {
                add(&mut said, event);
            }
            let asked = Request { max_tokens: Some(300), ..request(Rng(seed).tokens(70), seed) };
            let what = format!("{stages} stages, panic in {which}, seed {seed}");
            assert_same(&said[0], &expected(sketch, &script, 2048, &asked, 0), &what);
        }
        assert!(engine.wait_for_rest(Duration::from_secs(10)));
        let metrics = engine.metrics();
        assert_eq!((metrics.failed_steps, metrics.finished_error, metrics.kv_cache_usage), (1, 1, 0.0));
    }
}
