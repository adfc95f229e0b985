//! The scheduler's part in drafts: for whom how many, and what became of them.
//!
//! Rows and pages for drafts are what nobody else needs in this step: no session steps back for another's drafts, and
//! prompts keep a row.

use super::Scheduler;
use crate::agreement::Agreement;
use crate::appetite::{Appetite, Wish};
use crate::drafts::{Drafter, Drafts, Source};
use crate::metrics::MetricsSnapshot;
use crate::session::{Leaving, Session};
use motet_model::batch::{Batch, StateOp};
use motet_model::{Checkpoint, InFlight, PAGE, Slot};
use std::cmp::Reverse;
use std::collections::TryReserveError;
use std::time::Duration;

impl Scheduler {
    /// Gives drafts that are known at once to who wants them, and lays out who wants the head's and how many, the most
    /// first, as a batch for `Stage::draft`, with pages for all rows to come. It stays empty if nobody does.
    pub(crate) fn ask_for_drafts(&mut self, drafter: &dyn Drafter, batch: &mut Batch) {
        self.wishes.clear();
        self.known.clear();
        self.watched = if drafter.has_head() { Source::Head } else { Source::LookUp };
        let decoding = self.going.len();
        if !self.is_asked_for_drafts(decoding) {
            return (0..decoding).for_each(|at| self.session_mut(self.going[at]).asked = true);
        }
        let mut spare = self.most_rows.saturating_sub(decoding + self.all_behind() + 1);
        for at in 0..self.going.len() {
            let slot = self.going[at];
            let most = self.draftable(self.running(slot)).min(spare);
            self.session_mut(slot).asked = true;
            if most > 0 {
                let before = self.known.len();
                let session = self.running[slot.0 as usize].as_ref().expect("a running session");
                drafter.know(&session.tokens, most, &mut self.known);
                let known = self.known.len() - before;
                let of_head = if drafter.has_head() { most } else { 0 };
                self.wishes.push(Wish::new(slot, of_head, known, if drafter.looks_up() { most } else { 0 }));
                spare -= most;
            }
        }
        self.choose(decoding);
        self.take_pages();
        self.take_known();
        self.wishes.retain(|wish| wish.drafts > 0 && wish.source == Source::Head);
        self.wishes.sort_unstable_by_key(|wish| (Reverse(wish.drafts), wish.slot));
        for at in 0..self.wishes.len() {
            let Wish { slot, drafts, .. } = self.wishes[at];
            batch.drafts.push(drafts as u32);
            self.lay(batch, slot, 1);
            batch.segments[at].feed = self.lay_behind(batch, slot, self.running(slot).read);
        }
    }

    /// A batch made by [`Scheduler::ask_for_drafts`] is in flight: its sessions wait for it.
    pub(crate) fn drafting(&mut self, batch: &Batch) {
        for segment in &batch.segments {
            self.session_mut(segment.slot).in_flight += 1;
        }
    }

    /// It has come back, with drafts or, if that failed, without.
    pub(crate) fn drafted(&mut self, work: &InFlight, took: Option<Duration>) {
        for segment in &work.batch.segments {
            if self.landed(segment.slot) {
                self.session_mut(segment.slot).asked = true;
            }
        }
        if let Some(took) = took {
            self.take_drafts(work, took);
        }
    }

    /// From now on sessions get drafts in another way, at most `most` of them; then a step may make so many changes of
    /// state.
    ///
    /// # Errors
    /// There is no memory for so many; then nothing has changed.
    pub(crate) fn set_drafts(
        &mut self,
        drafts: Drafts,
        most: usize,
        changes: usize,
    ) -> Result<(), TryReserveError> {
        self.changes.try_reserve_exact(changes.saturating_sub(self.changes.len()))?;
        self.known.clear();
        self.known.try_reserve_exact(self.running.len() * most)?;
        let running = self.running.iter_mut().flatten();
        for session in running.chain(&mut self.line) {
            session.allow_drafts(most)?;
        }
        self.most_drafts = most;
        // What drafts from now on may agree more or less often.
        self.agreement = Agreement::default();
        self.appetite = (drafts == Drafts::Auto).then(|| Appetite::new(self.running.len(), most));
        Ok(())
    }

    /// Whether a step with so many rows may have drafts, which takes time to choose.
    fn is_asked_for_drafts(&mut self, decoding: usize) -> bool {
        let reads = self.reads_beside(decoding);
        self.appetite.as_mut().is_none_or(|appetite| reads || appetite.is_asked(decoding))
    }

    /// Whether prompts are read beside so many rows.
    fn reads_beside(&self, decoding: usize) -> bool {
        self.by_age.len() > decoding && self.prompt_rows > 0
    }

