//! The stages, and the batches on their way through them.
//!
//! A batch in flight belongs to one stage at a time: it is moved from each to the next through a bounded channel, with
//! its rows in buffers that were there from the start, and comes back to the engine's thread behind the last. Every
//! stage takes what comes in order, so what was sent later (a commit, a page that changes owner) takes effect later, in
//! each of them. What fails in one stage is only told by the others, which keep their sessions' state in step.
//!
//! Nothing here decides what runs, copies a row, takes a lock or allocates between start and end.

use crate::clock::Clock;
use crate::queue::Queue;
use motet_model::{Checkpoint, DeviceError, InFlight, Slot, Stage};
use parking_lot::{Condvar, Mutex};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// A batch, what is to be done with it, and what became of it.
pub(crate) struct Flight {
    pub(crate) work: InFlight,
    pub(crate) task: Task,
    /// What [`Task::Commit`] keeps of each session's rows.
    pub(crate) kept: Vec<(Slot, usize)>,
    /// Where state of those sessions is saved behind the commit.
    pub(crate) saved: Vec<Checkpoint>,
    /// The first stage's error, if one failed.
    pub(crate) outcome: Result<(), DeviceError>,
    /// How long each stage took.
    pub(crate) took: Vec<Duration>,
    /// When the turn began that filled the batch, and how long drafting took in it.
    pub(crate) begun: Duration,
    pub(crate) drafting: Duration,
}

/// What stages do with a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    /// Run its rows.
    Step,
    /// Keep some of the rows that it brought to verify, all else is over.
    Commit,
    /// Draft with the network's own head: the last stage's part.
    Draft,
}

impl Flight {
    pub(crate) fn new(work: InFlight, sessions: usize, stages: usize) -> Self {
        Self {
            work,
            task: Task::Step,
            kept: Vec::with_capacity(sessions),
            saved: Vec::with_capacity(sessions),
            outcome: Ok(()),
            took: vec![Duration::ZERO; stages],
            begun: Duration::ZERO,
            drafting: Duration::ZERO,
        }
    }

    /// Ready for the next batch.
    pub(crate) fn clear(&mut self) {
        self.work.clear();
        self.kept.clear();
        self.saved.clear();
        self.task = Task::Step;
        self.outcome = Ok(());
        self.took.fill(Duration::ZERO);
    }

    /// What all stages took together: a row's way through them, without waiting.
    pub(crate) fn time(&self) -> Duration {
        self.took.iter().sum()
    }

    /// Lets a stage do its part.
    pub(crate) fn visit(&mut self, stage: &mut dyn Stage, number: usize, clock: &dyn Clock) {
        let begun = clock.now();
        let done = catch_unwind(AssertUnwindSafe(|| match (self.task, &self.outcome) {
            (Task::Step, Ok(())) => stage.step(&mut self.work),
            (Task::Step, Err(_)) => {
                stage.change(&self.work.batch.before);
                Ok(())
            }
            (Task::Commit, Ok(())) => stage.commit(&self.kept),
            (Task::Draft, Ok(())) if number + 1 == self.took.len() => stage.draft(&mut self.work),
            // Sessions whose rows could not be kept are read again; those without drafts go without.
            (Task::Commit | Task::Draft, _) => Ok(()),
        }));
        let done = done.unwrap_or_else(|panic| Err(DeviceError::Panic(message(&*panic))));
        if self.outcome.is_ok() {
            self.outcome = done;
        }
        self.took[number] += clock.now().saturating_sub(begun);
    }
}

/// What a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}

/// Stages, one behind the other.
pub(crate) trait Pipeline: Send {
    /// Sends a batch into the first stage.
    fn send(&mut self, flight: Box<Flight>);

    /// The batch that left the last stage longest ago, if one has.
    fn receive(&mut self) -> Option<Box<Flight>>;

    /// Sleeps until a batch has come back; with `knock` also until something waits in the queue, or the engine is to be
    /// closed.
    fn wait(&mut self, queue: &Queue, knock: bool);

    /// Asks something of every stage, in order, up to the first that refuses. Nothing is in flight.
    fn each(&mut self, ask: Ask) -> Result<(), DeviceError>;

    /// Fills a free page with NaN, behind all that was sent before.
    fn poison(&mut self, pool: usize, page: u32);

    /// Whether what is sent has come back at once: a stage that runs on the engine's thread.
    fn is_inline(&self) -> bool {
        false
    }

    /// Bytes that room for `drafts` drafts to a segment takes in all stages.
    fn bytes_for_drafts(&mut self, drafts: usize) -> Result<u64, DeviceError> {
        let bytes = Arc::new(AtomicU64::new(0));
        let sum = bytes.clone();
        self.each(Arc::new(move |stage| {
            sum.fetch_add(stage.bytes_for_drafts(drafts), Ordering::Relaxed);
            Ok(())
        }))?;
        Ok(bytes.load(Ordering::Relaxed))
    }
}

/// Something that is asked of a stage.
pub(crate) type Ask = Arc<dyn Fn(&mut dyn Stage) -> Result<(), DeviceError> + Send + Sync>;

/// A single stage, on the caller's thread: what is sent has come back at once.
pub(crate) struct Inline {
    stage: Box<dyn Stage>,
    back: Option<Box<Flight>>,
    clock: Arc<dyn Clock>,
}

impl Inline {
    pub(crate) fn new(mut stage: Box<dyn Stage>, clock: Arc<dyn Clock>) -> Self {
        stage.enter();
        Self { stage, back: None, clock }
    }
}

