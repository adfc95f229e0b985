//! Mixture of experts: which experts a row goes to, which rows an expert gets, and the sum of what comes back.
//!
//! An *entry* is one choice of one row: entry `row * k + rank`, rank 0 the best. Every list is by entries, so where an
//! expert's weights lie, or when it is computed, changes nothing.

pub use motet_model::program::Gating;

use crate::lanes::{LANES, Lanes, dispatch};
use crate::math;

/// How a row's experts are chosen and weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// What the logits become.
    pub gating: Gating,
    /// Whether the weights of a row are divided by their sum (+ 1e-20).
    pub renormalise: bool,
    /// What the weights are then multiplied by.
    pub scale: f32,
}

dispatch! {
    /// Chooses the experts of one row.
    ///
    /// `logits` are the router's, `[experts]`; they are replaced by the probabilities. `bias` `[experts]`, if there is
    /// one, is added for the choice only. `chosen` and `weights` `[k]` receive the experts, best first, and the
    /// weight of each: its probability, divided by Σ in order of rank if asked for, times the scale.
    /// Equal scores go to the lower expert; a NaN score is the lowest. Panics if the lengths don't fit.
    pub fn route(
        logits: &mut [f32],
        bias: Option<&[f32]>,
        routing: Routing,
        chosen: &mut [u32],
        weights: &mut [f32]
    ) = route_on_lanes;
}

#[inline(always)]
fn route_on_lanes<L: Lanes>(
    l: L,
    logits: &mut [f32],
    bias: Option<&[f32]>,
    routing: Routing,
    chosen: &mut [u32],
    weights: &mut [f32],
) {
    let k = chosen.len();
    assert!(k <= logits.len(), "{k} of {} experts", logits.len());
    assert_eq!(weights.len(), k, "a weight for each choice");
    match routing.gating {
        Gating::Softmax => softmax(l, logits),
        Gating::Sigmoid => sigmoid(l, logits),
    }
    let probabilities = &*logits;
    choose(probabilities, bias, chosen, weights);
    let mut sum = 0.0;
    for (weight, &expert) in weights.iter_mut().zip(&*chosen) {
        *weight = probabilities[expert as usize];
        sum += *weight;
    }
    let divisor = if routing.renormalise { sum + 1e-20 } else { 1.0 };
    for weight in weights {
        *weight = *weight / divisor * routing.scale;
    }
}

/// The k best by score, best first; `scores` is scratch.
#[inline(always)]
fn choose(probabilities: &[f32], bias: Option<&[f32]>, chosen: &mut [u32], scores: &mut [f32]) {
    if let Some(bias) = bias {
        assert_eq!(bias.len(), probabilities.len(), "a bias for each expert");
    }
    let k = chosen.len();
    let mut filled = 0;
    for (expert, &probability) in probabilities.iter().enumerate() {
        let score = bias.map_or(probability, |bias| probability + bias[expert]);
        let score = if score.is_nan() { f32::NEG_INFINITY } else { score };
        // Experts come in ascending order: a later one goes behind its equals.
        let mut rank = filled;
        while rank > 0 && scores[rank - 1] < score {
            rank -= 1;
        }
        if rank == k {
            continue;
        }
        let last = filled.min(k - 1);
        scores.copy_within(rank..last, rank + 1);
        chosen.copy_within(rank..last, rank + 1);
        scores[rank] = score;
        chosen[rank] = expert as u32;
        filled = (filled + 1).min(k);
    }
}

#[inline(always)]
fn softmax<L: Lanes>(l: L, x: &mut [f32]) {
    let mut max = l.splat(f32::NEG_INFINITY);
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        max = l.max(max, l.load(chunk));
    }
    max = l.max(max, l.load_tail(tail, f32::NEG_INFINITY));
    let max = l.splat(l.max_lane(max));
    let mut sums = l.splat(0.0);
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    for chunk in &mut *chunks {
        let e = math::exp(l, l.sub(l.load(chunk), max));
        sums = l.add(sums, e);
        l.store(e, chunk);
    }
    if !tail.is_empty() {
        let e = math::exp(l, l.sub(l.load_tail(tail, f32::NEG_INFINITY), max));
        sums = l.add(sums, e);
        l.store_tail(e, tail);
    }
    let sum = l.splat(l.sum(sums));
    for chunk in chunks {
        l.store(l.div(l.load(chunk), sum), chunk);
    }
    if !tail.is_empty() {
        l.store_tail(l.div(l.load_tail(tail, 0.0), sum), tail);
    }
}

