//! A stage that hands everything on and counts what it was made to do: what a run claims must have been seen here. By
//! the engine's clock each of its steps takes as long.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use motet_engine::clock::SimClock;
use motet_model::batch::{Commit, Segment, StateOp};
use motet_model::device::Observer;
use motet_model::{DeviceError, InFlight, Slot, Stage};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What a step takes, whatever it does: where drafts are made if they pay, they often do, and with the slowest
/// instructions as often as with the fastest.
const STEP: Duration = Duration::from_millis(1);

/// What a stage was made to do.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Work {
    /// Most conversations in one step; in all that may be in flight at once, where there are several stages.
    pub(super) together: usize,
    /// Most rows of one conversation in one step, drafts apart.
    pub(super) chunk: usize,
    /// Pages filled with NaN before their first use.
    pub(super) fresh_pages: usize,
    /// Pages filled with NaN that conversations had given back.
    pub(super) returned_pages: usize,
}

/// Where the counts can be read.
#[derive(Debug, Default, Clone)]
pub(super) struct Seen(Arc<Mutex<Work>>);

impl Seen {
    /// The counts so far.
    pub(super) fn work(&self) -> Work {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sizes are counted afresh: what comes now is what matters.
    pub(super) fn forget_sizes(&self) {
        self.change(|work| (work.together, work.chunk) = (0, 0));
    }

    fn change(&self, change: impl FnOnce(&mut Work)) {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// A stage under observation: the first, through which everything goes.
pub(super) struct Witness {
    stage: Box<dyn Stage>,
    seen: Seen,
    clock: Arc<SimClock>,
    /// Pages, with their pools, that had an owner.
    used: HashSet<(usize, u32)>,
    /// The conversations of the last steps, as many as may be in flight.
    recent: VecDeque<Vec<Slot>>,
}

impl Witness {
    /// Puts the first of some stages under observation, and lets time pass with its steps.
    pub(super) fn of(mut stages: Vec<Box<dyn Stage>>, clock: &Arc<SimClock>) -> (Vec<Box<dyn Stage>>, Seen) {
        let seen = Seen::default();
        let in_flight = if stages.len() > 1 { stages.len() + 1 } else { 1 };
        let recent = vec![Vec::new(); in_flight].into();
        let stage = stages.remove(0);
        let (seen_here, clock) = (seen.clone(), Arc::clone(clock));
        stages.insert(0, Box::new(Self { stage, seen: seen_here, clock, used: HashSet::new(), recent }));
        (stages, seen)
    }
}

impl Stage for Witness {
    fn enter(&mut self) {
        self.stage.enter();
    }

    fn reserve(&mut self, rows: usize) -> Result<(), DeviceError> {
        self.stage.reserve(rows)
    }

    fn step(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        let segments = &work.batch.segments;
        let certain = |s: &&Segment| s.commit == Commit::All;
        let chunk = segments.iter().filter(certain).map(|s| s.rows.len()).max().unwrap_or(0);
        self.recent.rotate_left(1);
        if let Some(newest) = self.recent.back_mut() {
            *newest = segments.iter().map(|s| s.slot).collect();
        }
        let together = self.recent.iter().flatten().collect::<HashSet<_>>().len();
        self.seen.change(|w| {
            (w.together, w.chunk) = (w.together.max(together), w.chunk.max(chunk));
        });
        self.used.extend(work.batch.before.iter().filter_map(|op| match *op {
            StateOp::ZeroPage { pool, page } => Some((pool as usize, page)),
            _ => None,
        }));
        self.clock.advance(STEP);
        self.stage.step(work)
    }

    fn change(&mut self, changes: &[StateOp]) {
        self.stage.change(changes);
    }

    fn commit(&mut self, kept: &[(Slot, usize)]) -> Result<(), DeviceError> {
        self.stage.commit(kept)
    }

    fn draft(&mut self, work: &mut InFlight) -> Result<(), DeviceError> {
        self.stage.draft(work)
    }

    fn poison(&mut self, pool: usize, page: u32) {
        let returned = self.used.contains(&(pool, page));
        self.seen.change(|w| match returned {
            true => w.returned_pages += 1,
            false => w.fresh_pages += 1,
        });
        self.stage.poison(pool, page);
    }

    fn observe(&mut self, observer: Option<Box<dyn Observer>>) {
        self.stage.observe(observer);
    }
}
