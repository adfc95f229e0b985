//! Real threads on a real clock: clients that submit, read, and leave while the engine's own thread runs.
#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::scripted::Scripted;
use motet_engine::{Options, SubmitError};
use motet_model::Stages;
use std::time::Duration;

#[test]
fn clients_on_many_threads_get_their_own_answers() {
    clients(1);
}

#[test]
fn clients_get_their_own_answers_behind_stages_on_threads() {
    clients(2);
    clients(4);
}

fn clients(stages: usize) {
    let sketch = SKETCHES[3];
    let options = Options { stages: Stages::Balanced(stages), ..options(4, 512) };
    let script = random(60);
    let device = Scripted::new(script.clone());
    let engine = device.start(&sketch, &options).unwrap();
    std::thread::scope(|scope| {
        for client in 0..8 {
            let (engine, script) = (engine.clone(), &script);
            scope.spawn(move || {
                let rng = &mut Rng(client);
                for round in 0..25 {
                    let length = rng.range(1, 200);
                    let ask = || request(Rng(client * 100 + round).tokens(length), round);
                    let mut stream = loop {
                        match engine.submit(ask()) {
                            Ok(stream) => break stream,
                            Err(SubmitError::QueueFull { .. }) => std::thread::yield_now(),
                            Err(error) => panic!("{error}"),
                        }
                    };
                    if rng.chance(3) {
                        (0..rng.range(0, 20)).for_each(|_| drop(stream.blocking_next()));
                        continue; // leaves
                    }
                    let mut said = Vec::new();
                    while let Some(event) = stream.blocking_next() {
                        add(&mut said, event);
                    }
                    assert_same(
                        &said[0],
                        &expected(sketch, script, 512, &ask(), 0),
                        &format!("client {client}, round {round}"),
                    );
                }
            });
        }
    });
    assert!(engine.wait_for_rest(Duration::from_secs(20)));
    let metrics = engine.metrics();
    assert_eq!((metrics.num_requests_running, metrics.num_requests_waiting), (0, 0));
    assert_eq!(metrics.kv_cache_usage, 0.0);
    let ended = metrics.finished_stop + metrics.finished_length + metrics.finished_abort;
    assert_eq!(device.control.stages_apart(), 0);
    assert!(ended <= 200 && metrics.finished_error == 0, "{ended} of 200");
}
