//! The façade, and the thread behind it.
//!
//! A handle only puts requests into the bounded queue, reads counters and asks for the end. Everything else happens
//! on the engine's own thread, which turns one wheel: settle what has come back, draft, fill a batch, send it off; and
//! sleeps when there is nothing to run. [`switching`] changes how it drafts while it runs. A watchdog on a thread of its
//! own looks at it from outside.

mod switching;

use crate::agreement::FallenOut;
use crate::clock::{Clock, RealClock, SimClock};
use crate::drafts::Drafter;
use crate::metrics::MetricsSnapshot;
use crate::pipeline::{Flight, Inline, OnThreads, Pipeline, Task};
use crate::plan::{Plan, Workspace};
use crate::queue::{Queue, Waiting};
use crate::request::{EngineLimits, Request, SubmitError};
use crate::scheduler::Scheduler;
use crate::scripted::{Simulated, StageTime};
use crate::stream::{Stream, StreamError};
use crate::watchdog;
use motet_model::{DeviceError, InFlight, PAGE, Stage};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use switching::{Order, drafter};

/// How the engine is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Weights are being read. Requests may be submitted; they wait.
    Loading,
    /// Running or idle.
    Ready,
    /// Running answers finish; nothing new is taken.
    Draining,
    /// A step took longer than the watchdog allows. All streams have ended, and it never goes on, even if the step ends:
    /// what hung once is mended by a new process only.
    Stalled,
    /// The engine's thread has ended or is about to.
    Closed,
}

/// A handle to an engine. Clones are the same engine; when the last is dropped, the engine closes.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
    /// Closes the engine when the last handle is gone.
    _owner: Arc<Owner>,
}

/// What handles and the engine's thread share.
struct Shared {
    plan: Plan,
    limits: EngineLimits,
    clock: Arc<dyn Clock>,
    queue: Queue,
    metrics: Mutex<MetricsSnapshot>,
    /// Why the engine could not start.
    failure: Mutex<Option<DeviceError>>,
    /// Who is told when drafts stop agreeing.
    listener: Mutex<Option<Listener>>,
    /// What the thread shall change between two steps.
    orders: Sender<Order>,
}

/// What is called when drafts stop agreeing.
type Listener = Box<dyn Fn(&FallenOut) + Send>;

struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the engine's thread, which first calls `open` to load the weights of all stages; see
    /// [`Engine::wait_until_loaded`].
    pub fn start(
        plan: Plan,
        open: impl FnOnce() -> Result<Vec<Box<dyn Stage>>, DeviceError> + Send + 'static,
    ) -> Self {
        Self::start_with_clock(plan, Arc::new(RealClock::default()), open)
    }

    /// The same with another clock, for tests.
    pub fn start_with_clock(
        plan: Plan,
        clock: Arc<dyn Clock>,
        open: impl FnOnce() -> Result<Vec<Box<dyn Stage>>, DeviceError> + Send + 'static,
    ) -> Self {
        let (orders, taken) = channel();
        let shared = Arc::new(Shared::new(plan, clock, orders));
        let of_thread = shared.clone();
        let body = move || {
            // Whatever happens to this thread, nobody waits for it in vain.
            let _gone = GoneOnDrop(of_thread.clone());
            match open().and_then(|stages| Driver::new(of_thread.clone(), stages, taken)) {
                Ok(mut driver) => driver.run(),
                Err(error) => of_thread.fail_to_start(error),
            }
        };
        let thread = match shared.watch().and_then(|()| thread("motet-engine", body)) {
            Ok(thread) => Some(thread),
            Err(source) => {
                let what = "the engine's threads";
                shared.fail_to_start(DeviceError::Memory { what, bytes: 0, source });
                shared.queue.gone();
                None
            }
        };
        let _owner = Arc::new(Owner { shared: shared.clone(), thread: Mutex::new(thread) });
        Self { shared, _owner }
    }

    /// An engine without a thread: the caller turns the wheel. For simulations. Several stages have their threads all
    /// the same.
    ///
    /// # Errors
    /// The workspace could not be had.
    pub fn by_hand(
        plan: Plan,
        clock: Arc<dyn Clock>,
        stages: Vec<Box<dyn Stage>>,
    ) -> Result<(Self, Driver), DeviceError> {
        let (orders, taken) = channel();
        let shared = Arc::new(Shared::new(plan, clock, orders));
        let driver = Driver::new(shared.clone(), stages, taken)?;
        let _owner = Arc::new(Owner { shared: shared.clone(), thread: Mutex::new(None) });
        Ok((Self { shared, _owner }, driver))
    }

    /// The same with stages that work at the same time in simulated time, on the caller's thread.
    ///
    /// # Errors
    /// The workspace could not be had.
    pub fn simulated(
        plan: Plan,
        clock: Arc<SimClock>,
        stages: Vec<Box<dyn Stage>>,
        time: StageTime,
    ) -> Result<(Self, Driver), DeviceError> {
        let (orders, taken) = channel();
        let shared = Arc::new(Shared::new(plan, clock.clone(), orders));
        let pipeline = Box::new(Simulated::new(stages, clock, time));
        let driver = Driver::over(shared.clone(), pipeline, taken)?;
        let _owner = Arc::new(Owner { shared: shared.clone(), thread: Mutex::new(None) });
        Ok((Self { shared, _owner }, driver))
    }

    /// Waits until the weights are loaded and the first step could run.
    ///
    /// # Errors
    /// Why they could not be loaded; [`DeviceError::Panic`] if the engine was closed meanwhile.
    pub fn wait_until_loaded(&self) -> Result<(), DeviceError> {
        if self.shared.queue.wait_until_loaded() {
            return Ok(());
        }
        let closed = || DeviceError::Panic("the engine was closed while loading".into());
        Err(self.shared.failure.lock().take().unwrap_or_else(closed))
    }

    /// Puts a request into the queue after checking all of it. Dropping the stream cancels it.
    ///
    /// # Errors
    /// Any [`SubmitError`]; nothing was started then.
    pub fn submit(&self, request: Request) -> Result<Stream, SubmitError> {
        let taken = self.shared.submit(request);
        if let Err(error) = &taken {
            let mut metrics = self.shared.metrics.lock();
            match error {
                SubmitError::QueueFull { .. } => metrics.rejected_queue_full += 1,
                SubmitError::TooLong { .. } | SubmitError::NeverFits { .. } => metrics.rejected_too_long += 1,
                SubmitError::Invalid { .. } => metrics.rejected_invalid += 1,
                SubmitError::Draining | SubmitError::Closed => metrics.rejected_closed += 1,
            }
        }
        taken
    }

    /// What requests are checked against.
    pub fn limits(&self) -> EngineLimits {
        self.shared.limits
    }

    /// The plan that it runs by.
    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// A copy of all counters.
    pub fn metrics(&self) -> MetricsSnapshot {
        self.shared.metrics.lock().clone()
    }

    /// From now on calls `tell` each time that drafts stop agreeing with the network: on the engine's thread between two
    /// steps, so it must be quick and must not block.
    pub fn on_fallen_out(&self, tell: impl Fn(&FallenOut) + Send + 'static) {
        *self.shared.listener.lock() = Some(Box::new(tell));
    }

    /// Whether it takes requests and makes progress.
    pub fn health(&self) -> Health {
        self.shared.queue.health()
    }

    /// Calls `tell` once when the watchdog has given the engine up and ended all streams: on a thread of its own,
    /// which needs nothing of what hangs. A process should then let its clients hear of it, and end.
    pub fn on_stall(&self, tell: impl FnOnce() + Send + 'static) {
        self.shared.queue.on_stall(Box::new(tell));
    }

    /// Takes no new requests; those in the queue and those running finish.
    pub fn drain(&self) {
        self.shared.queue.drain();
    }

    /// Waits until nothing runs or waits, at most `most`; `false` if something still does.
    pub fn wait_for_rest(&self, most: Duration) -> bool {
        self.shared.queue.wait_for_rest(most)
    }

    /// Ends all streams with `EngineClosed` and waits until the engine's thread has ended, after the step it is in; not
    /// for one that the watchdog has given up.
    pub fn close(&self) {
        self._owner.close();
    }
}

impl Owner {
    fn close(&self) {
        self.shared.queue.close();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id())
            && self.shared.queue.wait_until_gone()
        {
            // A panic there has been told to every stream already.
            let _ = thread.join();
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.close();
    }
}

struct GoneOnDrop(Arc<Shared>);

impl Drop for GoneOnDrop {
    fn drop(&mut self) {
        self.0.queue.gone();
        self.0.queue.fail_all(&StreamError::EngineClosed);
    }
}

fn thread(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.into()).spawn(body)
}

