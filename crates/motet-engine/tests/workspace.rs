//! As a library: the workspace comes with the first session and grows between steps to what sessions need.
#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::clock::{Clock, SimClock};
use motet_engine::scripted::Scripted;
use motet_engine::{Driver, Engine, Event, Machine, Options, Plan, Request, StreamError, Workspace};
use motet_model::batch::StateOp;
use motet_model::device::Observer;
use motet_model::{DeviceError, InFlight, Slot, Stage};
use std::sync::{Arc, Mutex};

/// Remembers what was reserved, and has no more than `most` rows.
struct Reserving {
    inner: Box<dyn Stage>,
    reserved: Arc<Mutex<Vec<usize>>>,
    most: usize,
}

impl Stage for Reserving {
    fn reserve(&mut self, rows: usize) -> Result<(), DeviceError> {
        if rows > self.most {
            let source = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
            return Err(DeviceError::Memory { what: "the workspace", bytes: rows as u64, source });
        }
        self.reserved.lock().unwrap().push(rows);
        Ok(())
    }

    fn step(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        let reserved = *self.reserved.lock().unwrap().last().unwrap();
        assert!(work.batch.rows() <= reserved, "{} rows in {reserved}", work.batch.rows());
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

fn engine(workspace: Workspace, most: usize) -> (Engine, Driver, Arc<Mutex<Vec<usize>>>) {
    let device = Scripted::new(random(1_000_000));
    let network = SKETCHES[0].network();
    let options = Options { workspace, ..options(4, 2048) };
    let plan = Plan::new(&network, &options, Machine { memory: None }, &device).unwrap();
    let reserved = Arc::<Mutex<Vec<usize>>>::default();
    let inner = device.stage(&network, plan.limits());
    let stage = Box::new(Reserving { inner, reserved: reserved.clone(), most });
    let clock = Arc::new(SimClock::default()) as Arc<dyn Clock>;
    let (engine, driver) = Engine::by_hand(plan, clock, vec![stage]).unwrap();
    (engine, driver, reserved)
}

fn run(engine: &Engine, driver: &mut Driver, prompt: usize) -> Vec<Event> {
    let ask = Request { max_tokens: Some(3), ..request(Rng(prompt as u64).tokens(prompt), 1) };
    let mut stream = engine.submit(ask).unwrap();
    while driver.turn() == motet_engine::Turn::Ran {}
    std::iter::from_fn(|| stream.try_next()).collect()
}

#[test]
fn a_server_has_it_from_the_start() {
    let (_engine, _driver, reserved) = engine(Workspace::AtStart, usize::MAX);
    assert_eq!(*reserved.lock().unwrap(), [512]);
}

#[test]
fn a_library_grows_with_its_sessions_up_to_the_plan() {
    let (engine, mut driver, reserved) = engine(Workspace::WithSessions, usize::MAX);
    assert!(reserved.lock().unwrap().is_empty());
    for prompt in [5, 100, 90, 2000] {
        run(&engine, &mut driver, prompt);
    }
    // At least two rows a session.
    assert_eq!(*reserved.lock().unwrap(), [8, 128, 512]);
}

#[test]
fn where_it_cannot_grow_batches_stay_smaller() {
    let (engine, mut driver, reserved) = engine(Workspace::WithSessions, 64);
    run(&engine, &mut driver, 40);
    let events = run(&engine, &mut driver, 1000);
    assert!(matches!(events.last(), Some(Event::Finished { .. })));
    assert_eq!(*reserved.lock().unwrap(), [64]);
}

#[test]
fn where_there_is_none_the_request_says_so() {
    let (engine, mut driver, _) = engine(Workspace::WithSessions, 4);
    let events = run(&engine, &mut driver, 40);
    assert!(matches!(&events[..], [Event::Failed(StreamError::Memory(what))] if what.contains("64 bytes")));
    assert!(driver.at_rest());
}
