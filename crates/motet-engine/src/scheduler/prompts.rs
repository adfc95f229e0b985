//! The scheduler's part in reading prompts: how many rows a step has for them, and whose they are.
//!
//! Parts of one prompt follow each other: the next is laid while those before are still in flight. It never runs a row
//! for which there is no page, and never takes from those that wait for their next token.

use super::Scheduler;
use crate::session::Session;
use motet_model::batch::Batch;

/// While nobody waits for a next token, a step may take this many times its usual time: prompts read faster.
const ALONE: u32 = 8;

/// Decoding may be slowed by this factor so that prompts advance, even where one row takes longer than a step should.
const COMPANY: f64 = 1.25;

impl Scheduler {
    /// Shares what is left of the step among the prompts. Half of it in equal parts, so that every prompt advances; the
    /// other half goes to the one that is nearest to its end, and what it leaves to the next: of several that come at
    /// once the first answers begin as soon as they can, and the last no later.
    pub(super) fn prefill(&mut self, batch: &mut Batch) {
        let mut budget = self.prefill_budget(batch.rows());
        self.prompts.clear();
        for &slot in &self.by_age {
            let session = self.running(slot);
            if session.decodes || session.leaving.is_some() {
                continue;
            }
            let rows = self.chunk_end(session) - session.sent;
            if rows > 0 {
                self.prompts.push((slot, rows));
            }
        }
        let mut prompts = std::mem::take(&mut self.prompts);
        if let [(slot, _)] = prompts[..]
            && self.chunk.is_none()
            && self.deciding() == 0
            && self.line.is_empty()
        {
            let session = self.running(slot);
            budget = budget.min(self.micro_batches.part(session.tokens.len() - session.sent));
        }
        if prompts.len() > budget {
            prompts.sort_unstable_by_key(|&(slot, _)| (self.running(slot).served, slot));
            prompts.truncate(budget);
        }
        prompts.sort_unstable_by_key(|&(slot, rows)| (rows, slot));
        let equal = (budget / (2 * prompts.len().max(1))).max(1);
        for (i, &(slot, rows)) in prompts.iter().enumerate() {
            let behind = prompts.len() - i - 1;
            let share = match self.chunk {
                Some(chunk) => chunk.min(budget),
                None => budget - equal * behind,
            };
            let session = self.running(slot);
            let end = self.cache.reach(&session.table, session.sent + rows.min(share));
            let rows = end.saturating_sub(session.sent);
            if rows > 0 {
                self.add(batch, slot, rows);
                budget -= rows;
            }
        }
        self.prompts = prompts;
    }

    /// Rows for prompts beside `decoding` rows.
    fn prefill_budget(&self, decoding: usize) -> usize {
        let most = self.most_rows - self.all_behind();
        if self.chunk.is_some() {
            return most - decoding;
        }
        let most = self.micro_batches.most_rows(most, decoding);
        let time = match self.costs.expected(decoding) {
            // Nobody's next token waits, not even for a batch in flight.
            _ if self.deciding() == 0 => self.step * ALONE,
            Some(time) => self.step.max(time.mul_f64(COMPANY)),
            None => self.step,
        };
        let least = (decoding + 1).min(most);
        self.costs.rows_within(time, least, most) - decoding
    }

    /// Where the next chunk of a prompt ends at the latest.
    fn chunk_end(&self, session: &Session) -> usize {
        if self.recurrent { session.next_border() } else { session.tokens.len() }
    }
}
