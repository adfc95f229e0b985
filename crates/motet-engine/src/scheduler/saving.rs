//! The scheduler's part in saving recurrent state: where it goes, and which page border it belongs to.
//!
//! State is saved at borders, in front of the rows that follow. Once the rows before have landed, the border's block is
//! there and gets the checkpoint. A prompt's next part does not wait for that: it is laid while the part before is in
//! flight, and the state goes into a place that belongs to no block until that part has landed. Each stage makes all
//! changes in the order sent, so a place may be given to others while it is still to be written: they write it later.
//! Nothing here may ever hold rows up; where no place is left, a border goes without.

use super::Scheduler;
use crate::session::{Border, Leaving, Session};
use motet_model::batch::StateOp;
use motet_model::{Checkpoint, Slot};

impl Scheduler {
    /// The session's rows behind `sent` are about to be laid: if those before are in flight, each stage saves the state
    /// between them.
    pub(super) fn save_ahead(&mut self, slot: Slot) {
        let session = self.running[slot.0 as usize].as_mut().expect("a running session");
        if !self.recurrent || session.in_flight == 0 || !session.saves_at(session.sent) {
            return;
        }
        // Where all places are on their way, the state of the deeper border is worth more.
        let earlier = &mut session.saving;
        let place = self.cache.reserve_checkpoint().or_else(|| Some(earlier.pop_front()?.1));
        if let Some(into) = place {
            earlier.push_back((session.sent, into));
            self.changes.push(StateOp::Save { slot, into });
        }
    }

    /// The session's rows before `read` have been run: if that is a border whose state is of use to a later turn, its
    /// block gets the checkpoint.
    pub(super) fn save(&mut self, slot: Slot) {
        let session = self.running[slot.0 as usize].as_mut().expect("a running session");
        if !self.recurrent || !session.saves_at(session.read) {
            return;
        }
        let ahead = session.saving.pop_front_if(|&mut (border, _)| border == session.read);
        if ahead.is_none() && session.in_flight > 0 {
            return; // there was no place, and the state has gone on
        }
        if let Some((block, checkpoint)) = session.rolling.take()
            && self.cache.checkpoints().block_of(checkpoint) == Some(block)
        {
            self.cache.drop_checkpoint(checkpoint);
        }
        let ahead = ahead.map(|(_, place)| place);
        let Some(place) = self.cache.checkpoint(&session.table, ahead) else { return };
        if ahead.is_none() {
            self.changes.push(StateOp::Save { slot, into: place });
        }
        if session.border_at(session.read) == Border::Rolling {
            session.rolling = self.cache.checkpoints().block_of(place).map(|block| (block, place));
        }
    }

    /// The session leaves: what it has saved ahead will belong to no block.
    pub(super) fn give_up_places(&mut self, session: &mut Session) {
        session.saving.drain(..).for_each(|(_, place)| self.cache.free_checkpoint(place));
    }

    /// What was to be saved there is lost, and with it the state of those that began with it in batches still in flight.
    pub(super) fn lose(&mut self, checkpoint: Checkpoint) {
        self.cache.drop_checkpoint(checkpoint);
        for slot in (0..self.running.len() as u32).map(Slot) {
            if self.session(slot).is_some_and(|session| session.begun_with == Some(checkpoint)) {
                self.leave(slot, Leaving::StepsBack);
            }
        }
    }
}
