//! The fork-join pool: one caller and its workers share the tasks of one parallel region after another.
//!
//! A forward pass is some hundreds of regions of a few microseconds to a few milliseconds each, so a region must
//! cost about a microsecond, allocate nothing, and never wait for a thread that has nothing to contribute.
//!
//! How a region runs:
//! 1. The caller writes down the job and then publishes the number of `unclaimed` tasks.
//! 2. Whoever sees `unclaimed > 0` claims one task by decrementing it, and *only then* reads the job. A claim
//!    keeps the region open, so the job it reads is the claimed task's job, however long the thread slept
//!    between two instructions. That is why one region's tasks cannot leak into the next, without any epoch.
//! 3. Each thread subtracts what it has finished from `unfinished`; at zero the caller returns. A worker that
//!    comes too late finds nothing to claim and was never waited for.
//!
//! Threads with nothing to do spin for a bounded time and then sleep. What wakes them is model-checked with loom
//! (`tests/pool_loom.rs`).
//!
//! Which worker runs which task is a matter of chance: a task must compute the same bits on any of them.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use crate::isa::assert_float_environment;

use self::sync::{Arc, AtomicBool, AtomicUsize, JobCell, JoinHandle, Mutex, Ordering, Thread, fence, thread};

/// How a [`Pool`] is set up.
#[derive(Debug, Clone)]
pub struct PoolOptions {
    /// Threads that compute, the caller included; at least 1. Default: [`default_threads`].
    pub threads: usize,
    /// How long a thread without work spins before it sleeps. Longer than the serial pieces between two regions;
    /// waking a sleeping thread costs some 5–50 µs. Default: 250 µs: sampling from a large vocabulary takes
    /// tens of microseconds on one thread.
    pub spin: Duration,
    /// The processors to pin the threads to: worker `i` to `cores[i % len]`. `None` leaves it to the system.
    /// The caller is worker 0 and is never moved by the pool: see [`pin_current_thread`].
    pub cores: Option<Vec<usize>>,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { threads: default_threads(), spin: Duration::from_micros(250), cores: None }
    }
}

/// Why a [`Pool`] could not be started.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A pool needs at least the caller.
    #[error("a pool of 0 threads was asked for; it needs at least 1, the caller")]
    NoThreads,
    /// The list of processors to pin to was empty.
    #[error("the list of processors to pin to is empty; name at least one, or leave it out")]
    NoCores,
    /// The system refused a thread.
    #[error("worker {worker} of {threads} threads could not be started; ask for fewer threads")]
    Spawn {
        /// The worker that failed to start.
        worker: usize,
        /// How many threads were asked for.
        threads: usize,
        /// What the system said.
        source: std::io::Error,
    },
}

/// A task panicked. The region's other claimed tasks have ended, unclaimed ones were not started, and the pool is
/// ready for the next region; what the region was writing is in an unknown state.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("task {task} panicked on worker {worker}: {message}")]
pub struct WorkerPanic {
    /// The task that panicked (the first to be noticed, if several did).
    pub task: usize,
    /// The worker that ran it; 0 is the caller.
    pub worker: usize,
    /// The panic's message.
    pub message: String,
}

/// Some threads that run parallel regions for one caller at a time.
///
/// [`Pool::run`] takes `&mut self`: two regions at once, or one inside another, do not compile.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `options.threads - 1` workers and returns when they are there: what the system and the allocator set
    /// up for a new thread is not added later, to somebody's measure of a region.
    pub fn new(options: PoolOptions) -> Result<Self, PoolError> {
        let threads = options.threads;
        if threads == 0 {
            return Err(PoolError::NoThreads);
        }
        if options.cores.as_ref().is_some_and(Vec::is_empty) {
            return Err(PoolError::NoCores);
        }
        let shared = Arc::new(Shared {
            unclaimed: OwnLine(AtomicUsize::new(0)),
            unfinished: OwnLine(AtomicUsize::new(threads - 1)),
            job: JobCell::new(Job { data: std::ptr::null(), call: run_nothing, tasks: 0 }),
            closing: AtomicBool::new(false),
            beds: (0..threads).map(|_| OwnLine(Bed::new())).collect(),
            panic: Mutex::new(None),
            spin: options.spin,
        });
        // From here on dropping `pool` ends the workers that did start.
        let mut pool = Self { shared, workers: Vec::with_capacity(threads - 1) };
        for worker in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let core = options.cores.as_ref().map(|cores| cores[worker % cores.len()]);
            let handle = sync::spawn(format!("motet-worker-{worker}"), move || {
                if let Some(core) = core {
                    pin_current_thread(core);
                }
                shared.serve(worker);
            });
            pool.workers.push(handle.map_err(|source| PoolError::Spawn { worker, threads, source })?);
        }
        pool.shared.wait_until_finished();
        Ok(pool)
    }

    /// Threads that compute, the caller included.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work(task, worker)` once for every task in `0..tasks` and returns when all are done.
    ///
    /// Tasks are handed out one by one in ascending order to whoever is free; the caller takes part as worker 0.
    /// `worker < self.threads()`, and no two tasks run at the same time with the same `worker`, so it may index
    /// scratch memory. Cut the work into several tasks per thread: a thread that loses its core delays the region
    /// by the task it has claimed and no more.
    ///
    /// # Errors
    /// [`WorkerPanic`] if a task panicked, or if a thread's float environment is not the default one.
    pub fn run<F>(&mut self, tasks: usize, work: F) -> Result<(), WorkerPanic>
    where
        F: Fn(usize, usize) + Sync,
    {
        if tasks == 0 {
            return Ok(());
        }
        let job = Job { data: (&raw const work).cast(), call: run_task::<F>, tasks };
        let shared = &*self.shared;
        // The previous region is finished and `&mut self` excludes another one; nothing between here and `join`
        // unwinds, so `work` outlives the region.
        let first = shared.publish(job);
        shared.work(0, Some(first));
        shared.join()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        for bed in &self.shared.beds {
            bed.0.wake();
        }
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a task; there is no result to lose.
            let _ = worker.join();
        }
    }
}

