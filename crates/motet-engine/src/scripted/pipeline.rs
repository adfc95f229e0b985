//! A pipeline in simulated time: stages work at the same time as far as the clock knows, and in a fixed order on one
//! thread. A batch is in a stage from the moment that it has left the one before and the stage is free.

use crate::clock::{Clock, SimClock};
use crate::pipeline::{Ask, Flight, Pipeline, Task};
use crate::queue::Queue;
use motet_model::{DeviceError, Stage};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// How long a stage (by number, from 0) takes for so many rows.
pub type StageTime = Arc<dyn Fn(usize, usize) -> Duration + Send + Sync>;

/// Stages whose time is simulated.
pub(crate) struct Simulated {
    stages: Vec<Box<dyn Stage>>,
    clock: Arc<SimClock>,
    time: StageTime,
    /// When each stage is free.
    free: Vec<Duration>,
    /// Batches with the time at which they leave the last stage.
    flying: VecDeque<(Duration, Box<Flight>)>,
}

impl Simulated {
    pub(crate) fn new(stages: Vec<Box<dyn Stage>>, clock: Arc<SimClock>, time: StageTime) -> Self {
        let free = vec![Duration::ZERO; stages.len()];
        Self { stages, clock, time, free, flying: VecDeque::new() }
    }
}

impl Pipeline for Simulated {
    fn send(&mut self, mut flight: Box<Flight>) {
        let mut at = self.clock.now();
        for (number, stage) in self.stages.iter_mut().enumerate() {
            // A step that fails has taken its time; the stages behind have nothing to run.
            let runs = flight.task == Task::Step && flight.outcome.is_ok();
            flight.visit(&mut **stage, number, &*self.clock);
            let took = match runs {
                true => (self.time)(number, flight.work.batch.rows()),
                false => Duration::ZERO,
            };
            flight.took[number] += took;
            at = at.max(self.free[number]) + took;
            self.free[number] = at;
        }
        self.flying.push_back((at, flight));
    }

    fn receive(&mut self) -> Option<Box<Flight>> {
        let landed = self.flying.front().is_some_and(|(at, _)| *at <= self.clock.now());
        if landed { self.flying.pop_front().map(|(_, flight)| flight) } else { None }
    }

    fn wait(&mut self, _queue: &Queue, _knock: bool) {
        if let Some((at, _)) = self.flying.front() {
            self.clock.advance(at.saturating_sub(self.clock.now()));
        }
    }

    fn each(&mut self, ask: Ask) -> Result<(), DeviceError> {
        self.stages.iter_mut().try_for_each(|stage| ask(&mut **stage))
    }

    fn poison(&mut self, pool: usize, page: u32) {
        self.stages.iter_mut().for_each(|stage| stage.poison(pool, page));
    }
}
