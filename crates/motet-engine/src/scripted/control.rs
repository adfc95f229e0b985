//! The troubles that a test orders, and what it may look at.

use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Troubles that a test orders. They come in the next steps, one a step, in that order.
#[derive(Default)]
pub struct Control {
    troubles: Mutex<VecDeque<Trouble>>,
    held: Mutex<bool>,
    let_go: Condvar,
    steps: Mutex<u64>,
    wrong_drafts: Mutex<u64>,
    feeds: Mutex<u64>,
    refuses: AtomicBool,
    stages_apart: Mutex<u64>,
    /// Troubles that came.
    come: Mutex<usize>,
}

pub(super) enum Trouble {
    Panic,
    Fault { segment: u32, row: u32 },
    Stall(Duration),
    Commit,
}

impl Control {
    /// The next step fails as if a compute thread had panicked, and leaves garbage behind.
    pub fn panic_next(&self) {
        self.troubles.lock().push_back(Trouble::Panic);
    }

    /// In the next step, the rows of the segment with this number (or the last) are not finite, from its row `row` (or
    /// the last) on.
    pub fn fault_next(&self, segment: u32, row: u32) {
        self.troubles.lock().push_back(Trouble::Fault { segment, row });
    }

    /// The next time that rows with drafts are kept, it fails and leaves garbage behind.
    pub fn fail_commit_next(&self) {
        self.troubles.lock().push_back(Trouble::Commit);
    }

    /// The next step takes that much longer.
    pub fn stall_next(&self, time: Duration) {
        self.troubles.lock().push_back(Trouble::Stall(time));
    }

    /// From now on there is no memory for more drafts, or there is again.
    pub fn refuse_growth(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::Relaxed);
    }

    pub(super) fn refuses_growth(&self) -> bool {
        self.refuses.load(Ordering::Relaxed)
    }

    /// Steps wait at their beginning until [`Control::resume`].
    pub fn hold(&self) {
        *self.held.lock() = true;
    }

    /// Held steps go on.
    pub fn resume(&self) {
        *self.held.lock() = false;
        self.let_go.notify_all();
    }

    /// Steps that were begun.
    pub fn steps(&self) -> u64 {
        *self.steps.lock()
    }

    /// Times that the draft head was asked and did not find what the sequential definition would have left there.
    pub fn wrong_drafts(&self) -> u64 {
        *self.wrong_drafts.lock()
    }

    /// Steps in which the draft head was fed.
    pub fn feeds(&self) -> u64 {
        *self.feeds.lock()
    }

    pub(super) fn count_feed(&self) {
        *self.feeds.lock() += 1;
    }

    pub(super) fn count_wrong_draft(&self) {
        *self.wrong_drafts.lock() += 1;
    }

    /// Times that a stage answered other than the one before it: its state has gone its own way.
    pub fn stages_apart(&self) -> u64 {
        *self.stages_apart.lock()
    }

    pub(super) fn count_stage_apart(&self) {
        *self.stages_apart.lock() += 1;
    }

    /// A step begins in one of the stages: the trouble that comes to it, to each stage in turn.
    pub(super) fn begin(&self, stage: usize, stages: usize) -> Option<Trouble> {
        if stage == 0 {
            *self.steps.lock() += 1;
            let mut held = self.held.lock();
            self.let_go.wait_while(&mut held, |held| *held);
        }
        let mut come = self.come.lock();
        if *come % stages != stage {
            return None;
        }
        let trouble = self.troubles.lock().pop_front()?;
        *come += 1;
        Some(trouble)
    }
}
