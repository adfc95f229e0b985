//! Matrix products: rows of activations times packed weights, `[rows, k] × [n_out, k] → [rows, n_out]`.
//!
//! Output channels lie on lanes, and each lane adds up its own channel over K in ascending order. One row or 512
//! rows, one panel or all, on any instruction set: the same operations in the same order, so the same bits.
//! `quantised` and `float` state them. Nothing here may depend on the number of rows but time.

// Rows, panels and groups are indices into several arrays at once.
#![allow(clippy::needless_range_loop)]

mod codes;
mod float;
mod quads;
mod quantised;
mod scales;
#[cfg(test)]
mod tests;

use std::ops::Range;

use motet_gguf::Format;

use crate::activations::{ActivationBlock, BLOCK};
use crate::isa::Isa;
use crate::lanes::Lanes;
use crate::lanes::dispatch;
use crate::panels::{PANEL, PackedMatrix};
use crate::shared_rows::RowsMut;
use codes::{Codes, SignedBytes, Table, Unsigned};
use float::FloatWeights;
use scales::{Exponent, HalfScale, HalfScaleMin, Scale, ScaleMin, Scales, SubScale, SubScaleMin};

/// The values of IQ4_NL and IQ4_XS (`kvalues_iq4nl` in `ggml-common.h`).
static IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The values of E2M1, doubled (OCP Microscaling Formats 1.0, table 5); their scale is halved.
static E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Rows of activations `[rows, k]`, all of them or a selection.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// As floats, for float weights.
    Float(RowsOf<'a, f32>),
    /// Quantised, for quantised weights.
    Quantised(RowsOf<'a, ActivationBlock>),
}

/// Rows of `T`, all of them or a selection.
#[derive(Clone, Copy, Debug)]
pub struct RowsOf<'a, T> {
    values: &'a [T],
    row_len: usize,
    stride: usize,
    selection: Option<&'a [u32]>,
    len: usize,
}

impl<'a> Rows<'a> {
    /// Rows of `k` floats that start `stride` floats apart.
    ///
    /// # Panics
    /// If `values` ends within the last row.
    pub fn float(values: &'a [f32], rows: usize, k: usize, stride: usize) -> Self {
        Rows::Float(RowsOf::new(values, rows, k, stride))
    }

    /// Quantised rows of `k` values, one after the other.
    ///
    /// # Panics
    /// If `k` is no multiple of 32 or `blocks` is not `rows · k / 32` long.
    pub fn quantised(blocks: &'a [ActivationBlock], rows: usize, k: usize) -> Self {
        assert!(k.is_multiple_of(BLOCK), "quantised rows of {k} values");
        assert_eq!(blocks.len(), rows * (k / BLOCK), "blocks of {rows} rows of {k} values");
        Rows::Quantised(RowsOf::new(blocks, rows, k / BLOCK, k / BLOCK))
    }

    /// The rows with these numbers, in this order: row i of the product belongs to row `selection[i]`.
    ///
    /// # Panics
    /// If there is no such row, or if this is a selection already.
    pub fn select(self, selection: &'a [u32]) -> Self {
        match self {
            Rows::Float(rows) => Rows::Float(rows.select(selection)),
            Rows::Quantised(rows) => Rows::Quantised(rows.select(selection)),
        }
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        match self {
            Rows::Float(rows) => rows.len,
            Rows::Quantised(rows) => rows.len,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Values of a row.
    pub fn k(&self) -> usize {
        match self {
            Rows::Float(rows) => rows.row_len,
            Rows::Quantised(rows) => rows.row_len * BLOCK,
        }
    }
}

impl<'a, T> RowsOf<'a, T> {
    fn new(values: &'a [T], len: usize, row_len: usize, stride: usize) -> Self {
        let end = len.checked_sub(1).map_or(Some(0), |last| last.checked_mul(stride)?.checked_add(row_len));
        assert!(
            end.is_some_and(|end| end <= values.len()),
            "{len} rows of {row_len} at a stride of {stride} do not fit in {}",
            values.len()
        );
        RowsOf { values, row_len, stride, selection: None, len }
    }

    fn select(self, selection: &'a [u32]) -> Self {
        assert!(self.selection.is_none(), "a selection of a selection");
        for &row in selection {
            assert!((row as usize) < self.len, "row {row} of {}", self.len);
        }
        RowsOf { selection: Some(selection), len: selection.len(), ..self }
    }

    fn len(&self) -> usize {
        self.len
    }

    fn row_len(&self) -> usize {
        self.row_len
    }

    /// Where the rows `first .. first + R` begin; each has `row_len` values there.
    #[inline(always)]
    fn pointers<const R: usize>(&self, first: usize) -> [*const T; R] {
        let mut pointers = [self.values.as_ptr(); R];
        for (r, pointer) in pointers.iter_mut().enumerate() {
            let row = self.selection.map_or(first + r, |selection| selection[first + r] as usize);
            *pointer = self.values[row * self.stride..][..self.row_len].as_ptr();
        }
        pointers
    }
}

/// What a kernel works on: some panels of a matrix and all rows.
#[derive(Clone, Copy)]
struct Product<'a, T> {
    /// The panels, one after the other.
    panels: &'a [u8],
    panel_bytes: usize,
    rows: RowsOf<'a, T>,
}

impl<'a, T> Product<'a, T> {
    /// Runs of panels that take about so many bytes each.
    fn groups(&self, bytes: usize) -> impl Iterator<Item = Range<usize>> + use<T> {
        let count = self.panels.len() / self.panel_bytes;
        let size = (bytes / self.panel_bytes).max(4);
        (0..count).step_by(size).map(move |first| first..(first + size).min(count))
    }

