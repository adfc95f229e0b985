//! Products of float weights with float activations.
//!
//! **Definition** (channel n, row m): acc = +0, then for k ascending acc = fma(w, x, acc), where w is the weight
//! as f32 (exact from F16 and BF16).

use std::ops::Range;

use bytemuck::Pod;

use super::Product;
use super::quads::Quads;
use crate::lanes::{LANES, Lanes};
use crate::shared_rows::RowsMut;

/// How far ahead of the reads the panel's stream is asked for (measured).
const PREFETCH: usize = 2048;

/// So many bytes of panels are used for all rows before the next ones: they stay in the second-level cache.
const PANELS_IN_CACHE: usize = 512 * 1024;

/// How a float weight is stored.
pub(crate) trait FloatWeights: Copy {
    /// Its bits.
    type Bits: Pod;
    /// The weights of all channels for one k.
    fn load<L: Lanes>(self, l: L, bits: &[Self::Bits; LANES]) -> L::F;
}

/// IEEE single precision.
#[derive(Clone, Copy)]
pub(crate) struct F32;
/// IEEE half precision.
#[derive(Clone, Copy)]
pub(crate) struct F16;
/// The upper half of an F32.
#[derive(Clone, Copy)]
pub(crate) struct BF16;

impl FloatWeights for F32 {
    type Bits = f32;
    #[inline(always)]
    fn load<L: Lanes>(self, l: L, bits: &[f32; LANES]) -> L::F {
        l.load(bits)
    }
}

impl FloatWeights for F16 {
    type Bits = u16;
    #[inline(always)]
    fn load<L: Lanes>(self, l: L, bits: &[u16; LANES]) -> L::F {
        l.load_f16(bits)
    }
}

impl FloatWeights for BF16 {
    type Bits = u16;
    #[inline(always)]
    fn load<L: Lanes>(self, l: L, bits: &[u16; LANES]) -> L::F {
        l.load_bf16(bits)
    }
}

#[inline(always)]
pub(super) fn multiply<L: Quads, W: FloatWeights>(
    l: L,
    weights: W,
    product: Product<'_, f32>,
    mut out: RowsMut<'_>,
) {
    for group in product.groups(PANELS_IN_CACHE) {
        let mut first = 0;
        while first < product.rows.len() {
            let left = product.rows.len() - first;
            let group = group.clone();
            first += match left {
                8.. if L::ROWS >= 8 => tile::<L, W, 8, 2>(l, weights, &product, group, first, &mut out),
                4.. if L::ROWS >= 8 => tile::<L, W, 4, 4>(l, weights, &product, group, first, &mut out),
                4.. if L::ROWS >= 4 => tile::<L, W, 4, 1>(l, weights, &product, group, first, &mut out),
                2.. if L::ROWS >= 8 => tile::<L, W, 2, 4>(l, weights, &product, group, first, &mut out),
                2.. if L::ROWS >= 4 => tile::<L, W, 2, 2>(l, weights, &product, group, first, &mut out),
                _ if L::ROWS >= 4 => tile::<L, W, 1, 4>(l, weights, &product, group, first, &mut out),
                _ => tile::<L, W, 1, 1>(l, weights, &product, group, first, &mut out),
            };
        }
    }
}

/// R rows from `first` on, times some panels, P at once. Returns R.
#[inline(always)]
fn tile<L: Quads, W: FloatWeights, const R: usize, const P: usize>(
    l: L,
    weights: W,
    product: &Product<'_, f32>,
    panels: Range<usize>,
    first: usize,
    out: &mut RowsMut<'_>,
) -> usize {
    let rows = product.rows.pointers::<R>(first);
    let mut panel = panels.start;
    while panel < panels.end {
        if panels.end - panel >= P {
            panels_times_rows::<L, W, R, P>(l, weights, product, panel, rows, first, out);
            panel += P;
        } else {
            panels_times_rows::<L, W, R, 1>(l, weights, product, panel, rows, first, out);
            panel += 1;
        }
    }
    R
}

/// P panels from `panel` on, times R rows: the definition.
#[inline(always)]
fn panels_times_rows<L: Quads, W: FloatWeights, const R: usize, const P: usize>(
    l: L,
    weights: W,
    product: &Product<'_, f32>,
    panel: usize,
    rows: [*const f32; R],
    first: usize,
    out: &mut RowsMut<'_>,
) {
    let k = product.rows.row_len();
    let mut streams = [std::ptr::null::<[W::Bits; LANES]>(); P];
    for (p, stream) in streams.iter_mut().enumerate() {
        let (lanes, rest) = bytemuck::cast_slice(product.panel(panel + p)).as_chunks();
        assert!(lanes.len() == k && rest.is_empty(), "a panel is as long as a row");
        *stream = lanes.as_ptr();
    }
    let mut acc = [[l.splat(0.0); R]; P];
    for k in 0..k {
        let mut x = [l.splat(0.0); R];
        for r in 0..R {
            // SAFETY: rows have k values.
            x[r] = l.splat(unsafe { *rows[r].add(k) });
        }
        for p in 0..P {
            // SAFETY: the panel is as long as a row, as asserted above.
            let bits = unsafe { &*streams[p].add(k) };
            l.prefetch(bits.as_ptr().cast(), PREFETCH);
            let w = weights.load(l, bits);
            for r in 0..R {
                acc[p][r] = l.fma(w, x[r], acc[p][r]);
            }
        }
    }
    for (p, sums) in acc.into_iter().enumerate() {
        for (r, sum) in sums.into_iter().enumerate() {
            product.store(l, sum, panel + p, out.row_mut(first + r));
        }
    }
}