#[inline(always)]
fn sigmoid<L: Lanes>(l: L, x: &mut [f32]) {
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        l.store(math::sigmoid(l, l.load(chunk)), chunk);
    }
    if !tail.is_empty() {
        l.store_tail(math::sigmoid(l, l.load_tail(tail, 0.0)), tail);
    }
}

/// Sorts the entries of all rows by expert: expert x gets `entries[offsets[x]..offsets[x + 1]]`, in ascending order.
///
/// `chosen` `[rows · k]` by entry; `entries` as long; `offsets` `[experts + 1]`.
///
/// # Panics
/// If the lengths don't fit or a chosen expert does not exist.
pub fn entries_by_expert(chosen: &[u32], entries: &mut [u32], offsets: &mut [u32]) {
    assert_eq!(entries.len(), chosen.len(), "as many entries as choices");
    assert!(!offsets.is_empty(), "an offset more than experts");
    let experts = offsets.len() - 1;
    offsets.fill(0);
    for &expert in chosen {
        assert!((expert as usize) < experts, "expert {expert} of {experts}");
        offsets[expert as usize + 1] += 1;
    }
    for x in 0..experts {
        offsets[x + 1] += offsets[x];
    }
    // Each offset moves to the end of its list as the list fills, which is the start of the next one.
    for (entry, &expert) in chosen.iter().enumerate() {
        let next = &mut offsets[expert as usize];
        entries[*next as usize] = entry as u32;
        *next += 1;
    }
    offsets.copy_within(0..experts, 1);
    offsets[0] = 0;
}

dispatch! {
    /// `y[i] = fma(weights[rank], out[rank][i], y[i])` for all ranks, ascending: one row's experts added to `y`.
    ///
    /// `outputs` are the row's k entries, each as long as `y`, one behind the other. Panics if the lengths don't fit.
    pub fn combine(y: &mut [f32], outputs: &[f32], weights: &[f32]) = combine_on_lanes;
}