    #[inline(always)]
    fn panel(&self, panel: usize) -> &'a [u8] {
        &self.panels[panel * self.panel_bytes..][..self.panel_bytes]
    }

    /// The sums of a panel's channels into a row; lanes without a channel are dropped.
    #[inline(always)]
    fn store<L: Lanes>(&self, l: L, sums: L::F, panel: usize, row: &mut [f32]) {
        let row = &mut row[panel * PANEL..];
        match row.first_chunk_mut::<PANEL>() {
            Some(lanes) => l.store(sums, lanes),
            None => l.store_tail(sums, row),
        }
    }
}

dispatch! {
    fn multiply_quantised<C: Codes, S: Scales>(
        codes: C, scales: S, product: Product<'_, ActivationBlock>, out: RowsMut<'_>,
    ) = quantised::multiply;
}

dispatch! {
    fn multiply_float<W: FloatWeights>(weights: W, product: Product<'_, f32>, out: RowsMut<'_>) = float::multiply;
}

impl PackedMatrix {
    /// Multiplies the channels of the panels `panels` with all rows: `out[m][n] = Σ w[channel n][k] · x[m][k]`,
    /// where n counts from the first channel of these panels.
    ///
    /// # Panics
    /// If the rows are not of the kind and length that the weights take, if `out` is not
    /// `[rows, channels of the panels]`, or if the instruction set is not available.
    pub fn multiply(&self, isa: Isa, panels: Range<usize>, x: Rows<'_>, out: RowsMut<'_>) {
        let shape = self.shape();
        assert!(
            panels.start <= panels.end && panels.end <= shape.panel_count(),
            "no panels {panels:?} in {shape:?}"
        );
        assert_eq!(x.k(), shape.k(), "length of the rows for {shape:?}");
        assert_eq!(out.rows(), x.len(), "rows of the output");
        assert_eq!(
            out.width(),
            shape.channels(panels.clone()).len(),
            "columns for panels {panels:?} of {shape:?}"
        );
        let (panels, panel_bytes) = (self.panels(panels), shape.panel_bytes());
        match x {
            Rows::Float(rows) => {
                let product = Product { panels, panel_bytes, rows };
                match shape.format() {
                    Format::F32 => multiply_float(isa, float::F32, product, out),
                    Format::F16 => multiply_float(isa, float::F16, product, out),
                    Format::BF16 => multiply_float(isa, float::BF16, product, out),
                    format => panic!("{format} weights take quantised rows"),
                }
            }
            Rows::Quantised(rows) => {
                let p = Product { panels, panel_bytes, rows };
                match shape.format() {
                    Format::Q4_0 => multiply_quantised(isa, Unsigned::<4, 8>, Scale, p, out),
                    Format::Q4_1 => multiply_quantised(isa, Unsigned::<4, 0>, ScaleMin, p, out),
                    Format::Q5_0 => multiply_quantised(isa, Unsigned::<5, 16>, Scale, p, out),
                    Format::Q5_1 => multiply_quantised(isa, Unsigned::<5, 0>, ScaleMin, p, out),
                    Format::Q8_0 => multiply_quantised(isa, SignedBytes, Scale, p, out),
                    Format::Q2K => multiply_quantised(isa, Unsigned::<2, 0>, HalfScaleMin, p, out),
                    Format::Q3K => multiply_quantised(isa, Unsigned::<3, 4>, HalfScale, p, out),
                    Format::Q4K => multiply_quantised(isa, Unsigned::<4, 0>, SubScaleMin, p, out),
                    Format::Q5K => multiply_quantised(isa, Unsigned::<5, 0>, SubScaleMin, p, out),
                    Format::Q6K => multiply_quantised(isa, Unsigned::<6, 32>, HalfScale, p, out),
                    Format::IQ4NL => multiply_quantised(isa, Table(&IQ4_VALUES), Scale, p, out),
                    Format::IQ4XS => multiply_quantised(isa, Table(&IQ4_VALUES), SubScale, p, out),
                    Format::MXFP4 => multiply_quantised(isa, Table(&E2M1_DOUBLED), Exponent, p, out),
                    format => panic!("{format} weights take float rows"),
                }
            }
        }
    }
}
