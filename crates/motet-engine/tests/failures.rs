//! A step that fails takes its own sessions down, and nobody else.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::scripted::{Pace, Scripted};
use motet_engine::{Engine, Event, Health, Machine, Options, Plan, Request, Stream, Turn};
use motet_model::DeviceError;
use std::sync::Arc;
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

#[test]
fn a_value_that_is_not_finite_ends_its_session_only() {
    let mut rig = Rig::new(SKETCHES[3], random(1_000_000), &options(2, 1024));
    let mut streams: Vec<Stream> = (0..2).map(|i| rig.engine.submit(long(i)).unwrap()).collect();
    for _ in 0..30 {
        rig.driver.turn();
    }
    rig.control.fault_next(1);
    rig.run();
    let expected = rig.expected(&long(0)).remove(0);
    assert_same(&answers(&mut streams[0])[0], &expected, "the other one");
    let error = answers(&mut streams[1])[0].error.clone().unwrap();
    assert!(
        error.starts_with("the network produced a value that is not finite at or after position 3"),
        "{error}"
    );
    assert!(rig.driver.at_rest());
}

#[test]
fn one_failed_choice_ends_the_request() {
    let mut rig = Rig::new(SKETCHES[2], random(1_000_000), &options(3, 1024));
    let mut stream = rig.engine.submit(Request { choices: 3, ..long(1) }).unwrap();
    while rig.engine.metrics().num_requests_running < 3 {
        assert_eq!(rig.driver.turn(), Turn::Ran);
    }
    rig.control.fault_next(2);
    rig.run();
    let events: Vec<Event> = std::iter::from_fn(|| stream.try_next()).collect();
    assert!(matches!(events.last(), Some(Event::Failed(_))));
    assert!(stream.is_over() && rig.driver.at_rest());
}

#[test]
fn health_tells_a_step_that_hangs_from_an_engine_that_idles() {
    let mut options = options(1, 1024);
    options.overdue = Duration::from_millis(300);
    let device =
        Scripted { pace: Pace::Real(Arc::new(|_| Duration::ZERO)), ..Scripted::new(random(1_000_000)) };
    let control = device.control.clone();
    let engine = device.start(&SKETCHES[0], &options).unwrap();
    engine.wait_until_loaded().unwrap();
    assert_eq!(engine.health(), Health::Ready);
    control.hold();
    let mut stream = engine.submit(long(1)).unwrap();
    while !matches!(engine.health(), Health::Overdue { .. }) {
        std::thread::sleep(Duration::from_millis(10));
    }
    control.resume();
    while !matches!(stream.blocking_next(), Some(Event::Finished { .. })) {}
    assert!(engine.wait_for_rest(Duration::from_secs(10)));
    std::thread::sleep(Duration::from_millis(400));
    assert_eq!(engine.health(), Health::Ready);
    engine.close();
    assert_eq!(engine.health(), Health::Closed);
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