#[inline(always)]
fn combine_on_lanes<L: Lanes>(l: L, y: &mut [f32], outputs: &[f32], weights: &[f32]) {
    let n = y.len();
    assert_eq!(outputs.len(), n * weights.len(), "an output as long as the row for each weight");
    for (rank, &weight) in weights.iter().enumerate() {
        let weight = l.splat(weight);
        let (y, y_tail) = y.as_chunks_mut::<LANES>();
        let (out, out_tail) = outputs[rank * n..][..n].as_chunks::<LANES>();
        for (y, out) in y.iter_mut().zip(out) {
            l.store(l.fma(weight, l.load(out), l.load(y)), y);
        }
        if !y_tail.is_empty() {
            l.store_tail(l.fma(weight, l.load_tail(out_tail, 0.0), l.load_tail(y_tail, 0.0)), y_tail);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::testing::{Random, assert_close, bits, same_on_all};

    struct Routed {
        chosen: Vec<u32>,
        weights: Vec<f32>,
        probabilities: Vec<f32>,
    }

    fn run(isa: Isa, logits: &[f32], bias: Option<&[f32]>, routing: Routing, k: usize) -> Routed {
        let mut probabilities = logits.to_vec();
        let (mut chosen, mut weights) = (vec![99; k], vec![0.0; k]);
        route(isa, &mut probabilities, bias, routing, &mut chosen, &mut weights);
        Routed { chosen, weights, probabilities }
    }

    #[test]
    fn routing_is_its_definition_with_the_same_bits_everywhere() {
        let mut random = Random::new(31);
        for (experts, k) in [(4, 2), (8, 8), (60, 4), (128, 8), (257, 6), (1, 1), (16, 0)] {
            for gating in [Gating::Softmax, Gating::Sigmoid] {
                for renormalise in [false, true] {
                    for with_bias in [false, true] {
                        let logits = random.row(experts);
                        let bias = random.row(experts);
                        let bias = with_bias.then_some(&bias[..]);
                        let routing = Routing { gating, renormalise, scale: 2.5 };
                        let weights = same_on_all(|isa| {
                            let routed = run(isa, &logits, bias, routing, k);
                            routed
                                .weights
                                .iter()
                                .chain(&routed.probabilities)
                                .copied()
                                .chain(routed.chosen.iter().map(|&x| x as f32))
                                .collect()
                        });
                        // Independently: f64, and a stable sort.
                        let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
                        let p: Vec<f64> = logits
                            .iter()
                            .map(|&l| match gating {
                                Gating::Softmax => f64::from(l).exp() / sum,
                                Gating::Sigmoid => 1.0 / (1.0 + (-f64::from(l)).exp()),
                            })
                            .collect();
                        let score = |x: usize| p[x] + bias.map_or(0.0, |bias| f64::from(bias[x]));
                        let mut order: Vec<usize> = (0..experts).collect();
                        order.sort_by(|&a, &b| score(b).total_cmp(&score(a)));
                        order.truncate(k);
                        let total: f64 = order.iter().map(|&x| p[x]).sum();
                        let expected: Vec<f64> = order
                            .iter()
                            .map(|&x| 2.5 * if renormalise { p[x] / total } else { p[x] })
                            .collect();
                        assert_close(&weights[..k], &expected, 2e-6, 1e-6);
                        let chosen: Vec<usize> = weights[k + experts..].iter().map(|&x| x as usize).collect();
                        assert_eq!(chosen, order);
                    }
                }
            }
        }
    }

    #[test]
    fn ties_go_to_the_lower_expert_and_nan_comes_last() {
        let softmax = Routing { gating: Gating::Softmax, renormalise: false, scale: 1.0 };
        for isa in Isa::available() {
            let routed = run(isa, &[1.0, 3.0, 3.0, 0.0, 3.0, 1.0], None, softmax, 5);
            assert_eq!(routed.chosen, [1, 2, 4, 0, 5]);
            let sigmoid = Routing { gating: Gating::Sigmoid, ..softmax };
            let routed = run(isa, &[f32::NAN, 0.5, f32::NAN, 0.5], None, sigmoid, 3);
            assert_eq!(routed.chosen, [1, 3, 0]);
            let routed = run(isa, &[f32::NAN; 20], None, softmax, 3);
            assert_eq!(routed.chosen, [0, 1, 2]);
            assert!(routed.weights.iter().all(|w| w.is_nan()));
        }
    }

    #[test]
    fn entries_are_sorted_by_expert_and_then_ascending() {
        let mut random = Random::new(32);
        for (rows, k, experts) in [(0, 2, 3), (1, 2, 4), (50, 4, 16), (7, 1, 300)] {
            let chosen: Vec<u32> = (0..rows * k).map(|_| random.below(experts) as u32).collect();
            let (mut entries, mut offsets) = (vec![u32::MAX; rows * k], vec![9; experts + 1]);
            entries_by_expert(&chosen, &mut entries, &mut offsets);
            let mut expected: Vec<u32> = (0..chosen.len() as u32).collect();
            expected.sort_by_key(|&entry| chosen[entry as usize]);
            assert_eq!(entries, expected);
            for x in 0..experts {
                let list = &entries[offsets[x] as usize..offsets[x + 1] as usize];
                assert!(list.iter().all(|&entry| chosen[entry as usize] == x as u32));
            }
            assert_eq!(offsets[experts] as usize, chosen.len());
        }
    }

    #[test]
    fn combining_adds_in_order_of_rank() {
        let mut random = Random::new(33);
        for n in [1, 16, 37, 64] {
            let (y, outputs, weights) = (random.wild_row(n), random.wild_row(4 * n), random.row(4));
            let found = same_on_all(|isa| {
                let mut y = y.clone();
                combine(isa, &mut y, &outputs, &weights);
                y
            });
            let expected: Vec<f32> = (0..n)
                .map(|i| (0..4).fold(y[i], |sum, rank| weights[rank].mul_add(outputs[rank * n + i], sum)))
                .collect();
            assert_eq!(bits(&found), bits(&expected));
        }
    }
}
