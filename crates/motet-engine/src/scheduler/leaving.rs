//! How sessions leave: with an answer, with an error, without a reader, or back into the line to be read again.
//!
//! Place and pages of a session return when the last batch that may touch them has landed, never before.

use super::Scheduler;
use crate::metrics::MetricsSnapshot;
use crate::queue::Queue;
use crate::session::{Leaving, Session};
use crate::stream::{FinishReason, StreamError};
use motet_model::batch::StateOp;
use motet_model::{InFlight, Slot};
use std::time::Duration;

impl Scheduler {
    /// Nothing is computed for readers that have left.
    pub(super) fn bury_the_dead(&mut self, queue: &Queue, metrics: &mut MetricsSnapshot) {
        metrics.finished_abort += queue.take_abandoned();
        self.line.retain(|session| {
            let abandoned = session.sender.abandoned();
            metrics.finished_abort += if abandoned { 1 + session.forks.len() as u64 } else { 0 };
            !abandoned
        });
        for slot in (0..self.running.len() as u32).map(Slot) {
            let dead = |s: &Session| s.sender.abandoned() && s.leaving != Some(Leaving::Gone);
            if self.session(slot).is_some_and(dead) {
                let forks = std::mem::take(&mut self.session_mut(slot).forks);
                metrics.finished_abort += 1 + forks.len() as u64;
                self.leave(slot, Leaving::Gone);
            }
        }
    }

    /// The answer is complete. Its pages stay known for the next turn.
    pub(super) fn finish(
        &mut self,
        slot: Slot,
        reason: FinishReason,
        now: Duration,
        metrics: &mut MetricsSnapshot,
    ) {
        let session = self.remove(slot);
        metrics.finished(&session, reason, now);
        if let Some(fallen_out) = self.agreement.ended(session.compared, session.agreed) {
            metrics.drafts_fallen_out += 1;
            self.fallen_out = Some(fallen_out);
        }
        let usage = session.usage();
        session.sender.finish(reason, usage);
    }

    pub(super) fn fail(&mut self, slot: Slot, error: StreamError, metrics: &mut MetricsSnapshot) {
        metrics.finished_error += 1;
        self.session_mut(slot).sender.fail(error);
        self.leave(slot, Leaving::Gone);
    }

    /// Ends the answer if it can't keep to its form any longer.
    pub(super) fn fail_if_broken(&mut self, slot: Slot, metrics: &mut MetricsSnapshot) -> bool {
        let broken = self.session_mut(slot).broken.take();
        let fails = broken.is_some();
        if let Some(broken) = broken {
            self.fail(slot, StreamError::Form(broken.what), metrics);
        }
        fails
    }

    /// The step failed. The state of its sessions is undefined, so they end with the error; what the batch saved is
    /// lost; a session that was to begin in it without a row steps back and begins again.
    pub(crate) fn step_failed(&mut self, work: &InFlight, error: &str, metrics: &mut MetricsSnapshot) {
        metrics.failed_steps += 1;
        for segment in &work.batch.segments {
            if self.landed(segment.slot) {
                self.fail(segment.slot, StreamError::DeviceFailed(error.to_owned()), metrics);
            }
        }
        for change in &work.batch.before {
            match *change {
                StateOp::Save { into, .. } => self.lose(into),
                StateOp::Clear { slot } | StateOp::Restore { slot, .. } if self.session(slot).is_some() => {
                    self.leave(slot, Leaving::StepsBack);
                }
                _ => {}
            }
        }
    }

    /// Ends everything that runs or waits in line.
    pub(crate) fn fail_all(&mut self, error: &StreamError, metrics: &mut MetricsSnapshot) {
        for mut session in self.line.drain(..) {
            session.sender.fail(error.clone());
            metrics.finished_error += 1;
        }
        while let Some(&slot) = self.by_age.last() {
            let mut session = self.remove(slot);
            if session.leaving != Some(Leaving::Gone) {
                session.sender.fail(error.clone());
                metrics.finished_error += 1;
            }
        }
    }

    /// The session gives up its place and pages: at once, or when the last batch that may touch them has landed. Who
    /// steps back keeps its tokens; who is gone does not step back.
    pub(super) fn leave(&mut self, slot: Slot, how: Leaving) {
        let session = self.session_mut(slot);
        let how = if session.leaving == Some(Leaving::Gone) { Leaving::Gone } else { how };
        session.leaving = Some(how);
        if session.in_flight > 0 {
            return;
        }
        let mut session = self.remove(slot);
        if how == Leaving::StepsBack {
            session.leaving = None;
            session.read = 0;
            session.sent = 0;
            session.rolling = None;
            session.preemptions += 1;
            self.line_up(session);
        }
    }

    /// Puts a session into the line, by age.
    pub(super) fn line_up(&mut self, session: Box<Session>) {
        let at = self.line.partition_point(|s| s.age < session.age);
        self.line.insert(at, session);
    }

    /// Takes a session out of its place; its pages are released.
    fn remove(&mut self, slot: Slot) -> Box<Session> {
        let mut session = self.running[slot.0 as usize].take().expect("a running session");
        self.by_age.retain(|&s| s != slot);
        self.free_slots.push(slot);
        self.give_up_places(&mut session);
        self.cache.release(&mut session.table);
        session
    }
}
