//! Who runs when: bounded gaps between tokens, fair shares, pools smaller than what was promised to clients.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::clock::Clock;
use motet_engine::{Event, Request, Stream, Turn};
use std::time::Duration;

/// A page of the scripted device with its place in the index, generously.
const BYTES_OF_A_PAGE: u64 = 1536 + 400;

/// Turns the wheel and records when each stream got a token.
fn run_recording(rig: &mut Rig, streams: &mut [Stream]) -> Vec<Vec<Duration>> {
    let mut times = vec![Vec::new(); streams.len()];
    while rig.driver.turn() == Turn::Ran {
        for (stream, times) in streams.iter_mut().zip(&mut times) {
            while let Some(event) = stream.try_next() {
                if let Event::Token { .. } = event {
                    times.push(rig.clock.now());
                }
            }
        }
    }
    times
}

fn longest_gap(times: &[Duration]) -> Duration {
    times.windows(2).map(|w| w[1] - w[0]).max().unwrap()
}

/// A request that runs to its limit.
fn endless(prompt: Vec<u32>, tokens: usize) -> Request {
    Request { max_tokens: Some(tokens), end_tokens: vec![], ..request(prompt, 1) }
}

#[test]
fn streams_beside_a_long_prompt_keep_their_pace() {
    for sketch in SKETCHES {
        let mut rig = Rig::new(sketch, random(1_000_000), &options(5, 8192));
        let rng = &mut Rng(1);
        let submit = |rig: &Rig, request| rig.engine.submit(request).unwrap();
        let mut streams: Vec<Stream> = (0..4).map(|_| submit(&rig, endless(rng.tokens(20), 400))).collect();
        for _ in 0..20 {
            rig.driver.turn();
        }
        streams.push(submit(&rig, endless(rng.tokens(6000), 3)));
        let begun = rig.clock.now();
        let times = run_recording(&mut rig, &mut streams);
        for stream in &times[..4] {
            let gap = longest_gap(stream);
            assert!(gap <= Duration::from_millis(150), "{sketch:?}: a gap of {gap:?}");
        }
        // A step of 50 ms has room for 76 rows beside the four: about 80 steps, not 6,000.
        let read_in = times[4][0] - begun;
        assert!(read_in < Duration::from_secs(8), "{sketch:?}: read in {read_in:?}");
    }
}

#[test]
fn a_short_prompt_is_not_stuck_behind_a_long_one() {
    let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options(4, 8192));
    let rng = &mut Rng(1);
    let mut streams = vec![rig.engine.submit(endless(rng.tokens(6000), 2)).unwrap()];
    for _ in 0..3 {
        rig.driver.turn();
    }
    streams.push(rig.engine.submit(endless(rng.tokens(30), 2)).unwrap());
    let arrived = rig.clock.now();
    let times = run_recording(&mut rig, &mut streams);
    let waited = times[1][0] - arrived;
    assert!(waited <= Duration::from_millis(500), "the short prompt waited {waited:?}");
    assert!(times[0][0] > times[1][0]);
}

#[test]
fn of_prompts_that_come_at_once_the_first_answers_begin_early_and_the_last_no_later() {
    let first_tokens = |lengths: &[usize]| -> Vec<Duration> {
        let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options(4, 8192));
        let rng = &mut Rng(1);
        let submit = |&n: &usize| rig.engine.submit(endless(rng.tokens(n), 1)).unwrap();
        let mut streams: Vec<Stream> = lengths.iter().map(submit).collect();
        run_recording(&mut rig, &mut streams).iter().map(|times| times[0]).collect()
    };
    let alone = first_tokens(&[6000])[0];
    let together = first_tokens(&[1500; 4]);
    let (first, last) = (together.iter().min().unwrap(), together.iter().max().unwrap());
    // In equal parts all would begin when all are read. Nearest to the end first, the first one has at least 5/8 of
    // each step: 2.5 times the quarter.
    assert!(*first <= alone.mul_f64(0.45), "{together:?}, alone {alone:?}");
    // One step more than without borders between prompts.
    assert!(*last <= alone + step_time(512), "{together:?}, alone {alone:?}");
}

