//! What people ask about a row of raw logits: log-probabilities, the most likely tokens, a digest.

use super::NonFiniteLogits;
use crate::isa::Isa;
use crate::lanes::{LANES, Lanes, dispatch};
use crate::math;

/// What turns a row's logits into log-probabilities.
///
/// Σ e^(l − max) by blocks of 1024 logits: 16 partial sums in ascending order and one tree in f32, the blocks in ascending
/// order in f64.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogNormaliser {
    max: f32,
    ln_sum: f64,
}

impl LogNormaliser {
    /// Of a row of raw logits.
    ///
    /// # Errors
    /// [`NonFiniteLogits`].
    ///
    /// # Panics
    /// If the row is empty.
    pub fn new(isa: Isa, logits: &[f32]) -> Result<LogNormaliser, NonFiniteLogits> {
        assert!(!logits.is_empty(), "a vocabulary of no token");
        if !crate::rows::elementwise::is_finite(isa, logits) {
            return Err(NonFiniteLogits);
        }
        let (max, sum) = max_and_sum(isa, logits);
        Ok(LogNormaliser { max, ln_sum: math::ln_f64(sum) })
    }

    /// The log-probability of a token with this logit, computed in f64 and rounded once.
    pub fn log_probability(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.max) - self.ln_sum) as f32
    }
}

dispatch! {
    fn max_and_sum(logits: &[f32]) -> (f32, f64) = max_and_sum_on_lanes;
}

#[inline(always)]
fn max_and_sum_on_lanes<L: Lanes>(l: L, logits: &[f32]) -> (f32, f64) {
    let lowest = f32::NEG_INFINITY;
    let (chunks, tail) = logits.as_chunks::<LANES>();
    let mut max = l.load_tail(tail, lowest);
    for chunk in chunks {
        max = l.max(l.load(chunk), max);
    }
    let max = l.max_lane(max);
    let mut sum = 0.0;
    for block in logits.chunks(64 * LANES) {
        let (chunks, tail) = block.as_chunks::<LANES>();
        let mut sums = l.splat(0.0);
        for chunk in chunks {
            sums = l.add(sums, math::exp(l, l.sub(l.load(chunk), l.splat(max))));
        }
        if !tail.is_empty() {
            sums = l.add(sums, math::exp(l, l.sub(l.load_tail(tail, lowest), l.splat(max))));
        }
        sum += f64::from(l.sum(sums));
    }
    (max, sum)
}

dispatch! {
    /// The most likely tokens with their log-probabilities, best first, equals by lower id: as many as `best` has room for.
    ///
    /// Returns how many there are: less than asked for only if the vocabulary is smaller. `logits` is the row that
    /// `normaliser` was made of.
    pub fn most_likely(logits: &[f32], normaliser: &LogNormaliser, best: &mut [(u32, f32)]) -> usize = most_likely_on_lanes;
}

#[inline(always)]
fn most_likely_on_lanes<L: Lanes>(
    l: L,
    logits: &[f32],
    normaliser: &LogNormaliser,
    best: &mut [(u32, f32)],
) -> usize {
    let n = best.len();
    if n == 0 {
        return 0;
    }
    let mut found = 0;
    for (i, chunk) in logits.chunks(LANES).enumerate() {
        let v = l.load_tail(chunk, f32::NEG_INFINITY);
        // Once the list is full only a greater logit gets in: an equal one has the higher id.
        let bound = if found == n { best[n - 1].1 } else { f32::NEG_INFINITY };
        let mut ahead = l.mask_bits(l.lt(l.splat(bound), v));
        while ahead != 0 {
            let lane = ahead.trailing_zeros() as usize;
            ahead &= ahead - 1;
            let logit = chunk[lane];
            let mut rank = found;
            while rank > 0 && best[rank - 1].1 < logit {
                rank -= 1;
            }
            if rank < n {
                best.copy_within(rank..found.min(n - 1), rank + 1);
                best[rank] = ((i * LANES + lane) as u32, logit);
                found = (found + 1).min(n);
            }
        }
    }
    for (_, value) in &mut best[..found] {
        *value = normaliser.log_probability(*value);
    }
    found
}

/// A 64-bit digest of the bits of a row: equal rows have equal digests, and a single changed bit always changes it.
///
/// Each number's bits b change the state by `h = (rotate_left(h, 5) ^ b) · 0x9e3779b97f4a7c15`, from h = the length; at the
/// end h ^= h >> 32.
pub fn digest(row: &[f32]) -> u64 {
    let h = row.iter().fold(row.len() as u64, |h, x| {
        (h.rotate_left(5) ^ u64::from(x.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    });
    h ^ h >> 32
}
