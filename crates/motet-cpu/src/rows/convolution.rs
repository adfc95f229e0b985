//! The short causal convolution in front of recurrent layers: each channel by itself, over its last K inputs.
//!
//! A channel's output at one token: `w[0]·x[t−K+1]`, rounded, then `fma(w[j], x[t−K+1+j], ·)` for j = 1 … K − 1, the
//! current token last.

use super::{Rows, load, store};
use crate::lanes::{LANES, Lanes, dispatch};
use crate::math;
use crate::shared_rows::RowsMut;

/// The longest kernel.
pub const MAX_TAPS: usize = 8;

/// Weights `[channels, K]`, as model files hold them, tap by tap: `[K, channels]`.
pub fn taps_first(weights: &[f32], taps: usize) -> Vec<f32> {
    let channels = weights.len() / taps;
    assert_eq!(weights.len(), channels * taps, "whole kernels");
    (0..taps * channels).map(|i| weights[i % channels * taps + i / channels]).collect()
}

/// The rows of one session, in order, through the convolution, and its state advanced behind them.
///
/// All hold the same channels: `out` and `x` `[rows, channels]`, `weights` `[K, channels]` (see [`taps_first`]; 2 ≤ K ≤ 8),
/// `state` `[K − 1, channels]`: the inputs of the last K − 1 tokens, the oldest first, zeros before the first token.
/// Threads may share the channels. Panics if the shapes don't fit.
pub fn convolve(
    isa: crate::isa::Isa,
    out: &mut RowsMut<'_>,
    x: Rows<'_>,
    weights: Rows<'_>,
    state: &mut RowsMut<'_>,
) {
    convolution(isa, out, x, weights, state, Plain);
}

/// [`convolve`], then silu.
pub fn convolve_silu(
    isa: crate::isa::Isa,
    out: &mut RowsMut<'_>,
    x: Rows<'_>,
    weights: Rows<'_>,
    state: &mut RowsMut<'_>,
) {
    convolution(isa, out, x, weights, state, Silu);
}

/// Advances a session's state past some rows without convolving them, as [`convolve`] does.
///
/// `state` `[K − 1, channels]`, `x` `[rows, channels]`. Panics if they hold different channels.
pub fn advance(state: &mut RowsMut<'_>, x: Rows<'_>) {
    let (kept, rows) = (state.rows(), x.count());
    assert_eq!(state.width(), x.width(), "channels of the state and of the rows");
    if rows == 0 {
        return;
    }
    for j in 0..kept {
        // Input j is the one that came `rows` later; those of the state are read before they are overwritten.
        match (j + rows).checked_sub(kept) {
            Some(row) => state.row_mut(j).copy_from_slice(x.row(row)),
            None => {
                let [to, from] = state.pair_mut(j, j + rows);
                to.copy_from_slice(from);
            }
        }
    }
}

/// What is done to a sum before it is stored.
trait Finish: Copy {
    fn finish<L: Lanes>(self, l: L, sum: L::F) -> L::F;
}

#[derive(Clone, Copy)]
struct Plain;

