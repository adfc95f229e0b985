//! From hidden rows to answers: the rows that were asked for, a slice at a time, through the head and to the sampler.
//!
//! Only `logit_rows` rows of logits exist at once; each is consumed before the next slice is computed. A row with
//! logits that are not finite makes its segment a fault and gets no answer.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use motet_model::batch::{Answer, Ask, Batch, InFlight, Segment, Want};
use motet_model::program::Op;

use super::run::Run;
use super::{CpuStage, Machine};
use crate::isa::Isa;
use crate::pool::WorkerPanic;
use crate::sampling::{LogNormaliser, NonFiniteLogits, Settings, digest, most_likely, pick, scratch_len};
use crate::worker_scratch::WorkerScratch;
use crate::workspace::Buffers;

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
        let (d, vocab) = (self.d_model, self.sizes.vocab);
        let count = slice.len();
        let w = &mut self.workspace;
        let asks = &work.batch.asks[slice];
        for (ask, row) in asks.iter().zip(w.asked.chunks_exact_mut(d)) {
            row.copy_from_slice(&work.hidden[ask.row as usize * d..][..d]);
        }
        let head = &self.program.ops[self.head.expect("a stage with a head")].1;
        let Op::Head { x, weight, softcap } = *head else { unreachable!("the last is the head") };
        let mut run = Run {
            program: &self.program,
            machine: &mut self.machine,
            buffers: Buffers::new(&mut w.asked, d, w.floats.all(), &w.places, count),
            batch: &work.batch,
            state: &mut self.state,
            scratch: &mut w.scratch,
            quantised_of: None,
            observer: self.observer.as_deref_mut(),
        };
        run.regions(&self.output, Some(head))?;
        run.head(x, weight, softcap, &mut w.logits[..count * vocab])?;
        if let Some(observer) = run.observer.as_deref_mut() {
            for (ask, (i, logits)) in asks.iter().zip(w.logits.chunks_exact(vocab).enumerate()) {
                observer.hidden(ask.row, run.buffers.read(x).row(i));
                observer.logits(ask.row, logits);
            }
        }
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
                    let of_row = |s: &Segment| s.rows.contains(&ask.row);
                    faults.extend(batch.segments.iter().position(of_row).map(|segment| segment as u32));
                }
            }
        })?;
        // Threads finish in any order.
        work.answers[answered..].sort_unstable_by_key(|answer| answer.row);
        work.faults.sort_unstable();
        work.faults.dedup();
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
            let position = batch.segments.iter().find(|s| s.rows.contains(&ask.row));
            let position = position.map_or(0, |s| s.first_position + ask.row - s.rows.start);
            let settings = Settings {
                seed: s.seed,
                choice: s.choice,
                position: position + 1,
                temperature: s.temperature,
                top_k: s.top_k,
                top_p: s.top_p,
                min_p: s.min_p,
                repetition_penalty: s.repetition_penalty,
                frequency_penalty: s.frequency_penalty,
                presence_penalty: s.presence_penalty,
            };
            let seen = batch.seen(s).iter().map(|seen| (seen.token, seen.generated));
            pick(isa, logits, &settings, seen, batch.bias(s), scratch)?
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