    /// Chooses the drafts that pay beside so many rows; all, if their number is given.
    fn choose(&mut self, decoding: usize) {
        let reads = self.reads_beside(decoding);
        let Some(appetite) = &mut self.appetite else {
            return self.wishes.iter_mut().for_each(|wish| wish.drafts = wish.most());
        };
        let (running, costs) = (&self.running, &self.costs);
        let chances = |slot: Slot| &running[slot.0 as usize].as_ref().expect("a running session").chances;
        let beside = decoding + self.prompt_rows;
        let price = |drafts: usize| costs.expected(beside + drafts).map_or(0.0, |time| time.as_secs_f64());
        let price: Option<&dyn Fn(usize) -> f64> = if reads { Some(&price) } else { None };
        appetite.choose(decoding, &mut self.wishes, chances, price);
    }

    /// Takes pages for the rows of drafts, the oldest session first; where there are none the drafts are fewer.
    fn take_pages(&mut self) {
        for wish in self.wishes.iter_mut().filter(|wish| wish.drafts > 0) {
            let session = self.running[wish.slot.0 as usize].as_mut().expect("a running session");
            let first = session.read + 1;
            let end = self.cache.reach(&session.table, first + wish.drafts).max(first);
            self.cache.grow(&mut session.table, end, &mut self.changes);
            wish.drafts = end - first;
        }
    }

    /// Hands their drafts to those who shall have what is known.
    fn take_known(&mut self) {
        let mut known = &self.known[..];
        for wish in &self.wishes {
            let of_session;
            (of_session, known) = known.split_at(wish.most[Source::LookUp as usize]);
            if wish.source == Source::LookUp && wish.drafts > 0 {
                let session = self.running[wish.slot.0 as usize].as_mut().expect("a running session");
                session.source = Source::LookUp;
                session.expect(&of_session[..wish.drafts]);
            }
        }
    }

    /// What a whole turn took, drafting apart: it counts for the choice if no prompt was read in it.
    pub(crate) fn turned(&mut self, rows: usize, took: Duration) {
        if let Some(appetite) = self.appetite.as_mut().filter(|_| self.prompt_rows == 0) {
            appetite.stepped(rows, took);
        }
    }

    /// How many drafts a session has use for, and could have pages for if it were alone.
    fn draftable(&self, session: &Session) -> usize {
        if !session.is_ready() || !session.drafting || session.asked {
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

    /// Hands the head's drafts of a batch made by [`Scheduler::ask_for_drafts`] to their sessions; they took so long.
    pub(crate) fn take_drafts(&mut self, work: &InFlight, took: Duration) {
        if let Some(appetite) = &mut self.appetite {
            let deepest = work.batch.drafts.iter().max().map_or(0, |&most| most as usize);
            appetite.drafted(work.batch.segments.len(), deepest, took);
        }
        let mut drafted = &work.drafted[..];
        for (segment, &count) in work.batch.segments.iter().zip(&work.batch.drafts) {
            let mine;
            (mine, drafted) = drafted.split_at(count as usize);
            // Whose reader left meanwhile is gone.
            let Some(session) = self.running[segment.slot.0 as usize].as_mut() else { continue };
            if segment.feed.is_some() {
                // With what it lacked, and in drafting with the row of its next token; but a new page is zeroed after that.
                session.fed = session.read + usize::from(!session.read.is_multiple_of(PAGE));
            }
            session.source = Source::Head;
            session.expect(mine);
        }
    }

    /// Of a session's drafts the first `accepted` were chosen, and the next was not, unless its answer has ended.
    pub(super) fn learn(
        &mut self,
        slot: Slot,
        drafts: usize,
        accepted: usize,
        ended: bool,
        metrics: &mut MetricsSnapshot,
    ) {
        let tried = if ended { accepted } else { drafts };
        let watched = self.watched;
        let session = self.session_mut(slot);
        session.drafted += drafts;
        session.accepted += accepted;
        let source = session.source;
        if source == watched {
            session.compared += usize::from(tried > 0);
            session.agreed += usize::from(accepted > 0);
        }
        session.chances[source as usize].learn(tried, accepted);
        metrics.drafted(drafts, accepted);
        if let Some(appetite) = &mut self.appetite {
            appetite.learn(source, tried, accepted);
        }
    }

    /// The commit of `kept` failed: the state of those sessions is lost, and so is what was `saved` of it. Their tokens
    /// are not.
    pub(crate) fn commit_failed(
        &mut self,
        kept: &[(Slot, usize)],
        saved: &[Checkpoint],
        metrics: &mut MetricsSnapshot,
    ) {
        metrics.failed_steps += 1;
        for &lost in saved {
            self.lose(lost);
            self.changes.retain(|change| !matches!(change, StateOp::Save { into, .. } if *into == lost));
        }
        for &(slot, _) in kept {
            if self.session(slot).is_some() {
                self.go_on_without_drafts(slot, metrics);
            }
        }
    }

    /// The session is read again and takes no more drafts.
    pub(super) fn go_on_without_drafts(&mut self, slot: Slot, metrics: &mut MetricsSnapshot) {
        self.session_mut(slot).drafting = false;
        self.leave(slot, Leaving::StepsBack);
        metrics.num_preemptions += 1;
    }
}
