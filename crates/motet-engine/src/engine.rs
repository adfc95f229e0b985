//! The façade, and the thread behind it.
//!
//! A handle only puts requests into the bounded queue, reads counters and asks for the end. Everything else happens
//! on the engine's own thread, which turns one wheel ([`driver`]) and sleeps when there is nothing to run. [`switching`]
//! changes how it drafts while it runs. A watchdog on a thread of its own looks at it from outside.

mod driver;
mod switching;

use crate::agreement::FallenOut;
use crate::clock::{Clock, RealClock, SimClock};
use crate::metrics::MetricsSnapshot;
use crate::plan::Plan;
use crate::queue::{Queue, Waiting};
use crate::request::{EngineLimits, Request, SubmitError};
use crate::scripted::{Simulated, StageTime};
use crate::stream::{Stream, StreamError};
use crate::watchdog;
use motet_model::{DeviceError, PAGE, Stage};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use switching::Order;

pub use driver::{Driver, Turn};

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