/// What a region runs: `call(data, task, worker)` for each task in `0..tasks`.
#[derive(Debug, Clone, Copy)]
struct Job {
    data: *const (),
    call: unsafe fn(*const (), usize, usize),
    tasks: usize,
}

/// One thread's right and duty to run one task of the open region.
#[derive(Debug)]
struct Claim {
    /// Tasks that were left when it was made, this one included: tasks go out in ascending order.
    left: usize,
}

/// # Safety
/// `data` points to an `F` that outlives the call.
unsafe fn run_task<F: Fn(usize, usize) + Sync>(data: *const (), task: usize, worker: usize) {
    // SAFETY: the caller's contract.
    let work = unsafe { &*data.cast::<F>() };
    work(task, worker);
}

/// The job before the first region; never called, since nothing can be claimed.
unsafe fn run_nothing(_: *const (), _: usize, _: usize) {}

/// Keeps a hot word on cache lines of its own (128 bytes: lines are fetched in pairs).
#[derive(Debug)]
#[repr(align(128))]
struct OwnLine<T>(T);

/// What the threads of a pool share.
#[derive(Debug)]
struct Shared {
    /// Tasks of the open region that nobody has claimed. Zero between regions.
    unclaimed: OwnLine<AtomicUsize>,
    /// Tasks of the open region that are not known to be finished; before the first region, workers that have not
    /// begun.
    unfinished: OwnLine<AtomicUsize>,
    /// The open region's job. Written by `publish` only, read only by holders of an unfinished claim.
    job: JobCell,
    /// The pool is being dropped.
    closing: AtomicBool,
    /// Where each thread sleeps; index 0 is the caller, waiting for the end of a region.
    beds: Vec<OwnLine<Bed>>,
    /// The open region's first panic.
    panic: Mutex<Option<WorkerPanic>>,
    spin: Duration,
}

// SAFETY: the one field that is not Sync by itself is `job`. `publish` writes it while no claim is open (the last
// region is finished, `&mut Pool` excludes another publisher), and it is read only between a claim, which
// synchronises with `publish` through `unclaimed`, and the subtraction from `unfinished` that `publish` has waited
// for. What it points to is an `F: Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for Shared {}

impl Shared {
    /// Opens a region, wakes as many sleepers as it has tasks for, and returns a claim on its first task: a
    /// region of one task is nobody else's business.
    fn publish(&self, job: Job) -> Claim {
        // SAFETY: no region is open, so no thread holds a claim and none reads the job.
        unsafe { self.job.write(job) };
        self.unfinished.0.store(job.tasks, Ordering::Relaxed);
        let mut wanted = job.tasks - 1;
        self.unclaimed.0.store(wanted, Ordering::Release);
        // With the fence in `Bed::sleep_unless`: either we see the sleeper, or it sees the tasks.
        fence(Ordering::SeqCst);
        for bed in &self.beds[1..] {
            if wanted == 0 {
                break;
            }
            wanted -= usize::from(bed.0.wake());
        }
        Claim { left: job.tasks }
    }