#[test]
fn a_long_prompt_advances_while_short_ones_keep_coming() {
    let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options(4, 8192));
    let rng = &mut Rng(1);
    let mut long = rig.engine.submit(endless(rng.tokens(6000), 1)).unwrap();
    let mut short: Vec<Stream> = Vec::new();
    let begun = |stream: &mut Stream| {
        std::iter::from_fn(|| stream.try_next()).any(|event| matches!(event, Event::Token { .. }))
    };
    let mut steps = 0;
    while !begun(&mut long) {
        short.retain_mut(|stream| !begun(stream));
        while short.len() < 3 {
            short.push(rig.engine.submit(endless(rng.tokens(2000), 1)).unwrap());
        }
        rig.driver.turn();
        steps += 1;
        // Half of an equal part of 512 rows: 64 in a step.
        assert!(steps <= 6000 / 64 + 2, "the long prompt starves");
    }
}

#[test]
fn a_forced_chunk_is_kept_to() {
    let mut options = options(2, 1024);
    options.prefill_chunk = Some(7);
    let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options);
    rig.answers(endless(Rng(1).tokens(70), 1));
    assert_eq!(rig.control.steps(), 10);
}

#[test]
fn eight_clients_without_a_limit_on_a_pool_of_two_contexts_all_finish_with_their_solo_tokens() {
    for sketch in &SKETCHES[..4] {
        let mut options = options(8, 1024);
        let alone = Rig::new(*sketch, random(1_000_000), &options);
        // Two contexts: what one needs at least, and the pages of one more.
        options.memory = Some(alone.engine.plan().smallest_memory + 16 * BYTES_OF_A_PAGE);
        options.checkpoint_memory = sketch.recurrent.then_some(0);
        let mut rig = Rig::new(*sketch, random(1_000_000), &options);
        let pages = rig.engine.plan().pages[0];
        assert!((32..36).contains(&pages), "{pages} pages");
        let rng = &mut Rng(3);
        let requests: Vec<Request> = (0..8).map(|i| request(rng.tokens(50), i)).collect();
        let expected: Vec<_> = requests.iter().map(|r| rig.expected(r).remove(0)).collect();
        let mut streams: Vec<Stream> = requests.into_iter().map(|r| rig.engine.submit(r).unwrap()).collect();
        rig.run();
        for (stream, expected) in streams.iter_mut().zip(&expected) {
            assert_same(&answers(stream)[0], expected, &format!("{sketch:?}"));
        }
        let metrics = rig.engine.metrics();
        assert!(metrics.num_preemptions > 0, "nobody had to step back: the pool was not small");
        assert_eq!((metrics.finished_stop + metrics.finished_length, metrics.finished_error), (8, 0));
        assert!(rig.driver.at_rest());
    }
}

#[test]
fn who_has_a_place_has_room_for_256_tokens_whatever_the_others_do() {
    // One context of 16 pages: a prompt of 50 and its headroom take 5, so three sessions have a place at once.
    let mut options = options(8, 1024);
    options.memory = Some(Rig::new(SKETCHES[0], random(9), &options).engine.plan().smallest_memory);
    let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options);
    assert_eq!(rig.engine.plan().pages, [16]);
    let rng = &mut Rng(1);
    let _streams: Vec<Stream> =
        (0..8).map(|_| rig.engine.submit(endless(rng.tokens(50), 256)).unwrap()).collect();
    let mut most = 0;
    while rig.driver.turn() == Turn::Ran {
        most = most.max(rig.engine.metrics().num_requests_running);
    }
    assert_eq!((most, rig.engine.metrics().num_preemptions), (3, 0));
    assert_eq!(rig.engine.metrics().finished_length, 8);
}

#[test]
fn the_oldest_is_never_interrupted() {
    let mut options = options(4, 1024);
    options.memory = Some(Rig::new(SKETCHES[0], random(9), &options).engine.plan().smallest_memory);
    let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options);
    let rng = &mut Rng(1);
    let mut streams: Vec<Stream> =
        (0..4).map(|_| rig.engine.submit(endless(rng.tokens(50), 900)).unwrap()).collect();
    let times = run_recording(&mut rig, &mut streams);
    assert!(rig.engine.metrics().num_preemptions > 0);
    assert!(longest_gap(&times[0]) <= Duration::from_millis(150));
    assert!(times.windows(2).all(|w| w[0].last() <= w[1].last()), "they finish in the order of arrival");
}
