//! The scheduler's part in feeding the network's draft head.
//!
//! Its keys and values serve nobody before somebody drafts, so a step does without them, and whoever drafts catches up
//! first. In a step the head is fed where that can't wait: with a prompt, at the end of a page, which others may take
//! over, and when as many positions are behind as are remembered. Then it is fed with the rows of all sessions, for
//! together that takes hardly longer.

use super::Scheduler;
use crate::session::Session;
use motet_model::batch::{Batch, RECENT, Segment};
use motet_model::{PAGE, Slot};
use std::ops::Range;

impl Scheduler {
    /// Positions of a session that the head was not fed with.
    pub(super) fn behind(&self, session: &Session) -> usize {
        if self.head { session.read.saturating_sub(session.fed) } else { 0 }
    }

    /// The same of all sessions that wait for their next token: rows that a step may have to feed the head with beside
    /// its own.
    pub(super) fn all_behind(&self) -> usize {
        let decoding = self.by_age.iter().map(|&slot| self.running(slot)).filter(|session| session.decodes);
        decoding.map(|session| self.behind(session)).sum()
    }

    /// Lays the tokens of those positions before `first` into a batch.
    pub(super) fn lay_behind(&self, batch: &mut Batch, slot: Slot, first: usize) -> Option<Range<u32>> {
        let session = self.running(slot);
        let from = batch.behind.len() as u32;
        if self.head {
            batch.behind.extend_from_slice(&session.tokens[session.fed.min(first)..first]);
        }
        self.head.then_some(from..batch.behind.len() as u32)
    }

    /// Has the head fed in the step of a batch that is complete otherwise, if it must be.
    pub(super) fn feed(&mut self, batch: &mut Batch) {
        if !self.head {
            return;
        }
        // Sessions may be so far behind that all can be fed at once, and a prompt's row with them.
        let most = (self.most_rows.saturating_sub(1) / self.running.len()).min(RECENT - 1);
        let must = |segment: &Segment| {
            let session = self.running(segment.slot);
            let end = segment.first_position as usize + segment.rows.len();
            !session.decodes || end.is_multiple_of(PAGE) || end - session.fed.min(end) >= most
        };
        if batch.segments.iter().any(must) {
            for at in 0..batch.segments.len() {
                let Segment { slot, first_position, ref rows, .. } = batch.segments[at];
                let (first, rows) = (first_position as usize, rows.len());
                batch.segments[at].feed = self.lay_behind(batch, slot, first);
                // What follows may be sent before this step has ended.
                self.session_mut(slot).fed = first + rows;
            }
        }
    }
}
