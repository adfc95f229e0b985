//! A step that fails takes its own sessions down, and nobody else; one that never ends takes the engine.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::clock::{Clock, SimClock};
use motet_engine::scripted::{Control, Pace, Scripted};
use motet_engine::{
    Cut, CutMaker, Engine, Event, Health, Machine, Options, Plan, Request, Stream, StreamError, SubmitError,
    Turn,
};
use motet_model::{DeviceError, Stages};
use std::sync::{Arc, mpsc};
use std::time::Duration;

fn long(seed: u64) -> Request {
    Request { max_tokens: Some(60), ..request(Rng(seed).tokens(300), seed) }
}

#[test]
fn a_panic_fails_the_sessions_of_its_batch_and_leaves_the_rest_intact() {
    for sketch in SKETCHES {
        let mut rig = Rig::new(sketch, random(1_000_000), &options(2, 1024));
        let streams: Vec<Stream> = (0..3).map(|i| rig.engine.submit(long(i)).unwrap()).collect();
        for _ in 0..4 {
            rig.driver.turn();
        }
        rig.control.panic_next();
        rig.run();
        let said: Vec<Answer> = streams.into_iter().map(|mut s| answers(&mut s).remove(0)).collect();
        for failed in &said[..2] {
            assert_eq!(
                failed.error.as_deref(),
                Some("the step failed: a compute thread panicked: as ordered")
            );
        }
        let waiting = rig.expected(&long(2)).remove(0);
        assert_same(&said[2], &waiting, "the one that waited");
        // The same prompts again: what the failed ones had cached is right or gone.
        for seed in 0..3 {
            let expected = rig.expected(&long(seed)).remove(0);
            assert_same(&rig.answers(long(seed))[0], &expected, &format!("{sketch:?}, again"));
        }
        assert!(rig.driver.at_rest());
        assert_eq!(rig.engine.metrics().failed_steps, 1);
    }
}

#[test]
fn a_session_that_was_to_begin_in_a_failed_step_begins_again() {
    // A batch of eight rows in chunks of seven: the third and fourth have a place, but no row yet.
    let options = Options { rows: 8, prefill_chunk: Some(7), ..options(4, 1024) };
    let mut rig = Rig::new(SKETCHES[2], random(1_000_000), &options);
    let mut streams: Vec<Stream> = (0..4).map(|i| rig.engine.submit(long(i)).unwrap()).collect();
    rig.control.panic_next();
    rig.driver.turn();
    assert_eq!(rig.engine.metrics().finished_error, 2);
    rig.run();
    for (seed, stream) in streams.iter_mut().enumerate().skip(2) {
        assert_same(&answers(stream)[0], &rig.expected(&long(seed as u64))[0], "one that had no row");
    }
}

/// Between several stages, others may have begun with state that a batch was to save before it turns out that it failed.
#[test]
fn who_began_with_state_that_a_failed_step_was_to_save_begins_again() {
    for sketch in [SKETCHES[2], SKETCHES[5]] {
        let options = Options { prefill_chunk: Some(128), stages: Stages::Balanced(2), ..options(2, 1024) };
        let mut rig = Rig::new(sketch, random(1_000_000), &options);
        let text = Rng(1).tokens(900);
        let mut first = rig.engine.submit(request(text.clone(), 1)).unwrap();
        // The fifth batch has the rows behind 512; it fails in the last stage.
        while rig.control.steps() < 4 {
            rig.turns(1);
        }
        rig.control.stall_next(Duration::ZERO);
        rig.control.panic_next();
        while rig.engine.metrics().prompt_tokens_computed < 512 {
            rig.turns(1);
        }
        let again = || Request { max_tokens: Some(20), ..request(text[..700].to_vec(), 2) };
        let mut second = rig.engine.submit(again()).unwrap();
        rig.turns(1);
        let begun = second.try_next();
        assert_eq!(rig.engine.metrics().failed_steps, 0, "it has landed too early");
        assert!(matches!(begun, Some(Event::Started { cached_tokens: 512, .. })), "{begun:?}");
        rig.run();
        assert!(answers(&mut first)[0].error.is_some());
        let mut said = answers(&mut second).remove(0);
        assert_same(&said, &rig.expected(&again())[0], "the one that began with what was lost");
        said = rig.answers(again()).remove(0);
        assert_same(&said, &rig.expected(&again())[0], "again");
        assert_eq!((rig.engine.metrics().failed_steps, rig.driver.at_rest()), (1, true));
    }
}

