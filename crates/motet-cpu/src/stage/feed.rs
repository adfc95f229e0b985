//! What the draft head gets to see of the rows: the last ones are kept with the session, and of those that a batch names
//! the head's keys and values are written.
//!
//! A step keeps the rows of all its segments as the trunk leaves them; that is a copy. Feeding costs products, so it
//! is put off until somebody drafts: then, what a session has not been fed with is fed in one pass, beside the others.
//! An entry is made of its token and the hidden row before it, so when it was made can't be seen in its bits. Rows
//! behind a draft that was not kept are dead, like their keys and values: their places are written again.

use motet_model::batch::{Batch, Commit, InFlight, RECENT, Segment};
use motet_model::program::{BufferId, Cols, Op, Program, RESIDUAL, StateId};

use super::lines::Lines;
use super::run::Region;
use super::{CpuStage, Section};
use crate::pool::WorkerPanic;

/// What is remembered of the rows, and what the head makes of them.
#[derive(Debug)]
pub(super) struct Feed {
    /// From rows that were kept to keys and values.
    pub(super) feed: Vec<Region>,
    /// Where the rows of a step wait that feeds the head.
    aside: BufferId,
    /// Where the last rows are kept.
    pub(super) kept: StateId,
}

impl Feed {
    /// From its operations; `None` where there are none.
    pub(super) fn of(program: &Program, keep: &[usize], feed: &[usize]) -> Option<Self> {
        let Op::Keep { x: Cols { buffer: RESIDUAL, .. }, aside, state } = program.ops[*keep.first()?].1
        else {
            unreachable!("what is kept is the residual stream")
        };
        Some(Self { feed: Region::all(program, feed), aside: aside.buffer, kept: state })
    }
}

impl CpuStage {
    /// Keeps the rows of a step that has its answers, and feeds the head with those that it is to be fed with. What was
    /// in the residual stream is lost.
    pub(super) fn keep_rows(&mut self, work: &mut InFlight) -> Result<(), WorkerPanic> {
        let Some(draft) = &self.draft else { return Ok(()) };
        let (aside, state) = (draft.feed.aside, draft.feed.kept);
        let InFlight { batch, hidden, .. } = work;
        let (rows, d) = (batch.rows(), self.d_model);
        let feeds = batch.segments.iter().any(|segment| segment.feed.is_some());
        if feeds {
            self.workspace.rows_mut(aside, rows).copy_from_slice(&hidden[..rows * d]);
            // Before places are written again.
            self.line_up(batch, hidden);
        }
        let rows = if feeds { self.workspace.rows(aside, rows) } else { &hidden[..rows * d] };
        for segment in &batch.segments {
            let kept = self.state.of_slot_mut(segment.slot, state, RECENT * d);
            let own = &rows[segment.rows.start as usize * d..segment.rows.end as usize * d];
            let unneeded = segment.rows.len().saturating_sub(RECENT);
            for (i, row) in own.chunks_exact(d).enumerate().skip(unneeded) {
                let place = (segment.first_position as usize + i) % RECENT;
                kept[place * d..][..d].copy_from_slice(row);
            }
        }
        self.feed(batch, hidden)
    }

    /// Feeds the head with what the sessions of a batch for drafting lack.
    pub(super) fn catch_up(&mut self, batch: &Batch, hidden: &mut [f32]) -> Result<(), WorkerPanic> {
        self.line_up(batch, hidden);
        self.feed(batch, hidden)
    }

    /// Lines up what the head is to be fed with: segments, tokens, and in the residual stream the hidden rows before
    /// them, not yet normed, which a session remembers or which are rows of this step.
    fn line_up(&mut self, batch: &Batch, hidden: &mut [f32]) {
        let Some(draft) = &self.draft else { return };
        let (d, state) = (self.d_model, draft.feed.kept);
        let mut segments = std::mem::take(&mut self.workspace.fed);
        let mut tokens = std::mem::take(&mut self.workspace.tokens);
        let rows = self.workspace.rows(draft.feed.aside, batch.rows());
        let mut into = hidden.chunks_exact_mut(d);
        for segment in &batch.segments {
            let positions = batch.fed(segment);
            if positions.is_empty() {
                continue;
            }
            let kept = self.state.of_slot(segment.slot, state, RECENT * d);
            for (position, into) in positions.clone().zip(&mut into) {
                into.copy_from_slice(match position.checked_sub(segment.first_position + 1) {
                    Some(row) => &rows[(segment.rows.start + row) as usize * d..][..d],
                    None => &kept[place_before(position) * d..][..d],
                });
            }
            let first = tokens.len() as u32;
            let both = batch.tokens_behind(segment).iter().chain(batch.segment_tokens(segment));
            tokens.extend(both.take(positions.len()));
            segments.push(Segment {
                slot: segment.slot,
                first_position: positions.start,
                rows: first..tokens.len() as u32,
                tables: segment.tables.clone(),
                commit: Commit::All,
                feed: None,
            });
        }
        (self.workspace.fed, self.workspace.tokens) = (segments, tokens);
    }

    /// Feeds the head with what was lined up.
    fn feed(&mut self, batch: &Batch, hidden: &mut [f32]) -> Result<(), WorkerPanic> {
        let mut segments = std::mem::take(&mut self.workspace.fed);
        let mut tokens = std::mem::take(&mut self.workspace.tokens);
        let done = match tokens.is_empty() {
            true => Ok(()),
            false => self.run(Section::Feed, Lines::other(batch, &segments, &tokens), hidden),
        };
        segments.clear();
        tokens.clear();
        (self.workspace.fed, self.workspace.tokens) = (segments, tokens);
        done
    }
}

/// Where the row of the position before this one is kept. Before the first position there are zeros, in the last place.
pub(super) fn place_before(position: u32) -> usize {
    (position as usize + RECENT - 1) % RECENT
}
