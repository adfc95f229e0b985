//! How many batches are in flight, and who goes in the next.
//!
//! With one stage there is one batch. With several, each batch leaves a stage free for the next one, but every batch
//! reads the weights again: g batches with n rows in all pass a pipeline once in the greater of g · max t(n/g) (the
//! dearest stage runs all of them) and Σ t(n/g) (a session's next row waits for its last), t being each stage's measured
//! time. The g for which that is least is taken; numbers of rows that were never measured get their chance. There are no
//! fixed groups: a batch takes its share of those that are ready when it can be sent, whoever has waited longest first.

use super::Scheduler;
use crate::costs::Costs;
use crate::plan::PIPELINED_ROWS;
use motet_model::Slot;
use std::time::Duration;

/// Rows of a prompt's last part where nothing else is to be done: fewer would take hardly less time.
const LAST_ROWS: usize = 32;

/// What is known of the stages.
pub(super) struct MicroBatches {
    /// What rows cost in each stage.
    costs: Vec<Costs>,
    /// Batches there are.
    flights: usize,
}

impl MicroBatches {
    pub(super) fn new(stages: usize, flights: usize) -> Self {
        Self { costs: vec![Costs::default(); stages], flights }
    }

    /// Batches that may be in flight at once.
    pub(super) fn flights(&self) -> usize {
        self.flights
    }

    /// A batch of so many rows took so long in each stage.
    pub(super) fn measured(&mut self, rows: usize, took: &[Duration]) {
        self.costs.iter_mut().zip(took).for_each(|(costs, &took)| costs.measured(rows, took));
    }

    /// In how many batches `rows` rows pass the stages soonest.
    fn best(&self, rows: usize) -> usize {
        let stages = self.costs.len();
        let most = self.flights.min(rows).max(1);
        let round = |batches: usize| -> Option<Duration> {
            // Some batches have a row more than the others.
            let (each, larger) = (rows / batches, rows % batches);
            let (mut dearest, mut way) = (Duration::ZERO, Duration::ZERO);
            for costs in &self.costs {
                let (small, large) = (costs.hoped(each)?, costs.hoped(rows.div_ceil(batches))?);
                dearest = dearest.max(small * (batches - larger) as u32 + large * larger as u32);
                way += large;
            }
            Some(dearest.max(way))
        };
        let known = (1..=most).filter_map(|batches| Some((round(batches)?, batches))).min();
        known.map_or(stages.min(most), |(_, batches)| batches)
    }

    /// Rows of the next part of a prompt of which `left` rows are to be read, where there is nothing else to do. Behind
    /// the last part the stages come to rest one after the other, so parts become small towards the end; slowly, so that
    /// a later stage, whose part is greater, has time for it if that stage is quicker.
    pub(super) fn part(&self, left: usize) -> usize {
        if self.flights > 1 { LAST_ROWS + left / 8 } else { left }
    }

    /// Rows of a batch that also has `decoding` rows, of `most` that there is room for.
    pub(super) fn most_rows(&self, most: usize, decoding: usize) -> usize {
        if self.flights > 1 { most.min(decoding + PIPELINED_ROWS) } else { most }
    }
}

impl Scheduler {
    /// The measured time of so many rows in each stage.
    pub(crate) fn stage_times(&self, rows: usize) -> Option<Vec<Duration>> {
        self.micro_batches.costs.iter().map(|costs| costs.expected(rows)).collect()
    }

    /// Whether another batch pays beside `in_flight` others: prompts keep all stages busy, next tokens come soonest in
    /// some number of batches.
    pub(crate) fn has_room(&self, in_flight: usize) -> bool {
        let most = match self.unsent_prompts() {
            true => self.micro_batches.flights,
            false => self.micro_batches.best(self.deciding()),
        };
        in_flight < most
    }

    /// Whether a request that waits could begin now.
    pub(crate) fn takes_requests(&self) -> bool {
        !self.free_slots.is_empty() && self.line.is_empty()
    }

    fn unsent_prompts(&self) -> bool {
        let unsent = |&slot: &Slot| {
            let session = self.running(slot);
            !session.decodes && session.sent < session.tokens.len()
        };
        self.by_age.iter().any(unsent) || !self.line.is_empty()
    }

    /// Sessions that decide tokens, in flight or not.
    pub(super) fn deciding(&self) -> usize {
        self.by_age.iter().filter(|&&slot| self.running(slot).decodes).count()
    }

    /// Chooses the sessions whose next tokens the step decides: of those that are ready a batch's share, whoever was
    /// sent longest ago first. Says how many go.
    pub(super) fn choose_who_goes(&mut self) -> usize {
        let deciding = self.deciding();
        let share = deciding.div_ceil(self.micro_batches.best(deciding));
        let mut going = std::mem::take(&mut self.going);
        going.clear();
        going.extend(self.by_age.iter().filter(|&&slot| self.running(slot).is_ready()));
        if going.len() > share {
            going.sort_unstable_by_key(|&slot| (self.running(slot).sent_in, self.running(slot).age));
            going.truncate(share);
            going.sort_unstable_by_key(|&slot| self.running(slot).age);
        }
        self.going = going;
        self.going.len()
    }
}
