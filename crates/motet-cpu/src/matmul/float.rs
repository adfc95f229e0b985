//! Products of float weights with float activations.
//!
//! **Definition** (channel n, row m): acc = +0, then for k ascending acc = fma(w, x, acc), where w is the weight
//! as f32 (exact from F16 and BF16).

use std::ops::Range;

use super::Product;
use super::quads::Quads;
use crate::lanes::LANES;
use crate::shared_rows::RowsMut;

/// How far ahead of the reads the panel's stream is asked for (measured).
const PREFETCH: usize = 2048;

/// So many bytes of panels are used for all rows before the next ones: they stay in the second-level cache.
const PANELS_IN_CACHE: usize = 512 * 1024;

/// How a float weight is stored.
pub(crate) trait FloatWeights: Copy {
    /// Bytes of a weight.
    const BYTES: usize;
    /// The weights of all channels for one k.
    fn load<L: Quads>(self, l: L, bytes: &[u8]) -> L::F;
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
    const BYTES: usize = 4;
    #[inline(always)]
    fn load<L: Quads>(self, l: L, bytes: &[u8]) -> L::F {
        l.load(bytemuck::from_bytes(bytes))
    }
}

impl FloatWeights for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<L: Quads>(self, l: L, bytes: &[u8]) -> L::F {
        l.load_f16(bytemuck::from_bytes(bytes))
    }
}

impl FloatWeights for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    fn load<L: Quads>(self, l: L, bytes: &[u8]) -> L::F {
        l.load_bf16(bytemuck::from_bytes(bytes))
    }
}

#[inline(always)]
pub(super) fn multiply<L: Quads, W: FloatWeights>(
    l: L,
    weights: W,
    product: Product<'_, f32>,
    mut out: RowsMut<'_>,
) {
    // What makes the unchecked reads of the rows sound.
    assert_eq!(product.panel_bytes / (W::BYTES * LANES), product.rows.row_len());
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
    let step = const { W::BYTES * LANES };
    let mut streams = [product.panel(panel); P];
    for (p, stream) in streams.iter_mut().enumerate() {
        *stream = product.panel(panel + p);
    }
    let mut acc = [[l.splat(0.0); R]; P];
    for k in 0..product.rows.row_len() {
        for p in 0..P {
            let bytes = &streams[p][k * step..][..step];
            l.prefetch(bytes.as_ptr(), PREFETCH);
            let w = weights.load(l, bytes);
            for r in 0..R {
                // SAFETY: `multiply` checked that a row is as long as the panel.
                let x = unsafe { *rows[r].add(k) };
                acc[p][r] = l.fma(w, l.splat(x), acc[p][r]);
            }
        }
    }
    for (p, sums) in acc.into_iter().enumerate() {
        for (r, sum) in sums.into_iter().enumerate() {
            product.store(l, sum, panel + p, out.row_mut(first + r));
        }
    }
}
