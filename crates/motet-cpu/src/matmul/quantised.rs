//! Products of quantised weights with quantised activations.
//!
//! **Definition** (channel n, row m; every operation rounds to f32 once). Let a block be 32 values of K, with the
//! activations' d_x, quants x and sums of x; the weights' codes give integers w (see [`Codes`]). Then, over the
//! blocks in ascending order, from acc = +0:
//!
//! ```text
//! S   = Σ w·x                            exact, i32      Q4_0 w = code − 8, Q5_0 − 16, Q8_0 the signed byte,
//!                                                        IQ4_NL, IQ4_XS, MXFP4 table[code], Q6_K − 32, Q3_K − 4,
//!                                                        the others w = code
//!     (scales of 16 values: S = s₀·Σ w·x over the first 16 + s₁·Σ w·x over the last 16, exact: |S| ≤ 2²⁴)
//! D   = d                                Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4; Q2_K, Q3_K, Q6_K
//!     = d·s                              Q4_K, Q5_K, IQ4_XS (exact: 11 + 6 bits)
//! acc = fma(S as f32, D·d_x, acc)        one rounded product, one fused multiply-add
//! and with a minimum
//! acc = fma(min, d_x·Σx, acc)            Q4_1, Q5_1
//! acc = fma(−min·m, d_x·Σx, acc)         Q4_K, Q5_K (min·m exact)
//! acc = fma(−min, d_x·M, acc)            Q2_K, M = m₀·(Σx of the first 16) + m₁·(Σx of the last 16), exact
//! ```
//!
//! A row's result depends on its own activations and the weights alone: tiles of rows and panels only decide what
//! is kept in registers. A NaN stays a NaN on every instruction set; which NaN is not defined.

use super::Product;
use super::codes::Codes;
use super::quads::Quads;
use super::scales::Scales;
use crate::activations::ActivationBlock;
use crate::shared_rows::RowsMut;

/// How far ahead of the reads the panel's stream is asked for (measured).
const PREFETCH: usize = 16384;

/// So many bytes of panels are used for all rows before the next ones: they stay in the second-level cache.
const PANELS_IN_CACHE: usize = 512 * 1024;

#[inline(always)]
pub(super) fn multiply<L: Quads, C: Codes, S: Scales>(
    l: L,
    codes: C,
    scales: S,
    product: Product<'_, ActivationBlock>,
    mut out: RowsMut<'_>,
) {
    let super_bytes = const { S::HEADER + S::BLOCKS * (S::SUB + C::PLANES.bytes()) };
    // What makes the unchecked reads of the rows sound.
    assert_eq!(product.panel_bytes / super_bytes * S::BLOCKS, product.rows.row_len());
    for group in product.groups(PANELS_IN_CACHE) {
        let mut first = 0;
        while first < product.rows.len() {
            let left = product.rows.len() - first;
            first += match left {
                8.. if L::ROWS >= 8 => {
                    tile::<L, C, S, 8>(l, codes, scales, &product, group.clone(), first, &mut out)
                }
                6.. if L::ROWS >= 6 => {
                    tile::<L, C, S, 6>(l, codes, scales, &product, group.clone(), first, &mut out)
                }
                4.. if L::ROWS >= 4 => {
                    tile::<L, C, S, 4>(l, codes, scales, &product, group.clone(), first, &mut out)
                }
                3.. if L::ROWS >= 3 => {
                    tile::<L, C, S, 3>(l, codes, scales, &product, group.clone(), first, &mut out)
                }
                2.. if L::ROWS >= 2 => {
                    tile::<L, C, S, 2>(l, codes, scales, &product, group.clone(), first, &mut out)
                }
                _ => tile::<L, C, S, 1>(l, codes, scales, &product, group.clone(), first, &mut out),
            };
        }
    }
}

/// R rows from `first` on, times some panels. Returns R.
#[inline(always)]
fn tile<L: Quads, C: Codes, S: Scales, const R: usize>(
    l: L,
    codes: C,
    scales: S,
    product: &Product<'_, ActivationBlock>,
    panels: std::ops::Range<usize>,
    first: usize,
    out: &mut RowsMut<'_>,
) -> usize {
    let rows = product.rows.pointers::<R>(first);
    let out = out.rows_mut::<R>(first);
    for panel in panels {
        // SAFETY: the caller checked that a panel has as many blocks as a row.
        let sums = unsafe { panel_times_rows(l, codes, scales, product.panel(panel), rows) };
        for r in 0..R {
            product.store(l, sums[r], panel, out[r]);
        }
    }
    R
}

/// One panel times R rows: the definition.
///
/// # Safety
/// Each row has as many blocks as the panel.
#[inline(always)]
unsafe fn panel_times_rows<L: Quads, C: Codes, S: Scales, const R: usize>(
    l: L,
    codes: C,
    scales: S,
    panel: &[u8],
    rows: [*const ActivationBlock; R],
) -> [L::F; R] {
    let block_bytes = const { S::SUB + C::PLANES.bytes() };
    let super_bytes = const { S::HEADER + S::BLOCKS * (S::SUB + C::PLANES.bytes()) };
    let mut acc = [l.splat(0.0); R];
    let mut b = 0;
    for stream in panel.chunks_exact(super_bytes) {
        let (header, blocks) = stream.split_at(S::HEADER);
        prefetch(l, header);
        let header = scales.header(l, header);
        for block in blocks.chunks_exact(block_bytes) {
            prefetch(l, block);
            let (sub, planes) = block.split_at(S::SUB);
            let factors = scales.block(l, header, sub);
            let w = codes.load(l, planes);
            // SAFETY: the rows have as many blocks as the panel.
            let x = rows.map(|row| unsafe { &*row.add(b) });
            let sums = if S::HALVES {
                let [first, last] = codes.dot_halves(l, &w, x);
                scaled_halves(l, factors.halves, first, last)
            } else {
                floats(l, codes.dot(l, &w, x))
            };
            for r in 0..R {
                acc[r] = l.fma(sums[r], l.mul(factors.scale, l.splat(x[r].d)), acc[r]);
                if S::MIN && S::HALVES {
                    let m = l.to_float(l.dot_sums(factors.min_halves, x[r].sums));
                    acc[r] = l.fma(factors.min, l.mul(l.splat(x[r].d), m), acc[r]);
                } else if S::MIN {
                    acc[r] = l.fma(factors.min, l.splat(x[r].d_sum), acc[r]);
                }
            }
            b += 1;
        }
    }
    acc
}

/// s₀ · first + s₁ · last: exact, as all integers here are below 2²⁴, so it is the same as in i32.
#[inline(always)]
fn scaled_halves<L: Quads, const R: usize>(
    l: L,
    s: [L::F; 2],
    first: [L::I; R],
    last: [L::I; R],
) -> [L::F; R] {
    let (first, mut sums) = (floats(l, first), floats(l, last));
    for r in 0..R {
        sums[r] = l.fma(first[r], s[0], l.mul(sums[r], s[1]));
    }
    sums
}

#[inline(always)]
fn floats<L: Quads, const R: usize>(l: L, sums: [L::I; R]) -> [L::F; R] {
    let mut floats = [l.splat(0.0); R];
    for r in 0..R {
        floats[r] = l.to_float(sums[r]);
    }
    floats
}

/// Asks for the cache lines that lie [`PREFETCH`] bytes behind these.
#[inline(always)]
fn prefetch<L: Quads>(l: L, bytes: &[u8]) {
    let mut at = 0;
    while at < bytes.len() {
        l.prefetch(bytes.as_ptr(), PREFETCH + at);
        at += 64;
    }
}
