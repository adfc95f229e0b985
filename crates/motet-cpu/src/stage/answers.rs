//! From hidden rows to answers: the rows that were asked for, a slice at a time, through the head and to the sampler.
//!
//! Only `logit_rows` rows of logits exist at once; each is consumed before the next slice is computed. A row with
//! logits that are not finite is a fault of its segment and gets no answer.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use motet_model::batch::{Answer, Ask, Batch, Commit, Fault, InFlight, Sampling, Seen, Want};
use motet_model::device::Observer;
use motet_model::program::Op;

use super::lines::Lines;
use super::profile::Watch;
use super::run::Run;
use super::{CpuStage, Head, Machine};
use crate::isa::Isa;
use crate::pool::WorkerPanic;
use crate::sampling::{LogNormaliser, NonFiniteLogits, Settings, digest, most_likely, pick, scratch_len};
use crate::worker_scratch::WorkerScratch;
use crate::workspace::Buffers;

/// Whose logits.
#[derive(Debug, Clone, Copy)]
pub(super) enum HeadOf {
    /// The network's.
    Trunk,
    /// Those of its draft head.
    Draft,
}

/// The most tokens of a top list.
const MOST: usize = 20;

impl CpuStage {
    /// Answers all asks of a batch whose rows have gone through the layers.
    pub(super) fn answer(&mut self, work: &mut InFlight) -> Result<(), WorkerPanic> {
        let asks = work.batch.asks.len();
        for first in (0..asks).step_by(self.limits.logit_rows) {
            self.answer_slice(work, first..(first + self.limits.logit_rows).min(asks))?;
        }
        Ok(())
    }

    fn answer_slice(&mut self, work: &mut InFlight, slice: Range<usize>) -> Result<(), WorkerPanic> {
        let vocab = self.sizes.vocab;
        let count = slice.len();
        let asks = &work.batch.asks[slice];
        let rows = asks.iter().map(|ask| ask.row as usize);
        self.logits(HeadOf::Trunk, &work.batch, &work.hidden, rows, |observer, i, hidden, logits| {
            observer.hidden(asks[i].row, hidden);
            observer.logits(asks[i].row, logits);
        })?;
        let w = &mut self.workspace;
        let watch = Watch::start();
        let Machine { isa, pool, .. } = &mut self.machine;
        let (isa, logits, batch) = (*isa, &w.logits, &work.batch);
        let scratch = WorkerScratch::new(&mut w.sampler, pool.threads(), scratch_len(vocab));
        let answered = work.answers.len();
        let out = Mutex::new((&mut work.answers, &mut work.top, &mut work.faults));
        pool.run(count, |i, worker| {
            let ask = &asks[i];
            let logits = &logits[i * vocab..][..vocab];
            let mut list = [(0, 0.0); MOST];
            let verdict = answer(isa, batch, ask, logits, &mut list, &mut scratch.lend(worker));
            let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
            let (answers, top, faults) = &mut *out;
            match verdict {
                Ok((mut answer, found)) => {
                    let start = top.len() as u32;
                    top.extend_from_slice(&list[..found]);
                    answer.top = start..start + found as u32;
                    answers.push(answer);
                }
                Err(NonFiniteLogits) => {
                    let segment = batch.segments.partition_point(|s| s.rows.end <= ask.row) as u32;
                    match faults.iter_mut().find(|fault| fault.segment == segment) {
                        Some(fault) => fault.row = fault.row.min(ask.row),
                        None => faults.push(Fault { segment, row: ask.row }),
                    }
                }
            }
        })?;
        watch.other(&mut self.profile, "sampling", work.batch.rows());
        // Threads finish in any order.
        work.answers[answered..].sort_unstable_by_key(|answer| answer.row);
        work.faults.sort_unstable();
        Ok(())
    }

