//! A reader that leaves gives its place back at once, in every phase, and nothing more is computed for it.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::{Event, Health, Request, Stream, StreamError, SubmitError, Turn};
use std::time::Duration;

fn rig(sessions: usize, queue: usize) -> Rig {
    let mut options = options(sessions, 2048);
    options.queue = queue;
    Rig::new(SKETCHES[3], random(1_000_000), &options)
}

fn long(seed: u64) -> Request {
    Request { max_tokens: Some(100), ..request(Rng(seed).tokens(600), seed) }
}

#[test]
fn in_the_queue_its_place_is_free_for_the_next_submit() {
    let mut rig = rig(1, 1);
    let _running = rig.engine.submit(long(1)).unwrap();
    rig.driver.turn();
    let waiting = rig.engine.submit(long(2)).unwrap();
    assert!(matches!(rig.engine.submit(long(3)), Err(SubmitError::QueueFull { waiting: 1, .. })));
    drop(waiting);
    let mut third = rig.engine.submit(long(3)).unwrap(); // no step in between
    rig.run();
    assert_eq!(answers(&mut third)[0].tokens.len(), 100);
    assert_eq!(rig.engine.metrics().finished_abort, 1);
}

#[test]
fn in_prefill_and_in_decode_no_further_row_is_run() {
    let expected = |rig: &Rig, r: &Request| rig.expected(r).remove(0);
    for turns in [1, 2, 5, 60, 90] {
        let mut rig = rig(2, 4);
        let stays = long(2);
        let must = expected(&rig, &stays);
        let leaves = rig.engine.submit(long(1)).unwrap();
        let mut stays = rig.engine.submit(stays).unwrap();
        (0..turns).for_each(|_| assert_eq!(rig.driver.turn(), Turn::Ran));
        drop(leaves);
        rig.driver.turn();
        let metrics = rig.engine.metrics();
        assert_eq!((metrics.num_requests_running, metrics.finished_abort), (1, 1), "after {turns} turns");
        rig.run();
        assert_same(&answers(&mut stays)[0], &must, "the other one");
        assert!(rig.driver.at_rest());
    }
}

#[test]
fn when_all_have_left_no_step_is_run() {
    let mut rig = rig(2, 4);
    let streams: Vec<Stream> = (0..2).map(|i| rig.engine.submit(long(i)).unwrap()).collect();
    rig.driver.turn();
    let steps = rig.control.steps();
    drop(streams);
    assert_eq!(rig.driver.turn(), Turn::Idle);
    assert_eq!(rig.control.steps(), steps);
    assert!(rig.driver.at_rest());
}

#[test]
fn after_stepping_back_it_does_not_come_again() {
    let mut options = options(2, 1024);
    options.memory = Some(Rig::new(SKETCHES[0], random(9), &options).engine.plan().smallest_memory);
    let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options);
    let request = |seed| Request { max_tokens: Some(900), ..request(Rng(seed).tokens(100), seed) };
    let _older = rig.engine.submit(request(1)).unwrap();
    let younger = rig.engine.submit(request(2)).unwrap();
    while rig.engine.metrics().num_preemptions == 0 {
        assert_eq!(rig.driver.turn(), Turn::Ran);
    }
    drop(younger);
    rig.run();
    let metrics = rig.engine.metrics();
    assert_eq!((metrics.finished_abort, metrics.finished_length), (1, 1));
    assert_eq!(metrics.prompt_tokens_recomputed, 0);
}

#[test]
fn an_engine_that_closes_ends_all_streams() {
    let mut rig = rig(1, 4);
    let mut streams: Vec<Stream> = (0..3).map(|i| rig.engine.submit(long(i)).unwrap()).collect();
    rig.driver.turn();
    rig.engine.close();
    assert_eq!(rig.driver.turn(), Turn::Closed);
    for stream in &mut streams {
        let last = std::iter::from_fn(|| stream.try_next()).last();
        assert_eq!(last, Some(Event::Failed(StreamError::EngineClosed)));
        assert!(stream.is_over());
    }
    assert!(matches!(rig.engine.submit(long(9)), Err(SubmitError::Closed)));
    assert_eq!(rig.engine.health(), Health::Closed);
    assert!(rig.driver.at_rest());
}

#[test]
fn a_draining_engine_finishes_what_it_has() {
    let mut rig = rig(1, 4);
    let mut streams: Vec<Stream> = (0..3).map(|i| rig.engine.submit(long(i)).unwrap()).collect();
    rig.driver.turn();
    rig.engine.drain();
    assert_eq!(rig.engine.health(), Health::Draining);
    assert!(matches!(rig.engine.submit(long(9)), Err(SubmitError::Draining)));
    rig.run();
    for stream in &mut streams {
        assert_eq!(answers(stream)[0].tokens.len(), 100);
    }
    assert!(rig.engine.wait_for_rest(Duration::ZERO));
}