    /// Takes one task of the open region, if there is one.
    fn claim(&self) -> Option<Claim> {
        let mut unclaimed = self.unclaimed.0.load(Ordering::Relaxed);
        while unclaimed != 0 {
            let taken = self.unclaimed.0.compare_exchange_weak(
                unclaimed,
                unclaimed - 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match taken {
                Ok(left) => return Some(Claim { left }),
                Err(now) => unclaimed = now,
            }
        }
        None
    }

    /// Runs the task of `first` and then others until none is left to claim.
    fn work(&self, worker: usize, first: Option<Claim>) {
        let mut finished = 0;
        let mut next = first;
        while let Some(claim) = next.take().or_else(|| self.claim()) {
            // SAFETY: we hold an unfinished claim, so the region is open and nobody writes the job.
            let job = unsafe { self.job.read() };
            let task = job.tasks - claim.left;
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                if finished == 0 {
                    assert_float_environment();
                }
                // SAFETY: the region is open, so the caller is still inside `run`, which keeps the closure alive.
                unsafe { (job.call)(job.data, task, worker) };
            }));
            finished += 1;
            if let Err(payload) = outcome {
                self.note_panic(WorkerPanic { task, worker, message: panic_message(payload) });
                // What nobody has started is not started any more.
                finished += self.unclaimed.0.swap(0, Ordering::Relaxed);
            }
        }
        if finished > 0 {
            self.finish(finished);
        }
    }

    /// Notes the end of so many tasks, and wakes the caller after the last.
    fn finish(&self, tasks: usize) {
        if self.unfinished.0.fetch_sub(tasks, Ordering::AcqRel) == tasks {
            // With the fence in `Bed::sleep_unless`: either we see the caller asleep, or it sees the end.
            fence(Ordering::SeqCst);
            self.beds[0].0.wake();
        }
    }

    /// The caller's wait.
    fn wait_until_finished(&self) {
        let is_finished = || self.unfinished.0.load(Ordering::Acquire) == 0;
        // A loop, because the last finisher of an earlier region may wake us late.
        while !spin_until(self.spin, is_finished) {
            self.beds[0].0.sleep_unless(is_finished);
        }
    }

    /// Waits until every claimed task is finished, and takes the region's result.
    fn join(&self) -> Result<(), WorkerPanic> {
        self.wait_until_finished();
        match lock(&self.panic).take() {
            None => Ok(()),
            Some(panic) => Err(panic),
        }
    }

    /// A worker's life.
    fn serve(&self, worker: usize) {
        self.finish(1);
        let is_closing = || self.closing.load(Ordering::Acquire);
        let has_news = || self.unclaimed.0.load(Ordering::Relaxed) != 0 || is_closing();
        while !is_closing() {
            if !spin_until(self.spin, has_news) {
                self.beds[worker].0.sleep_unless(has_news);
            }
            self.work(worker, None);
        }
    }

    fn note_panic(&self, panic: WorkerPanic) {
        lock(&self.panic).get_or_insert(panic);
    }
}

/// Where one thread sleeps until another wakes it.
#[derive(Debug)]
struct Bed {
    asleep: AtomicBool,
    sleeper: Mutex<Option<Thread>>,
}

impl Bed {
    fn new() -> Self {
        Self { asleep: AtomicBool::new(false), sleeper: Mutex::new(None) }
    }

    /// Sleeps until [`Bed::wake`], or not at all if `is_ready`. Who makes it ready must do so, then fence
    /// (sequentially consistent), then call `wake`. May return early: the caller checks again.
    fn sleep_unless(&self, is_ready: impl Fn() -> bool) {
        *lock(&self.sleeper) = Some(thread::current());
        // Every change of the flag is a read-modify-write, so that its history is one chain. Release: who sees
        // the flag also sees the handle.
        self.asleep.swap(true, Ordering::AcqRel);
        fence(Ordering::SeqCst);
        if is_ready() {
            self.asleep.swap(false, Ordering::AcqRel);
            return;
        }
        while self.asleep.load(Ordering::Acquire) {
            thread::park();
        }
    }

    /// Wakes the sleeper; false if nobody sleeps here.
    fn wake(&self) -> bool {
        // The plain load keeps the usual case, an awake thread, free of writes to a shared line.
        if !self.asleep.load(Ordering::Relaxed) || !self.asleep.swap(false, Ordering::AcqRel) {
            return false;
        }
        if let Some(sleeper) = &*lock(&self.sleeper) {
            sleeper.unpark();
        }
        true
    }
}