impl Shared {
    fn new(plan: Plan, clock: Arc<dyn Clock>, orders: Sender<Order>) -> Self {
        let limits = EngineLimits {
            context: plan.context,
            sessions: plan.sessions,
            queue: plan.options.queue,
            vocab: plan.vocab,
        };
        Self {
            limits,
            clock,
            queue: Queue::new(plan.options.queue),
            metrics: Mutex::new(MetricsSnapshot::new(
                plan.context,
                plan.blocks,
                plan.limits.batch.drafts,
                plan.split.stages(),
            )),
            failure: Mutex::new(None),
            listener: Mutex::new(None),
            orders,
            plan,
        }
    }

    /// Starts the watchdog, if there is to be one.
    fn watch(self: &Arc<Self>) -> io::Result<()> {
        let Some(patience) = self.plan.options.watchdog else { return Ok(()) };
        let shared = self.clone();
        let body = move || watchdog::watch(&shared.queue, &*shared.clock, patience);
        thread("motet-watchdog", body).map(drop)
    }

    fn submit(&self, request: Request) -> Result<Stream, SubmitError> {
        request.check(&self.limits)?;
        let (waiting, stream) = Waiting::new(request, &self.limits, self.clock.now());
        let needed = (waiting.request.prompt.len() + waiting.answer).div_ceil(PAGE);
        if needed > self.plan.blocks {
            return Err(SubmitError::NeverFits { needed, pages: self.plan.blocks });
        }
        self.queue.push(waiting)?;
        Ok(stream)
    }

    fn fail_to_start(&self, error: DeviceError) {
        let told = StreamError::DeviceFailed(error.to_string());
        *self.failure.lock() = Some(error);
        self.queue.close();
        self.queue.fail_all(&told);
    }
}

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
    shared: Arc<Shared>,
    scheduler: Scheduler,
    pipeline: Box<dyn Pipeline>,
    drafter: Option<Box<dyn Drafter>>,
    orders: Receiver<Order>,
    /// Drafts to a session and step that there is room for, and bytes taken for them beside the plan.
    room: (usize, u64),
    /// Batches that are not in flight.
    #[allow(clippy::vec_box, reason = "what goes from stage to stage is the pointer")]
    grounded: Vec<Box<Flight>>,
    /// All batches.
    flights: usize,
    /// Rows that the stages' workspaces hold.
    reserved: usize,
    /// Rows that they can hold at most: the plan's, until the system refuses.
    ceiling: usize,
}

impl Driver {
    fn new(
        shared: Arc<Shared>,
        stages: Vec<Box<dyn Stage>>,
        orders: Receiver<Order>,
    ) -> Result<Self, DeviceError> {
        let (mut stages, clock) = (stages, shared.clock.clone());
        let pipeline: Box<dyn Pipeline> = match (stages.pop(), stages.is_empty()) {
            (Some(only), true) => Box::new(Inline::new(only, clock)),
            (last, _) => {
                stages.extend(last);
                let landed = shared.clone();
                Box::new(OnThreads::start(stages, shared.plan.flights, &clock, move || {
                    landed.queue.landed()
                })?)
            }
        };
        Self::over(shared, pipeline, orders)
    }

    fn over(
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
        let drafter = drafter(drafts, plan.limits.draft_head);
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

    fn run(&mut self) {
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
    fn await_all(&mut self) {
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
        let Some(drafter) = &mut self.drafter else { return Some(Duration::ZERO) };
        let Some(mut flight) = self.grounded.pop() else { return Some(Duration::ZERO) };
        self.scheduler.ask_for_drafts(&mut flight.work.batch);
        if flight.work.batch.rows() == 0 {
            self.grounded.push(flight);
            return Some(Duration::ZERO);
        }
        let clock = self.shared.clock.clone();
        let begun = clock.now();
        let so_far = || clock.now().saturating_sub(begun);
        let scheduler = &self.scheduler;
        if drafter.draft(&mut flight.work, &|slot| scheduler.tokens(slot)) {
            self.scheduler.take_drafts(&flight.work, so_far());
            flight.clear();
            self.grounded.push(flight);
            return Some(so_far());
        }
        self.shared.queue.busy(begun);
        self.scheduler.drafting(&flight.work.batch);
        flight.task = Task::Draft;
        self.pipeline.send(flight);
        self.land();
        // Where the stage runs on this thread, the drafts are there.
        self.pipeline.is_inline().then(so_far)
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
