//! The running softmax of one query: weights from scores, splits joined, the division at the end.
//!
//! Two layouts of floats, both after `[padded_v]` sums of weighted values: a **running** split has 16 lane sums of the
//! denominator and then the greatest score; a **record** has the greatest score and the denominator.

use std::ops::Range;

use crate::kv::PAGE_POSITIONS;
use crate::lanes::{LANES, Lanes};
use crate::math::exp;

use super::products::{lanes_at, lanes_at_mut};

/// A split before its first tile.
#[inline(always)]
pub(super) fn start_split(running: &mut [f32], padded_v: usize) {
    running.fill(0.0);
    running[padded_v + LANES] = f32::NEG_INFINITY;
}

/// Sums up the denominator of a split that is complete, which makes its beginning a record.
#[inline(always)]
pub(super) fn close_split<L: Lanes>(l: L, running: &mut [f32], padded_v: usize) {
    let denominator = l.sum(l.load(lanes_at(running, padded_v)));
    running[padded_v] = running[padded_v + LANES];
    running[padded_v + 1] = denominator;
}

/// Turns the dot products of one query with a tile's keys into weights, and brings the split's running sums up to
/// the tile's greatest score. Positions outside `keys` get the score −∞, hence the weight +0.
#[inline(always)]
pub(super) fn soften<L: Lanes>(
    l: L,
    scores: &mut [f32],
    keys: Range<usize>,
    scale: f32,
    running: &mut [f32],
    padded_v: usize,
) {
    // Bit i: key i belongs to the row. `keys` is not empty and ends at 64 or before.
    let visible = (u64::MAX >> (PAGE_POSITIONS - keys.len())) << keys.start;
    let (scores, _) = scores.as_chunks_mut::<LANES>();
    let mut greatest = l.splat(f32::NEG_INFINITY);
    for (i, scores) in scores.iter_mut().enumerate() {
        let seen = l.mask((visible >> (i * LANES)) as u16);
        let scaled = l.mul(l.load(scores), l.splat(scale));
        let score = l.select(seen, scaled, l.splat(f32::NEG_INFINITY));
        greatest = l.max(greatest, score);
        l.store(score, scores);
    }
    let before = running[padded_v + LANES];
    let tile = l.max_lane(greatest);
    let now = if tile > before { tile } else { before };
    if now > before {
        // exp(−∞) = +0 for the split's first tile. Multiplying by exp(0) = 1 would change nothing.
        let factor = exp(l, l.splat(before - now));
        let (sums, _) = running[..padded_v + LANES].as_chunks_mut::<LANES>();
        for sums in sums {
            l.store(l.mul(l.load(sums), factor), sums);
        }
        running[padded_v + LANES] = now;
    }
    let mut denominator = l.load(lanes_at(running, padded_v));
    for scores in scores {
        let weight = exp(l, l.sub(l.load(scores), l.splat(now)));
        denominator = l.add(denominator, weight);
        l.store(weight, scores);
    }
    l.store(denominator, lanes_at_mut(running, padded_v));
}

/// The state before the first split.
#[inline(always)]
pub(super) fn start_total(total: &mut [f32], padded_v: usize) {
    total.fill(0.0);
    total[padded_v] = f32::NEG_INFINITY;
}

/// Adds the next split, in ascending order.
#[inline(always)]
pub(super) fn fold_split<L: Lanes>(l: L, total: &mut [f32], split: &[f32], padded_v: usize) {
    let (before, of_split) = (total[padded_v], split[padded_v]);
    let now = if of_split > before { of_split } else { before };
    let keep = exp(l, l.splat(before - now));
    let add = exp(l, l.splat(of_split - now));
    let (sums, _) = total[..padded_v].as_chunks_mut::<LANES>();
    let (split_sums, _) = split[..padded_v].as_chunks::<LANES>();
    for (sum, split_sum) in sums.iter_mut().zip(split_sums) {
        l.store(l.fma(l.load(split_sum), add, l.mul(l.load(sum), keep)), sum);
    }
    let denominator = l.fma(l.splat(split[padded_v + 1]), add, l.mul(l.splat(total[padded_v + 1]), keep));
    total[padded_v + 1] = l.to_array(denominator)[0];
    total[padded_v] = now;
}

/// Divides by the denominator.
#[inline(always)]
pub(super) fn finish<L: Lanes>(l: L, total: &[f32], padded_v: usize, out: &mut [f32]) {
    let denominator = l.splat(total[padded_v + 1]);
    let (sums, _) = total[..padded_v].as_chunks::<LANES>();
    for (out, sums) in out.chunks_mut(LANES).zip(sums) {
        l.store_tail(l.div(l.load(sums), denominator), out);
    }
}