/// Spins until `is_ready`, at most for `limit`; false if it was in vain.
#[cfg(not(loom))]
fn spin_until(limit: Duration, is_ready: impl Fn() -> bool) -> bool {
    // Reading the clock costs about as much as a pause, so look at it now and then.
    const LOOKS_PER_CLOCK: u32 = 32;
    let mut start = None;
    loop {
        for _ in 0..LOOKS_PER_CLOCK {
            if is_ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.get_or_insert_with(std::time::Instant::now).elapsed() >= limit {
            return false;
        }
    }
}

/// In the model one look is as good as many.
#[cfg(loom)]
fn spin_until(_: Duration, is_ready: impl Fn() -> bool) -> bool {
    is_ready()
}

/// A lock whose holder may have panicked: the data here is valid at every moment.
fn lock<T>(mutex: &Mutex<T>) -> sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn panic_message(payload: Box<dyn Any + Send>) -> String {
    if let Some(message) = payload.downcast_ref::<&str>() {
        return (*message).to_owned();
    }
    match payload.downcast::<String>() {
        Ok(message) => *message,
        Err(payload) => {
            // Dropping a foreign payload may panic again, here where nobody could catch it.
            std::mem::forget(payload);
            "a panic without a message".to_owned()
        }
    }
}

/// Pins the calling thread to a processor; false if the system refused.
pub fn pin_current_thread(core: usize) -> bool {
    core_affinity::set_for_current(core_affinity::CoreId { id: core })
}

/// One processor of each physical core that this process may use, ascending.
#[must_use]
pub fn physical_cores() -> Vec<usize> {
    let mut allowed: Vec<usize> =
        core_affinity::get_core_ids().unwrap_or_default().into_iter().map(|core| core.id).collect();
    allowed.sort_unstable();
    let siblings_of = |cpu: usize| {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        std::fs::read_to_string(file).ok()
    };
    one_per_core(&allowed, siblings_of)
}

/// The first of `allowed` in each group of hardware threads; `siblings_of` names a processor's group. Without
/// that knowledge each processor counts as a core.
fn one_per_core(allowed: &[usize], siblings_of: impl Fn(usize) -> Option<String>) -> Vec<usize> {
    let mut seen = std::collections::HashSet::new();
    allowed.iter().copied().filter(|&cpu| siblings_of(cpu).is_none_or(|group| seen.insert(group))).collect()
}

/// The physical cores that this process may use (affinity mask), but no more than its processor quota (cgroup).
#[must_use]
pub fn default_threads() -> usize {
    let quota = std::thread::available_parallelism().map_or(1, usize::from);
    match physical_cores().len() {
        0 => quota,
        cores => cores.min(quota),
    }
}

/// The primitives of std, or of loom when it explores every order of events.
mod sync {
    use super::Job;

    #[cfg(not(loom))]
    pub(super) use std::{
        sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
        sync::{Arc, Mutex, MutexGuard},
        thread::{self, JoinHandle, Thread},
    };

    #[cfg(loom)]
    pub(super) use loom::{
        sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
        sync::{Arc, Mutex, MutexGuard},
        thread::{self, JoinHandle, Thread},
    };

    pub(super) fn spawn(
        name: String,
        body: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        thread::Builder::new().name(name).spawn(body)
    }

    /// The place of the job.
    #[cfg(not(loom))]
    #[derive(Debug)]
    pub(super) struct JobCell(std::cell::UnsafeCell<Job>);

    #[cfg(not(loom))]
    impl JobCell {
        pub(super) fn new(job: Job) -> Self {
            Self(std::cell::UnsafeCell::new(job))
        }

        /// # Safety
        /// Nobody writes at the same time.
        pub(super) unsafe fn read(&self) -> Job {
            // SAFETY: the caller's contract.
            unsafe { *self.0.get() }
        }

        /// # Safety
        /// Nobody reads or writes at the same time.
        pub(super) unsafe fn write(&self, job: Job) {
            // SAFETY: the caller's contract.
            unsafe { *self.0.get() = job };
        }
    }

    /// The place of the job; loom reports concurrent access.
    #[cfg(loom)]
    #[derive(Debug)]
    pub(super) struct JobCell(loom::cell::UnsafeCell<Job>);

    #[cfg(loom)]
    impl JobCell {
        pub(super) fn new(job: Job) -> Self {
            Self(loom::cell::UnsafeCell::new(job))
        }

        pub(super) unsafe fn read(&self) -> Job {
            // SAFETY: the caller's contract, which loom checks.
            self.0.with(|job| unsafe { *job })
        }

        pub(super) unsafe fn write(&self, job: Job) {
            // SAFETY: the caller's contract, which loom checks.
            self.0.with_mut(|place| unsafe { *place = job });
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::one_per_core;

    #[test]
    fn hardware_threads_of_one_core_count_once() {
        // Two cores with two hardware threads each, numbered as Linux usually does: 0, 2 and 1, 3.
        let siblings = |cpu: usize| Some(["0,2\n", "1,3\n", "0,2\n", "1,3\n"][cpu].to_owned());
        assert_eq!(one_per_core(&[0, 1, 2, 3], siblings), [0, 1]);
        // The mask may leave only the second thread of a core.
        assert_eq!(one_per_core(&[1, 2, 3], siblings), [1, 2]);
        assert_eq!(one_per_core(&[0, 1, 2, 3], |_| None), [0, 1, 2, 3]);
    }
}