impl Pipeline for Inline {
    fn send(&mut self, mut flight: Box<Flight>) {
        flight.visit(&mut *self.stage, 0, &*self.clock);
        self.back = Some(flight);
    }

    fn receive(&mut self) -> Option<Box<Flight>> {
        self.back.take()
    }

    fn wait(&mut self, _queue: &Queue, _knock: bool) {
        // Nothing is in flight.
    }

    fn each(&mut self, ask: Ask) -> Result<(), DeviceError> {
        ask(&mut *self.stage)
    }

    fn poison(&mut self, pool: usize, page: u32) {
        self.stage.poison(pool, page);
    }

    fn is_inline(&self) -> bool {
        true
    }
}

/// What is told to a stage.
enum Errand {
    Fly(Box<Flight>),
    Poison(usize, u32),
    Ask(Ask, SyncSender<Result<(), DeviceError>>),
}

/// Stages on threads of their own.
pub(crate) struct OnThreads {
    /// The first stage's inlet; `None` once it is closed.
    inlet: Option<SyncSender<Errand>>,
    back: Receiver<Box<Flight>>,
    threads: Vec<JoinHandle<()>>,
}

impl OnThreads {
    /// Starts a thread for each stage, with room for so many errands on the way to each; `landed` is called behind each
    /// batch that has come back.
    pub(crate) fn start(
        stages: Vec<Box<dyn Stage>>,
        errands: usize,
        clock: &Arc<dyn Clock>,
        landed: impl Fn() + Send + 'static,
    ) -> Result<Self, DeviceError> {
        let (out, back) = sync_channel(errands);
        let mut outlet = Outlet::Back(out, Box::new(landed));
        // Nothing is sent: it ends when all threads have let go of it.
        let (ready, all_ready) = sync_channel::<()>(0);
        let mut threads = Vec::with_capacity(stages.len());
        for (number, mut stage) in stages.into_iter().enumerate().rev() {
            let (to_stage, inlet) = sync_channel(errands);
            let next = std::mem::replace(&mut outlet, Outlet::Next(to_stage));
            let clock = clock.clone();
            let ready = ready.clone();
            let body = move || {
                stage.enter();
                wait_once(&inlet);
                drop(ready);
                while let Ok(errand) = inlet.recv() {
                    next.pass(match errand {
                        Errand::Fly(mut flight) => {
                            flight.visit(&mut *stage, number, &*clock);
                            Errand::Fly(flight)
                        }
                        Errand::Poison(pool, page) => {
                            stage.poison(pool, page);
                            Errand::Poison(pool, page)
                        }
                        Errand::Ask(ask, reply) => match ask(&mut *stage) {
                            Ok(()) => Errand::Ask(ask, reply),
                            refused => {
                                // Who asked waits for it.
                                let _ = reply.send(refused);
                                continue;
                            }
                        },
                    });
                }
            };
            let thread = std::thread::Builder::new().name(format!("motet-stage-{number}")).spawn(body);
            let refused = |source| DeviceError::Memory { what: "a stage's thread", bytes: 0, source };
            threads.push(thread.map_err(refused)?);
        }
        drop(ready);
        let _ = all_ready.recv();
        let Outlet::Next(inlet) = outlet else { unreachable!("there is a stage") };
        Ok(Self { inlet: Some(inlet), back, threads })
    }

    fn tell(&self, errand: Errand) {
        // A stage's thread ends only behind the engine's.
        let told = self.inlet.as_ref().is_some_and(|inlet| inlet.send(errand).is_ok());
        assert!(told, "the first stage's thread is gone");
    }
}

/// Waits for a moment in both ways in which a stage's thread waits: what that allocates the first time is there before the
/// first step. Nobody sends anything yet.
fn wait_once(inlet: &Receiver<Errand>) {
    let moment = Duration::from_millis(1);
    let _ = inlet.recv_timeout(moment);
    Condvar::new().wait_for(&mut Mutex::new(()).lock(), moment);
}

/// Where a stage's errands go.
enum Outlet {
    Next(SyncSender<Errand>),
    Back(SyncSender<Box<Flight>>, Box<dyn Fn() + Send>),
}

impl Outlet {
    /// Whoever should take it may have gone: then everything ends.
    fn pass(&self, errand: Errand) {
        match (self, errand) {
            (Outlet::Next(next), errand) => {
                let _ = next.send(errand);
            }
            (Outlet::Back(back, landed), Errand::Fly(flight)) => {
                let _ = back.send(flight);
                landed();
            }
            (Outlet::Back(..), Errand::Ask(_, reply)) => {
                let _ = reply.send(Ok(()));
            }
            (Outlet::Back(..), Errand::Poison(..)) => {}
        }
    }
}

impl Pipeline for OnThreads {
    fn send(&mut self, flight: Box<Flight>) {
        self.tell(Errand::Fly(flight));
    }

    fn receive(&mut self) -> Option<Box<Flight>> {
        self.back.try_recv().ok()
    }

    fn wait(&mut self, queue: &Queue, knock: bool) {
        queue.wait_for_landing(knock);
    }

    fn each(&mut self, ask: Ask) -> Result<(), DeviceError> {
        let (reply, answer) = sync_channel(1);
        self.tell(Errand::Ask(ask, reply));
        answer.recv().unwrap_or_else(|_| Err(DeviceError::Panic("a stage's thread is gone".into())))
    }

    fn poison(&mut self, pool: usize, page: u32) {
        self.tell(Errand::Poison(pool, page));
    }
}

impl Drop for OnThreads {
    fn drop(&mut self) {
        self.inlet = None;
        for thread in self.threads.drain(..) {
            // A panic there has become the error of its batch.
            let _ = thread.join();
        }
    }
}
