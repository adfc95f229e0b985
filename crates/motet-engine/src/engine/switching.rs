//! Drafts switched on, off or to another number while sessions run.
//!
//! It happens between two steps: room for more drafts is made first, and where there is none everything runs on as
//! before. Tokens never depend on drafts, so no session notices but by the clock. What a head needs of a session is
//! there whenever the head is loaded; one that was not loaded cannot come later.

use super::{Driver, Engine};
use crate::drafts::{Drafter, Drafts, DraftsError, Head, LookUp, MAX_DRAFTS};
use motet_model::{DeviceError, InFlight};
use std::collections::TryReserveError;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// The longest time between two looks whether the engine is still there.
const PAUSE: Duration = Duration::from_millis(250);

/// Drafts as they shall be from now on, and where to say whether they are.
pub(super) struct Order {
    drafts: Drafts,
    look_up: bool,
    done: Sender<Result<(), DraftsError>>,
}

/// What proposes, if drafts are wanted at all and the network's head may be used, or not.
pub(super) fn drafter(drafts: Drafts, head: bool) -> Option<Box<dyn Drafter>> {
    match drafts {
        Drafts::Off => None,
        Drafts::Exactly(_) if head => Some(Box::new(Head)),
        Drafts::Auto | Drafts::Exactly(_) => Some(Box::new(LookUp { or_head: head })),
    }
}

impl Engine {
    /// Has sessions drafted for in another way from the next step on, those that run and those to come: as
    /// [`Options::drafts`](crate::Options::drafts) and [`Options::look_up`](crate::Options::look_up) say it for the start.
    /// Returns once it is so. (Of an engine [by hand](Engine::by_hand) somebody else must turn the wheel meanwhile, or
    /// see [`Driver::set_drafts`].)
    ///
    /// # Errors
    /// Any [`DraftsError`]: nothing has changed then.
    pub fn set_drafts(&self, drafts: Drafts, look_up: bool) -> Result<(), DraftsError> {
        let (done, is_done) = channel();
        self.shared.orders.send(Order { drafts, look_up, done }).map_err(|_| DraftsError::Closed)?;
        self.shared.queue.call();
        loop {
            match is_done.recv_timeout(PAUSE) {
                Ok(done) => return done,
                // A thread that hangs in a step never says anything.
                Err(RecvTimeoutError::Timeout) if !self.shared.queue.is_closed() => {}
                Err(_) => return Err(DraftsError::Closed),
            }
        }
    }
}

impl Driver {
    pub(super) fn take_orders(&mut self) {
        while let Ok(order) = self.orders.try_recv() {
            let done = self.set_drafts(order.drafts, order.look_up);
            // Whoever asked may have gone.
            let _ = order.done.send(done);
        }
    }

    /// As [`Engine::set_drafts`], at once.
    ///
    /// # Errors
    /// Any [`DraftsError`] but `Closed`.
    pub fn set_drafts(&mut self, drafts: Drafts, look_up: bool) -> Result<(), DraftsError> {
        self.await_all();
        let plan = &self.shared.plan;
        if drafts != Drafts::Off && plan.head_left_out && !look_up {
            return Err(DraftsError::HeadNotLoaded);
        }
        let head = plan.limits.draft_head && !look_up;
        let most = drafts.most(head);
        if most > MAX_DRAFTS {
            return Err(DraftsError::TooMany(most));
        }
        self.make_room(most)?;
        let changes = self.shared.plan.batch_with_drafts(most).before;
        let lists = (self.shared.plan.sessions * most * size_of::<u32>()) as u64;
        self.scheduler.set_drafts(drafts, most, changes).map_err(|_| refused("lists of drafts", lists))?;
        self.drafter = drafter(drafts, head);
        let metrics = &mut self.shared.metrics.lock();
        metrics.draft_limit = metrics.draft_limit.max(most);
        Ok(())
    }

    /// Makes room for so many drafts to a session and step, within the plan's budget.
    fn make_room(&mut self, drafts: usize) -> Result<(), DraftsError> {
        let (plan, (room, taken)) = (&self.shared.plan, self.room);
        if drafts <= room {
            return Ok(());
        }
        let batch = plan.batch_with_drafts(drafts);
        let lists = InFlight::bytes(&batch, plan.d_model)
            - InFlight::bytes(&plan.batch_with_drafts(room), plan.d_model);
        let lists = self.flights as u64 * lists;
        let needed = lists + self.pipeline.bytes_for_drafts(drafts)?;
        if let Some(spare) = plan.spare()
            && taken + needed > spare
        {
            return Err(DraftsError::Memory { drafts, needed, missing: taken + needed - spare });
        }
        for flight in &mut self.grounded {
            let allowed = flight.work.allow_drafts(&batch);
            allowed.map_err(|_: TryReserveError| refused("batches with drafts", lists))?;
        }
        self.pipeline.each(Arc::new(move |stage| stage.allow_drafts(drafts)))?;
        self.room = (drafts, taken + needed);
        Ok(())
    }
}

fn refused(what: &'static str, bytes: u64) -> DeviceError {
    DeviceError::Memory { what, bytes, source: std::io::ErrorKind::OutOfMemory.into() }
}
