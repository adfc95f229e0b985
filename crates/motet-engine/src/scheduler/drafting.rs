//! The scheduler's part in drafts: for whom how many, and what became of them.
//!
//! Rows and pages for drafts are what nobody else needs in this step: no session steps back for another's drafts, and
//! prompts keep a row.

use super::Scheduler;
use crate::metrics::MetricsSnapshot;
use crate::session::Session;
use motet_model::batch::{Batch, StateOp};
use motet_model::{InFlight, PAGE, Slot};

impl Scheduler {
    /// Lays out who wants drafts and how many, the most first, as a batch for `Stage::draft`, with pages for all rows
    /// to come. It stays empty if nobody does.
    pub(crate) fn ask_for_drafts(&mut self, batch: &mut Batch) {
        self.wishes.clear();
        let decoding = self.by_age.iter().filter(|&&slot| self.running(slot).decodes).count();
        let mut spare = self.most_rows.saturating_sub(decoding + 1);
        for at in 0..self.by_age.len() {
            let slot = self.by_age[at];
            let drafts = self.draftable(self.running(slot)).min(spare);
            if drafts > 0 {
                let session = self.running[slot.0 as usize].as_mut().expect("a running session");
                self.cache.grow(&mut session.table, session.read + 1 + drafts, &mut self.changes);
                self.wishes.push((slot, drafts));
                spare -= drafts;
            }
        }
        self.wishes.sort_unstable_by_key(|&(slot, drafts)| (std::cmp::Reverse(drafts), slot));
        for at in 0..self.wishes.len() {
            let (slot, drafts) = self.wishes[at];
            batch.drafts.push(drafts as u32);
            self.lay(batch, slot, 1);
        }
    }

    /// How many drafts a session has use, and could have pages, for.
    fn draftable(&self, session: &Session) -> usize {
        if !session.decodes || !session.drafting {
            return 0;
        }
        let first = session.read + 1;
        let mut most = self.most_drafts.min(session.left() - 1);
        if self.recurrent {
            // State is saved where a page ends, so the rows of a step end there as well.
            most = most.min(first.next_multiple_of(PAGE) - first);
        }
        self.cache.reach(&session.table, first + most).saturating_sub(first)
    }

    /// Hands the drafts of a batch made by [`Scheduler::ask_for_drafts`] to their sessions.
    pub(crate) fn take_drafts(&mut self, work: &InFlight) {
        let mut drafted = &work.drafted[..];
        for (segment, &count) in work.batch.segments.iter().zip(&work.batch.drafts) {
            let mine;
            (mine, drafted) = drafted.split_at(count as usize);
            let session = self.running[segment.slot.0 as usize].as_mut().expect("a running session");
            session.drafts.extend_from_slice(mine);
        }
    }

    /// Of a session's drafts the first `accepted` were chosen.
    pub(super) fn learn(
        &mut self,
        slot: Slot,
        drafts: usize,
        accepted: usize,
        metrics: &mut MetricsSnapshot,
    ) {
        let session = self.session_mut(slot);
        session.drafted += drafts;
        session.accepted += accepted;
        metrics.drafted(drafts, accepted);
    }

    /// A session's tokens, that of its next row included.
    pub(crate) fn tokens(&self, slot: Slot) -> &[u32] {
        &self.running(slot).tokens
    }

    /// The rows that each session with drafts keeps of the last step: for `Stage::commit`.
    pub(crate) fn kept(&self) -> &[(Slot, usize)] {
        &self.kept
    }

    /// The commit failed: the state of those sessions is lost, and so is what was about to be saved of it. Their tokens
    /// are not.
    pub(crate) fn commit_failed(&mut self, metrics: &mut MetricsSnapshot) {
        metrics.failed_steps += 1;
        while let Some((slot, _)) = self.kept.pop() {
            let cache = &mut self.cache;
            self.changes.retain(|change| match *change {
                StateOp::Save { slot: of, into } if of == slot => {
                    cache.drop_checkpoint(into);
                    false
                }
                _ => true,
            });
            if self.session(slot).is_some() {
                self.go_on_without_drafts(slot, metrics);
            }
        }
    }

    /// The session is read again and takes no more drafts.
    pub(super) fn go_on_without_drafts(&mut self, slot: Slot, metrics: &mut MetricsSnapshot) {
        self.session_mut(slot).drafting = false;
        self.step_back(slot);
        metrics.num_preemptions += 1;
    }
}