#[test]
fn a_value_that_is_not_finite_ends_its_session_only() {
    let mut rig = Rig::new(SKETCHES[3], random(1_000_000), &options(2, 1024));
    let mut streams: Vec<Stream> = (0..2).map(|i| rig.engine.submit(long(i)).unwrap()).collect();
    for _ in 0..30 {
        rig.driver.turn();
    }
    rig.control.fault_next(1, 0);
    rig.run();
    let expected = rig.expected(&long(0)).remove(0);
    assert_same(&answers(&mut streams[0])[0], &expected, "the other one");
    let error = answers(&mut streams[1])[0].error.clone().unwrap();
    assert!(error.starts_with("the network produced a value that is not finite at position 3"), "{error}");
    assert!(rig.driver.at_rest());
}

#[test]
fn one_failed_choice_ends_the_request() {
    let mut rig = Rig::new(SKETCHES[2], random(1_000_000), &options(3, 1024));
    let mut stream = rig.engine.submit(Request { choices: 3, ..long(1) }).unwrap();
    while rig.engine.metrics().num_requests_running < 3 {
        assert_eq!(rig.driver.turn(), Turn::Ran);
    }
    rig.control.fault_next(2, 0);
    rig.run();
    let events: Vec<Event> = std::iter::from_fn(|| stream.try_next()).collect();
    assert!(matches!(events.last(), Some(Event::Failed(_))));
    assert!(stream.is_over() && rig.driver.at_rest());
}

/// How long a step may take in the tests of the watchdog.
const PATIENCE: Duration = Duration::from_millis(100);

/// An engine with its threads and a watchdog, in simulated time.
fn watched(sessions: usize, stages: usize) -> (Engine, Arc<Control>, Arc<SimClock>) {
    let clock = Arc::new(SimClock::default());
    let pace = Pace::Simulated(clock.clone(), Arc::new(|_| Duration::from_millis(1)));
    let device = Scripted { pace, ..Scripted::new(random(1_000_000)) };
    let stages = Stages::Balanced(stages);
    let options = Options { watchdog: Some(PATIENCE), stages, ..options(sessions, 1024) };
    let engine = device.start(&SKETCHES[0], &options).unwrap();
    engine.wait_until_loaded().unwrap();
    (engine, device.control, clock)
}