impl Finish for Plain {
    #[inline(always)]
    fn finish<L: Lanes>(self, _: L, sum: L::F) -> L::F {
        sum
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl Finish for Silu {
    #[inline(always)]
    fn finish<L: Lanes>(self, l: L, sum: L::F) -> L::F {
        math::silu(l, sum)
    }
}

dispatch! {
    fn convolution<E: Finish>(
        out: &mut RowsMut<'_>,
        x: Rows<'_>,
        weights: Rows<'_>,
        state: &mut RowsMut<'_>,
        finish: E
    ) = convolution_on_lanes;
}

#[inline(always)]
fn convolution_on_lanes<L: Lanes, E: Finish>(
    l: L,
    out: &mut RowsMut<'_>,
    x: Rows<'_>,
    weights: Rows<'_>,
    state: &mut RowsMut<'_>,
    finish: E,
) {
    let (rows, channels) = (x.count(), x.width());
    let taps = weights.count();
    assert!((2..=MAX_TAPS).contains(&taps), "a kernel of {taps} taps");
    assert!(
        out.rows() == rows && out.width() == channels && weights.width() == channels,
        "x [{rows}, {channels}], out [{}, {}], weights of {} channels",
        out.rows(),
        out.width(),
        weights.width()
    );
    assert!(
        state.rows() == taps - 1 && state.width() == channels,
        "a state [{}, {}] for {taps} taps of {channels} channels",
        state.rows(),
        state.width()
    );
    let mut first = 0;
    while first < channels {
        let lanes = first..channels.min(first + LANES);
        // The last K inputs, the current one last; each new one pushes the oldest out.
        let (mut w, mut inputs) = ([l.splat(0.0); MAX_TAPS], [l.splat(0.0); MAX_TAPS]);
        for (j, w) in w[..taps].iter_mut().enumerate() {
            *w = load(l, &weights.row(j)[lanes.clone()]);
        }
        for (j, input) in inputs[1..taps].iter_mut().enumerate() {
            *input = load(l, &state.row_mut(j)[lanes.clone()]);
        }
        for row in 0..rows {
            for j in 1..taps {
                inputs[j - 1] = inputs[j];
            }
            inputs[taps - 1] = load(l, &x.row(row)[lanes.clone()]);
            let mut sum = l.mul(w[0], inputs[0]);
            for j in 1..taps {
                sum = l.fma(w[j], inputs[j], sum);
            }
            store(l, finish.finish(l, sum), &mut out.row_mut(row)[lanes.clone()]);
        }
        for (j, &input) in inputs[1..taps].iter().enumerate() {
            store(l, input, &mut state.row_mut(j)[lanes.clone()]);
        }
        first += LANES;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, bits, same_on_all};

    /// Outputs and then the state behind them.
    fn run(
        isa: crate::isa::Isa,
        x: &[f32],
        w: &[f32],
        state: &[f32],
        (rows, channels, taps): (usize, usize, usize),
        silu: bool,
    ) -> Vec<f32> {
        let (mut out, mut state) = (vec![9.0; rows * channels], state.to_vec());
        let operation = if silu { convolve_silu } else { convolve };
        operation(
            isa,
            &mut RowsMut::new(&mut out, rows, channels, channels),
            Rows::new(x, rows, channels, channels),
            Rows::new(w, taps, channels, channels),
            &mut RowsMut::new(&mut state, taps - 1, channels, channels),
        );
        out.extend(state);
        out
    }

    #[test]
    fn convolution_is_its_formula_with_the_same_bits_everywhere() {
        let mut random = Random::new(41);
        for taps in 2..=MAX_TAPS {
            for (rows, channels) in [(1, 16), (5, 50), (9, 7), (2, 96), (0, 16)] {
                for silu in [false, true] {
                    for wild in [false, true] {
                        let mut row = |n| if wild { random.wild_row(n) } else { random.row(n) };
                        let x = row(rows * channels);
                        let file_weights = row(taps * channels);
                        let state = row((taps - 1) * channels);
                        let w = taps_first(&file_weights, taps);
                        let shape = (rows, channels, taps);
                        let found = same_on_all(|isa| run(isa, &x, &w, &state, shape, silu));
                        let past: Vec<f32> = state.iter().chain(&x).copied().collect();
                        assert_eq!(bits(&found[rows * channels..]), bits(&past[rows * channels..]));
                        if wild {
                            continue;
                        }
                        let expected: Vec<f64> = (0..rows * channels)
                            .map(|i| {
                                let (row, channel) = (i / channels, i % channels);
                                let sum: f64 = (0..taps)
                                    .map(|j| {
                                        f64::from(file_weights[channel * taps + j])
                                            * f64::from(past[(row + j) * channels + channel])
                                    })
                                    .sum();
                                if silu { sum / (1.0 + (-sum).exp()) } else { sum }
                            })
                            .collect();
                        assert_close(&found[..rows * channels], &expected, 2e-6, 10.0);
                    }
                }
            }
        }
    }

    #[test]
    fn rows_at_once_equal_rows_one_by_one_and_channels_may_be_split() {
        let (rows, channels, taps) = (7, 40, 4);
        let mut random = Random::new(42);
        let (x, w, state) =
            (random.row(rows * channels), random.row(taps * channels), random.row(3 * channels));
        let isa = crate::isa::Isa::best();
        let whole = run(isa, &x, &w, &state, (rows, channels, taps), true);
        let (mut out, mut moving) = (Vec::new(), state.clone());
        for row in 0..rows {
            let one = run(isa, &x[row * channels..][..channels], &w, &moving, (1, channels, taps), true);
            out.extend(&one[..channels]);
            moving = one[channels..].to_vec();
        }
        let state_and_inputs = [state.clone(), x.clone()].concat();
        for advanced in 0..=rows {
            let mut moved = state.clone();
            let mut state = RowsMut::new(&mut moved, 3, channels, channels);
            advance(&mut state, Rows::new(&x, advanced, channels, channels));
            let past: Vec<f32> = state_and_inputs[advanced * channels..][..3 * channels].to_vec();
            assert_eq!(bits(&moved), bits(&past), "past {advanced} rows");
        }
        out.extend(moving);
        assert_eq!(bits(&out), bits(&whole));

        let (mut out, mut split_state) = (vec![0.0; rows * channels], state.clone());
        let (left, right) = RowsMut::new(&mut out, rows, channels, channels).split_columns(19);
        let (left_state, right_state) =
            RowsMut::new(&mut split_state, 3, channels, channels).split_columns(19);
        for (from, mut out, mut state) in [(0, left, left_state), (19, right, right_state)] {
            let width = out.width();
            convolve_silu(
                isa,
                &mut out,
                Rows::new(&x[from..], rows, width, channels),
                Rows::new(&w[from..], taps, width, channels),
                &mut state,
            );
        }
        out.extend(split_state);
        assert_eq!(bits(&out), bits(&whole));
    }
}
