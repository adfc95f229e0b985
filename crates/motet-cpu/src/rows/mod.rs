//! Operations on rows that are not matrix products: norms, rotations, activations, recurrences, routing.
//!
//! Each is a safe function that takes an [`Isa`](crate::isa::Isa) and slices, checks their shapes (a wrong one is a defect of
//! the caller and panics), allocates nothing and touches nothing else. The order of its floating-point
//! operations, and every place where it rounds, is in its documentation; it depends on no other row. Most take one
//! row, so a caller splits rows between threads as it likes; [`Heads`] narrows a row to some of its heads.

pub mod convolution;
pub mod elementwise;
pub mod experts;
pub mod gated_delta;
pub mod norm;
pub mod rope;

use std::ops::Range;

use crate::lanes::Lanes;

/// Where equally long heads lie in a row: head h is `row[base + h * stride..][..dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Where the first head starts.
    pub base: usize,
    /// How many heads.
    pub count: usize,
    /// From the start of a head to the start of the next.
    pub stride: usize,
    /// How long a head is.
    pub dim: usize,
}

impl Heads {
    /// A row that is one head.
    pub fn whole(dim: usize) -> Heads {
        Heads { base: 0, count: 1, stride: dim, dim }
    }

    /// Heads one behind the other from the start of the row.
    pub fn packed(count: usize, dim: usize) -> Heads {
        Heads { base: 0, count, stride: dim, dim }
    }

    /// Only these heads.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn only(self, heads: Range<usize>) -> Heads {
        assert!(heads.start <= heads.end && heads.end <= self.count, "heads {heads:?} of {}", self.count);
        Heads { base: self.base + heads.start * self.stride, count: heads.len(), ..self }
    }

    /// The elements of a head.
    #[inline(always)]
    fn range(self, head: usize) -> Range<usize> {
        let start = self.base + head * self.stride;
        start..start + self.dim
    }

    /// Panics unless the heads are apart and lie in a row of this length.
    #[inline(always)]
    fn check(self, row_len: usize) {
        assert!(self.dim <= self.stride || self.count <= 1, "heads overlap: {self:?}");
        let end = if self.count == 0 { 0 } else { self.range(self.count - 1).end };
        assert!(end <= row_len, "{self:?} does not fit in a row of {row_len}");
    }
}

/// Rows to read: row r is `values[r * stride..][..width]`.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    values: &'a [f32],
    count: usize,
    width: usize,
    stride: usize,
}

impl<'a> Rows<'a> {
    /// The first `width` columns of `count` rows that start `stride` floats apart. Columns further right: slice `values` first.
    ///
    /// # Panics
    /// If the last row ends beyond `values`.
    pub fn new(values: &'a [f32], count: usize, width: usize, stride: usize) -> Rows<'a> {
        let end = if count == 0 { 0 } else { (count - 1) * stride + width };
        assert!(
            end <= values.len(),
            "{count} rows of {width} columns at a stride of {stride} do not fit in {} floats",
            values.len()
        );
        Rows { values, count, width, stride }
    }

    /// How many rows.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The rows before and from `row` on.
    ///
    /// # Panics
    /// If there are not so many.
    pub fn split(self, row: usize) -> (Rows<'a>, Rows<'a>) {
        assert!(row <= self.count, "split at row {row} of {}", self.count);
        let behind = &self.values[(row * self.stride).min(self.values.len())..];
        (Rows { count: row, ..self }, Rows { values: behind, count: self.count - row, ..self })
    }

    /// One row.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline(always)]
    pub fn row(&self, row: usize) -> &'a [f32] {
        assert!(row < self.count, "row {row} of {}", self.count);
        &self.values[row * self.stride..][..self.width]
    }
}

/// Up to 16 elements into lanes, +0 in the others.
#[inline(always)]
fn load<L: Lanes>(l: L, x: &[f32]) -> L::F {
    match x.try_into() {
        Ok(all) => l.load(all),
        Err(_) => l.load_tail(x, 0.0),
    }
}

/// As many lanes as there are elements (up to 16).
#[inline(always)]
fn store<L: Lanes>(l: L, v: L::F, x: &mut [f32]) {
    match x.try_into() {
        Ok(all) => l.store(v, all),
        Err(_) => l.store_tail(v, x),
    }
}