/// Lets simulated time pass, slowly enough that the watchdog sees it pass.
fn pass_time(clock: &SimClock, ms: u64) {
    for _ in 0..ms {
        clock.advance(Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Holds the step behind the first token.
struct Hold(Arc<Control>);

impl Cut for Hold {
    fn push(&mut self, _token: u32) -> bool {
        self.0.hold();
        false
    }
}

#[test]
fn a_step_that_hangs_ends_all_streams_and_the_engine_for_good() {
    hangs(1);
}

#[test]
fn a_stage_that_hangs_ends_all_streams_and_the_engine_for_good() {
    hangs(3);
}

fn hangs(stages: usize) {
    let (engine, control, clock) = watched(1, stages);
    let (tell, told) = mpsc::channel();
    engine.on_stall(move || tell.send(()).unwrap());
    // Choices that run, wait in line and wait in the queue; and an answer that is complete but was not read yet.
    let mut answered = engine.submit(Request { max_tokens: Some(3), ..long(9) }).unwrap();
    assert!(engine.wait_for_rest(Duration::from_secs(10)));
    let cut: CutMaker = {
        let control = control.clone();
        Box::new(move || Box::new(Hold(control.clone())))
    };
    let three = Request { choices: 3, cut: Some(cut), ..long(1) };
    let mut streams: Vec<Stream> = [three, long(2)].map(|request| engine.submit(request).unwrap()).into();
    while !matches!(streams[0].blocking_next(), Some(Event::Token { .. })) {}
    let (steps, begun) = (control.steps(), clock.now());
    while engine.health() == Health::Ready {
        pass_time(&clock, 1);
    }
    assert_eq!(engine.health(), Health::Stalled);
    assert!(clock.now() - begun >= PATIENCE, "after {:?}", clock.now() - begun);
    for stream in &mut streams {
        let last = std::iter::from_fn(|| stream.blocking_next()).last();
        assert_eq!(last, Some(Event::Failed(StreamError::Stalled(PATIENCE))));
    }
    assert_eq!(answers(&mut answered)[0].tokens.len(), 3);
    told.recv_timeout(Duration::from_secs(10)).unwrap();
    assert!(matches!(engine.submit(long(1)), Err(SubmitError::Closed)));
    assert!(engine.wait_for_rest(Duration::ZERO));
    engine.close(); // nobody waits for the step

    control.resume();
    while Arc::strong_count(&control) > 1 {
        std::thread::yield_now(); // until the engine's thread has dropped its stage
    }
    assert!(streams.iter_mut().all(|stream| stream.is_over() && stream.try_next().is_none()));
    assert!(control.steps() <= steps + stages as u64, "it went on");
    assert_eq!(engine.health(), Health::Stalled);
    let (tell, told) = mpsc::channel();
    engine.on_stall(move || tell.send(()).unwrap());
    assert_eq!(told.try_recv(), Ok(()), "who asks later is told at once");
}

#[test]
fn neither_a_slow_step_nor_silence_nor_a_clock_that_jumps_is_a_stall() {
    let (engine, control, clock) = watched(1, 1);
    let rig = Rig::new(SKETCHES[0], random(1_000_000), &options(1, 1024));
    let check = |mut stream: Stream, seed, what: &str| {
        let mut said = Vec::new();
        while let Some(event) = stream.blocking_next() {
            add(&mut said, event);
        }
        assert_same(&said[0], &rig.expected(&long(seed))[0], what);
        assert!(engine.wait_for_rest(Duration::from_secs(10)));
        assert_eq!(engine.health(), Health::Ready, "{what}");
    };
    control.hold();
    let stream = engine.submit(long(1)).unwrap();
    pass_time(&clock, 90);
    control.resume();
    check(stream, 1, "a slow step");
    // Idle for longer than a step may take.
    pass_time(&clock, 150);
    check(engine.submit(long(2)).unwrap(), 2, "silence");
    control.stall_next(Duration::from_secs(3600));
    check(engine.submit(long(3)).unwrap(), 3, "an hour within a step that the watchdog did not see");
    engine.close();
    assert_eq!(engine.health(), Health::Closed);
}

#[test]
fn an_engine_that_closes_in_a_step_that_hangs_is_given_up_as_well() {
    let (engine, control, clock) = watched(1, 1);
    control.hold();
    let mut stream = engine.submit(long(1)).unwrap();
    while control.steps() == 0 {
        std::thread::yield_now();
    }
    let handle = engine.clone();
    let closing = std::thread::spawn(move || handle.close());
    while engine.health() != Health::Closed {
        std::thread::yield_now();
    }
    while !closing.is_finished() {
        pass_time(&clock, 1);
    }
    let last = std::iter::from_fn(|| stream.blocking_next()).last();
    assert_eq!(last, Some(Event::Failed(StreamError::Stalled(PATIENCE))));
    assert_eq!(engine.health(), Health::Stalled);
    control.resume();
}

#[test]
fn an_engine_that_cannot_load_says_why() {
    let device = Scripted::new(random(9));
    let plan =
        Plan::new(&SKETCHES[0].network(), &options(1, 256), Machine { memory: None }, &device).unwrap();
    let engine = Engine::start(plan, || {
        Err(DeviceError::Tensor { tensor: "blk.0.ffn_up.weight".into(), what: "it is missing".into() })
    });
    let error = engine.wait_until_loaded().unwrap_err();
    assert_eq!(error.to_string(), "tensor blk.0.ffn_up.weight: it is missing");
    assert!(engine.submit(long(1)).is_err());
}

#[test]
fn dropping_the_last_handle_ends_the_thread_and_its_streams() {
    let device = Scripted::new(random(1_000_000));
    device.control.hold();
    let engine = device.start(&SKETCHES[0], &options(1, 1024)).unwrap();
    let mut stream = engine.submit(long(1)).unwrap();
    let control = device.control.clone();
    let resume = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        control.resume();
    });
    drop(engine);
    resume.join().unwrap();
    let last = std::iter::from_fn(|| stream.blocking_next()).last();
    assert!(matches!(last, Some(Event::Failed(_))), "{last:?}");
}