    /// Leaves the logits of some hidden rows, at most `logit_rows`, in the workspace and shows each to the observer:
    /// the number among them, the row before the head, its logits.
    pub(super) fn logits(
        &mut self,
        of: HeadOf,
        batch: &Batch,
        hidden: &[f32],
        rows: impl ExactSizeIterator<Item = usize>,
        mut show: impl FnMut(&mut dyn Observer, usize, &[f32], &[f32]),
    ) -> Result<(), WorkerPanic> {
        let (d, vocab, count) = (self.d_model, self.sizes.vocab, rows.len());
        let Head { regions, head } = match of {
            HeadOf::Trunk => self.output.as_ref(),
            HeadOf::Draft => self.draft.as_ref().map(|draft| &draft.head),
        }
        .expect("only what has a head is asked for logits");
        let w = &mut self.workspace;
        for (row, asked) in rows.zip(w.asked.chunks_exact_mut(d)) {
            asked.copy_from_slice(&hidden[row * d..][..d]);
        }
        let head = &self.program.ops[*head].1;
        let Op::Head { x, weight, softcap } = *head else { unreachable!("`Head::of` saw it") };
        let mut run = Run {
            program: &self.program,
            machine: &mut self.machine,
            buffers: Buffers::new(&mut w.asked, d, w.floats.all(), &w.places, count),
            lines: Lines::of(batch),
            state: &mut self.state,
            rollback: &mut self.rollback,
            scratch: &mut w.scratch,
            quantised_of: None,
            observer: self.observer.as_deref_mut(),
            profile: &mut self.profile,
        };
        run.regions(regions, Some(head))?;
        let watch = Watch::start();
        run.head(x, weight, softcap, &mut w.logits[..count * vocab])?;
        watch.other(run.profile, "head", batch.rows());
        if let Some(observer) = run.observer.as_deref_mut() {
            for (i, logits) in w.logits[..count * vocab].chunks_exact(vocab).enumerate() {
                show(observer, i, run.buffers.read(x).row(i), logits);
            }
        }
        Ok(())
    }
}

/// One row's answer without its top list, and how long that is.
fn answer(
    isa: Isa,
    batch: &Batch,
    ask: &Ask,
    logits: &[f32],
    list: &mut [(u32, f32); MOST],
    scratch: &mut [f32],
) -> Result<(Answer, usize), NonFiniteLogits> {
    let token = match &ask.want {
        Want::Score { target } => *target,
        Want::Sample(s) => {
            let segment = batch.segments.iter().find(|s| s.rows.contains(&ask.row));
            let segment = segment.expect("an ask names a row of a segment, as `Batch::check` saw");
            let at = (ask.row - segment.rows.start) as usize;
            let drafts = match segment.commit {
                Commit::All => &[],
                Commit::Verify => &batch.segment_tokens(segment)[1..=at],
            };
            choose(isa, batch, s, segment.first_position + 1 + at as u32, drafts, logits, scratch)?
        }
    };
    let (mut logprob, mut found) = (f32::NAN, 0);
    if ask.logprob || ask.top > 0 || matches!(ask.want, Want::Score { .. }) {
        let normaliser = LogNormaliser::new(isa, logits)?;
        logprob = logits.get(token as usize).map_or(f32::NEG_INFINITY, |&l| normaliser.log_probability(l));
        found = most_likely(isa, logits, &normaliser, &mut list[..(ask.top as usize).min(MOST)]);
    }
    let digest = if ask.digest { digest(logits) } else { 0 };
    Ok((Answer { row: ask.row, token, logprob, top: 0..0, digest }, found))
}

/// The token that a row's logits give for `position`, with the `drafts` before it taken as generated.
pub(super) fn choose(
    isa: Isa,
    batch: &Batch,
    s: &Sampling,
    position: u32,
    drafts: &[u32],
    logits: &[f32],
    scratch: &mut [f32],
) -> Result<u32, NonFiniteLogits> {
    let settings = Settings {
        seed: s.seed,
        choice: s.choice,
        position,
        temperature: s.temperature,
        top_k: s.top_k,
        top_p: s.top_p,
        min_p: s.min_p,
        repetition_penalty: s.repetition_penalty,
        frequency_penalty: s.frequency_penalty,
        presence_penalty: s.presence_penalty,
    };
    let penalised = s.repetition_penalty != 1.0 || s.frequency_penalty != 0.0 || s.presence_penalty != 0.0;
    let drafts = if penalised { drafts } else { &[] };
    pick(isa, logits, &settings, counted(batch.seen(s), drafts), batch.bias(s), batch.allowed(s), scratch)
}

/// The tokens seen and the drafts, each token once, with how often it was generated.
fn counted<'a>(seen: &'a [Seen], drafts: &'a [u32]) -> impl Iterator<Item = (u32, u32)> + 'a {
    let drafted = move |token| drafts.iter().filter(|&&draft| draft == token).count() as u32;
    let new = move |&(i, token): &(usize, &u32)| {
        !drafts[..i].contains(token) && !seen.iter().any(|s| s.token == *token)
    };
    let old = seen.iter().map(move |s| (s.token, s.generated + drafted(s.token)));
    old.chain(drafts.iter().enumerate().filter(new).map(move |(_, &token)| (token, drafted(token))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_count_as_generated_whether_they_were_seen_or_not() {
        let seen = [Seen { token: 5, generated: 2 }, Seen { token: 9, generated: 0 }];
        let counts: Vec<_> = counted(&seen, &[9, 7, 5, 7, 9]).collect();
        assert_eq!(counts, [(5, 3), (9, 2), (7, 2)]);
        assert_eq!(counted(&seen, &[]).collect::<Vec<_>>(), [(5, 2), (9, 0)]);
    }
}
