//! The wheel that the engine's thread turns: settle what has come back, draft, fill a batch, send it off.
//!
//! It owns the scheduler, the stages and the batches between them; nobody else touches them. It never decides which rows
//! run (the scheduler does) nor how (the stages do).

use super::Shared;
use super::switching::{Order, drafter};
use crate::drafts::Drafter;
use crate::pipeline::{Flight, Inline, OnThreads, Pipeline, Task};
use crate::plan::Workspace;
use crate::scheduler::Scheduler;
use crate::stream::StreamError;
use motet_model::{DeviceError, InFlight, Stage};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

/// What a turn of the wheel did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// A step was run.
    Ran,
    /// There was nothing to run.
    Idle,
    /// The engine is closed; all streams have ended.
    Closed,
}

/// What the engine's thread owns: the scheduler, the stages and the batches between them.
pub struct Driver {
    pub(super) shared: Arc<Shared>,
    pub(super) scheduler: Scheduler,
    pub(super) pipeline: Box<dyn Pipeline>,
    pub(super) drafter: Option<Box<dyn Drafter>>,
    pub(super) orders: Receiver<Order>,
    /// Drafts to a session and step that there is room for, and bytes taken for them beside the plan.
    pub(super) room: (usize, u64),
    /// Batches that are not in flight.
    #[allow(clippy::vec_box, reason = "what goes from stage to stage is the pointer")]
    pub(super) grounded: Vec<Box<Flight>>,
    /// All batches.
    pub(super) flights: usize,
    /// Rows that the stages' workspaces hold.
    pub(super) reserved: usize,
    /// Rows that they can hold at most: the plan's, until the system refuses.
    pub(super) ceiling: usize,
}

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        stages: Vec<Box<dyn Stage>>,
        orders: Receiver<Order>,
    ) -> Result<Self, DeviceError> {
        let (mut stages, clock) = (stages, shared.clock.clone());
        let pipeline: Box<dyn Pipeline> = match (stages.pop(), stages.is_empty()) {
            (Some(only), true) => Box::new(Inline::new(only, clock)),
            (last, _) => {
                stages.extend(last);
                let (landed, plan) = (shared.clone(), &shared.plan);
                // Sending never waits: where free pages are filled, each of them is sent before each batch.
                let pages = if plan.options.poison { plan.limits.pages.iter().sum() } else { 0 };
                Box::new(OnThreads::start(stages, plan.flights * (1 + pages), &clock, move || {
                    landed.queue.landed()
                })?)
            }
        };
        Self::over(shared, pipeline, orders)
    }

    pub(super) fn over(
        shared: Arc<Shared>,
        pipeline: Box<dyn Pipeline>,
        orders: Receiver<Order>,
    ) -> Result<Self, DeviceError> {
        let plan = &shared.plan;
        let (flights, stages) = (plan.flights, plan.split.stages());
        let flight = |_| {
            let work = InFlight::with_capacity(&plan.limits.batch, plan.d_model);
            Box::new(Flight::new(work, plan.sessions, stages))
        };
        let grounded = (0..flights).map(flight).collect();
        let at_start = plan.options.workspace == Workspace::AtStart;
        let (scheduler, ceiling, drafts) = (Scheduler::new(plan), plan.rows, plan.limits.batch.drafts);
        let drafter = drafter(plan.options.drafts, plan.limits.draft_head);
        let room = (drafts, 0);
        let mut driver = Self {
            scheduler,
            pipeline,
            drafter,
            orders,
            room,
            grounded,
            flights,
            reserved: 0,
            ceiling,
            shared,
        };
        if at_start {
            driver.reserve(driver.shared.plan.rows)?;
        }
        driver.shared.queue.loaded();
        Ok(driver)
    }

    pub(super) fn run(&mut self) {
        loop {
            match self.turn() {
                Turn::Ran => {}
                Turn::Idle => self.shared.queue.wait_for_work(),
                Turn::Closed => return,
            }
        }
    }

    /// Settles what has come back, and sends a batch off if there is one and something to run. Where neither can be done,
    /// waits for what is in flight.
    pub fn turn(&mut self) -> Turn {
        let shared = self.shared.clone();
        let queue = &shared.queue;
        if queue.is_closed() {
            self.close();
            return Turn::Closed;
        }
        self.take_orders();
        let mut ran = self.land();
        ran |= self.take_off();
        ran |= self.land();
        if ran {
            return Turn::Ran;
        }
        if self.grounded.len() == self.flights {
            queue.idle();
            return Turn::Idle;
        }
        self.await_landing();
        Turn::Ran
    }

    /// Waits until a batch has come back, or something else can be done, and settles it.
    fn await_landing(&mut self) {
        let in_flight = self.flights - self.grounded.len();
        let knock = self.scheduler.has_room(in_flight) && self.scheduler.takes_requests();
        self.pipeline.wait(&self.shared.queue, knock);
        self.land();
    }

    /// Waits until nothing is in flight.
    pub(super) fn await_all(&mut self) {
        while self.grounded.len() < self.flights && !self.shared.queue.is_closed() {
            self.pipeline.wait(&self.shared.queue, false);
            self.land();
        }
    }

    /// Settles all batches that have come back; false if none has.
    fn land(&mut self) -> bool {
        let mut landed = false;
        while let Some(mut flight) = self.pipeline.receive() {
            landed = true;
            match flight.task {
                Task::Step => {
                    self.settle(&mut flight);
                    if let Some(fallen_out) = self.scheduler.take_fallen_out()
                        && let Some(tell) = &*self.shared.listener.lock()
                    {
                        tell(&fallen_out);
                    }
                    if flight.task == Task::Commit {
                        self.pipeline.send(flight);
                        continue;
                    }
                }
                Task::Commit => self.committed(&flight),
                Task::Draft => {
                    let took = flight.outcome.is_ok().then(|| flight.time());
                    self.scheduler.drafted(&flight.work, took);
                }
            }
            flight.clear();
            self.grounded.push(flight);
        }
        landed
    }

    /// Takes the answers of a step; where it brought rows to verify, it is sent once more to keep some of them.
    fn settle(&mut self, flight: &mut Flight) {
        let shared = self.shared.clone();
        let now = shared.clock.now();
        shared.queue.busy(now);
        let metrics = &mut shared.metrics.lock();
        match &flight.outcome {
            Ok(()) => {
                self.scheduler.settle(flight, now, metrics);
                if !flight.kept.is_empty() {
                    flight.task = Task::Commit;
                } else {
                    self.turned(flight);
                }
            }
            Err(error) => self.scheduler.step_failed(&flight.work, &error.to_string(), metrics),
        }
        self.scheduler.measure(&shared.queue, metrics);
    }

    /// The rows to keep are kept, or could not be.
    fn committed(&mut self, flight: &Flight) {
        if flight.outcome.is_err() {
            let metrics = &mut self.shared.metrics.lock();
            self.scheduler.commit_failed(&flight.kept, &flight.saved, metrics);
        }
        self.turned(flight);
    }

    fn turned(&mut self, flight: &Flight) {
        let took = match self.pipeline.is_inline() {
            true => self.shared.clock.now().saturating_sub(flight.begun + flight.drafting),
            // While a stage works on a batch, the others work on others.
            false => flight.took.iter().max().copied().unwrap_or_default(),
        };
        self.scheduler.turned(flight.work.batch.rows(), took);
    }

    /// Fills a batch with what is ready and sends it into the first stage; false if there was none, or nothing to run.
    fn take_off(&mut self) -> bool {
        self.grow_workspace();
        if !self.scheduler.has_room(self.flights - self.grounded.len()) {
            return false;
        }
        let shared = self.shared.clone();
        let (queue, clock) = (&shared.queue, &shared.clock);
        let begun = clock.now();
        self.scheduler.prepare(queue, &mut shared.metrics.lock());
        let Some(drafting) = self.draft() else { return true };
        let Some(mut flight) = self.grounded.pop() else { return false };
        (flight.begun, flight.drafting) = (begun, drafting);
        {
            let metrics = &mut shared.metrics.lock();
            self.scheduler.fill(&mut flight.work.batch, queue, clock.now(), metrics);
            self.scheduler.measure(queue, metrics);
        }
        if flight.work.batch.rows() == 0 {
            self.grounded.push(flight);
            return false;
        }
        if shared.plan.options.poison {
            self.scheduler.poison(|pool, page| self.pipeline.poison(pool, page));
        }
        queue.busy(clock.now());
        self.pipeline.send(flight);
        true
    }

    /// Has drafts made for the sessions that go and want some, and says how long that took; `None` if they are in the
    /// making behind what is in flight.
    fn draft(&mut self) -> Option<Duration> {
        let Some(drafter) = &self.drafter else { return Some(Duration::ZERO) };
        let Some(mut flight) = self.grounded.pop() else { return Some(Duration::ZERO) };
        self.scheduler.ask_for_drafts(&**drafter, &mut flight.work.batch);
        if flight.work.batch.rows() == 0 {
            self.grounded.push(flight);
            return Some(Duration::ZERO);
        }
        let clock = self.shared.clock.clone();
        let begun = clock.now();
        self.shared.queue.busy(begun);
        self.scheduler.drafting(&flight.work.batch);
        flight.task = Task::Draft;
        self.pipeline.send(flight);
        self.land();
        // Where the stage runs on this thread, the drafts are there.
        self.pipeline.is_inline().then(|| clock.now().saturating_sub(begun))
    }

    /// How long a batch of so many rows takes in each stage, by what was measured; `None` before anything was.
    pub fn stage_times(&self, rows: usize) -> Option<Vec<Duration>> {
        self.scheduler.stage_times(rows)
    }

    /// Whether nothing runs or waits in line, and nothing is held.
    pub fn at_rest(&self) -> bool {
        self.scheduler.at_rest()
    }

    /// As a library, the workspace comes with the first session and grows to what sessions need. Where it can't
    /// grow, batches stay smaller; where there is none at all, what waits fails.
    fn grow_workspace(&mut self) {
        if self.reserved == self.ceiling || self.grounded.len() < self.flights {
            return;
        }
        let wanted = self.scheduler.rows_wanted() + self.shared.queue.rows_wanted();
        if wanted <= self.reserved {
            return;
        }
        let plan = &self.shared.plan;
        let rows = wanted.next_power_of_two().clamp((2 * plan.sessions).min(plan.rows), plan.rows);
        match self.reserve(rows) {
            Ok(()) => {}
            Err(error) if self.reserved == 0 => {
                let error = StreamError::Memory(error.to_string());
                self.scheduler.fail_all(&error, &mut self.shared.metrics.lock());
                self.shared.queue.fail_all(&error);
            }
            Err(_) => self.ceiling = self.reserved,
        }
    }

    fn reserve(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.pipeline.each(Arc::new(move |stage| stage.reserve(rows)))?;
        self.reserved = rows;
        self.scheduler.set_most_rows(rows);
        Ok(())
    }

    fn close(&mut self) {
        let error = StreamError::EngineClosed;
        self.scheduler.fail_all(&error, &mut self.shared.metrics.lock());
        self.shared.queue.fail_all(&error);
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.queue.close();
        self.close();
    }
}
