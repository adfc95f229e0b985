//! The draft head's passes: one row of each session through the head's layer, a token chosen, and again.
//!
//! The first pass takes the hidden row that the session remembers and the token that is certain; each next one the
//! head's own hidden row and the token it chose. Its keys and values lie at the positions of the drafts and are
//! written again, from the trunk's rows, before anybody reads them, unless the token was certain. Nothing else that a
//! session remembers changes here.

use std::sync::{Mutex, PoisonError};

use motet_model::PAGE;
use motet_model::batch::{Batch, InFlight, NO_PAGE, RECENT, Want};
use motet_model::device::DeviceError;
use motet_model::program::Program;

use super::answers::{HeadOf, choose};
use super::feed::{Feed, place_before};
use super::lines::Lines;
use super::run::Region;
use super::{CpuStage, Head, Machine, Section};
use crate::device::unsupported;
use crate::pool::WorkerPanic;
use crate::sampling::scratch_len;
use crate::worker_scratch::WorkerScratch;

/// The draft head of a stage.
#[derive(Debug)]
pub(super) struct DraftHead {
    /// What it sees of the rows of the trunk.
    pub(super) feed: Feed,
    /// From the rows that were kept to hidden rows.
    pub(super) recall: Vec<Region>,
    /// Its layer, and the norm behind.
    pub(super) layer: Vec<Region>,
    pub(super) head: Head,
}

impl DraftHead {
    /// From what feeds it and the operations that it runs; `None` where there are none.
    pub(super) fn of(
        program: &Program,
        recall: &[usize],
        feed: Option<Feed>,
        mut layer: Vec<usize>,
    ) -> Option<Self> {
        let head = Head::of(program, layer.pop().into_iter().collect())?;
        let (recall, layer) = (Region::all(program, recall), Region::all(program, &layer));
        Some(Self { feed: feed?, recall, layer, head })
    }
}

impl CpuStage {
    /// Refuses what can't be drafted, before anything changes.
    pub(super) fn check_draft(&self, work: &InFlight) -> Result<(), DeviceError> {
        if self.draft.is_none() {
            return Err(unsupported("drafts: the stage has no draft head"));
        }
        self.check(work)?;
        let (batch, most) = (&work.batch, self.limits.batch.drafts);
        let wrong = |what: String| Err(DeviceError::Batch(what));
        let (segments, drafts, asks) = (batch.segments.len(), batch.drafts.len(), batch.asks.len());
        if drafts != segments || asks != segments || batch.rows() != segments {
            let rows = batch.rows();
            return wrong(format!(
                "{rows} rows, {asks} asks and {drafts} draft counts for {segments} segments"
            ));
        }
        let in_range = |&k: &u32| (1..=most).contains(&(k as usize));
        if !batch.drafts.is_sorted_by(|a, b| a >= b) || !batch.drafts.iter().all(in_range) {
            return wrong(format!("draft counts {:?}: expected {most} to 1, descending", batch.drafts));
        }
        if batch.asks.iter().any(|ask| !matches!(ask.want, Want::Sample(_))) {
            return wrong("drafts are sampled, not scored".into());
        }
        for (i, (s, &drafts)) in batch.segments.iter().zip(&batch.drafts).enumerate() {
            let (first, end) = (s.first_position as usize, s.first_position as usize + drafts as usize);
            if first == 0 || end > self.limits.context {
                return wrong(format!(
                    "segment {i}: rows {first}..{end} of a context of {}",
                    self.limits.context
                ));
            }
            for pool in 0..self.limits.pages.len() {
                let pages = batch.table(s, pool).get(first / PAGE..=(end - 1) / PAGE);
                if pages.is_none_or(|pages| pages.contains(&NO_PAGE)) {
                    return wrong(format!(
                        "segment {i}, pool {pool}: no pages for the drafts up to {}",
                        end - 1
                    ));
                }
            }
        }
        Ok(())
    }

    /// Drafts for all sessions of a batch that `check_draft` has seen.
    pub(super) fn draft_all(&mut self, work: &mut InFlight) -> Result<(), WorkerPanic> {
        let InFlight { batch, hidden, drafted, .. } = work;
        self.catch_up(batch, hidden)?;
        let (Some(draft), d) = (&self.draft, self.d_model) else { return Ok(()) };
        for (segment, row) in batch.segments.iter().zip(hidden.chunks_exact_mut(d)) {
            let kept = self.state.of_slot(segment.slot, draft.feed.kept, RECENT * d);
            row.copy_from_slice(&kept[place_before(segment.first_position) * d..][..d]);
        }
        self.run(Section::Recall, Lines::of(batch), hidden)?;
        drafted.clear();
        drafted.resize(batch.drafts.iter().sum::<u32>() as usize, 0);
        let mut tokens = std::mem::take(&mut self.workspace.tokens);
        tokens.extend_from_slice(&batch.tokens);
        let done = self.passes(batch, hidden, &mut tokens, drafted);
        tokens.clear();
        self.workspace.tokens = tokens;
        done
    }

    /// Pass after pass, each with the sessions that want so many.
    fn passes(
        &mut self,
        batch: &Batch,
        hidden: &mut [f32],
        tokens: &mut Vec<u32>,
        drafted: &mut [u32],
    ) -> Result<(), WorkerPanic> {
        for depth in 0..batch.drafts.first().map_or(0, |&most| most as usize) {
            tokens.truncate(batch.drafts.partition_point(|&drafts| drafts as usize > depth));
            self.run(Section::Draft, Lines::ahead(batch, tokens, depth as u32), hidden)?;
            for (i, chosen) in tokens.chunks_mut(self.limits.logit_rows).enumerate() {
                self.choose_drafts(batch, hidden, i * self.limits.logit_rows, depth, chosen, drafted)?;
            }
            for (session, &token) in tokens.iter().enumerate() {
                drafted[at(batch, session) + depth] = token;
            }
        }
        Ok(())
    }

    /// The next token of the sessions from `first` on, from the head's hidden rows.
    fn choose_drafts(
        &mut self,
        batch: &Batch,
        hidden: &[f32],
        first: usize,
        depth: usize,
        chosen: &mut [u32],
        drafted: &[u32],
    ) -> Result<(), WorkerPanic> {
        let (vocab, count) = (self.sizes.vocab, chosen.len());
        self.logits(HeadOf::Draft, batch, hidden, first..first + count, |observer, i, _, logits| {
            observer.draft_logits(first + i, depth, logits);
        })?;
        let w = &mut self.workspace;
        let Machine { isa, pool, .. } = &mut self.machine;
        let (isa, logits) = (*isa, &w.logits);
        let scratch = WorkerScratch::new(&mut w.sampler, pool.threads(), scratch_len(vocab));
        let chosen = Mutex::new(chosen);
        pool.run(count, |i, worker| {
            let session = first + i;
            let Want::Sample(sampling) = &batch.asks[session].want else { unreachable!("as checked") };
            let position = batch.segments[session].first_position + 1 + depth as u32;
            let so_far = &drafted[at(batch, session)..][..depth];
            let (logits, mut scratch) = (&logits[i * vocab..][..vocab], scratch.lend(worker));
            let token = choose(isa, batch, sampling, position, so_far, logits, &mut scratch);
            // Any token may be proposed: where the head overflowed, it is the first.
            chosen.lock().unwrap_or_else(PoisonError::into_inner)[i] = token.unwrap_or(0);
        })
    }
}

/// Where a session's drafts begin among all.
fn at(batch: &Batch, session: usize) -> usize {
    batch.drafts[..session].iter().sum::<u32>() as usize
}
