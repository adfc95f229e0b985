//! Rows of floats that several threads write at once, in rectangles that never overlap.
//!
//! The one place that argues for disjoint writes: a [`RowsMut`] is exclusive access to a rectangle (some
//! columns of some rows), it can be split but never copied, and [`Tiles`] hands each rectangle of a grid to
//! exactly one taker. Kernels get their output only through these.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Exclusive access to a rectangle `[rows, width]` of floats whose rows lie `stride` floats apart.
///
/// What `&mut [f32]` is to a slice, this is to a rectangle.
pub struct RowsMut<'a> {
    first: *mut f32,
    rows: usize,
    width: usize,
    stride: usize,
    borrow: PhantomData<&'a mut f32>,
}

// SAFETY: exclusive access to plain floats may move to another thread, as `&mut [f32]` may.
unsafe impl Send for RowsMut<'_> {}
// SAFETY: a shared `RowsMut` gives access to no float, only to its shape.
unsafe impl Sync for RowsMut<'_> {}

impl<'a> RowsMut<'a> {
    /// The first `width` columns of `rows` rows that start `stride` floats apart in `values`.
    ///
    /// # Panics
    /// If `width` exceeds `stride` or the last row ends beyond `values`.
    pub fn new(values: &'a mut [f32], rows: usize, width: usize, stride: usize) -> Self {
        assert!(width <= stride, "rows of {width} columns overlap at a stride of {stride}");
        let end = rows.checked_sub(1).map_or(Some(0), |last| last.checked_mul(stride)?.checked_add(width));
        assert!(
            end.is_some_and(|end| end <= values.len()),
            "{rows} rows of {width} columns at a stride of {stride} do not fit in {} floats",
            values.len()
        );
        RowsMut { first: values.as_mut_ptr(), rows, width, stride, borrow: PhantomData }
    }

    /// The rectangle of `rows` rows of `width` floats that start `stride` floats apart from `first` on.
    ///
    /// # Safety
    /// All its floats are allocated and initialised, and for `'a` nothing else reads or writes them.
    pub(crate) unsafe fn from_raw(first: *mut f32, rows: usize, width: usize, stride: usize) -> Self {
        debug_assert!(width <= stride || rows <= 1);
        RowsMut { first, rows, width, stride, borrow: PhantomData }
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// How many columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Floats from the start of a row to the start of the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// One row of the rectangle.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: `new` checked that all rows lie within the borrowed slice; splitting only shrinks the
        // rectangle. `&mut self` and disjointness make the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride), self.width) }
    }

    /// The rows `first .. first + R`.
    ///
    /// # Panics
    /// If there are not so many.
    #[inline(always)]
    pub(crate) fn rows_mut<const R: usize>(&mut self, first: usize) -> [&mut [f32]; R] {
        assert!(first + R <= self.rows, "rows {first} .. {} of {}", first + R, self.rows);
        std::array::from_fn(|r| {
            // SAFETY: as in `row_mut`; the rows are different ones, and a row is never longer than the stride.
            unsafe { std::slice::from_raw_parts_mut(self.first.add((first + r) * self.stride), self.width) }
        })
    }

    /// Two different rows.
    ///
    /// # Panics
    /// If they are the same, or there are not so many.
    pub(crate) fn pair_mut(&mut self, a: usize, b: usize) -> [&mut [f32]; 2] {
        assert!(a != b && a < self.rows && b < self.rows, "rows {a} and {b} of {}", self.rows);
        [a, b].map(|row| {
            // SAFETY: as in `row_mut`; the rows are different ones, and a row is never longer than the stride.
            unsafe { std::slice::from_raw_parts_mut(self.first.add(row * self.stride), self.width) }
        })
    }

    /// The same rectangle for a shorter time.
    pub fn reborrow(&mut self) -> RowsMut<'_> {
        RowsMut { borrow: PhantomData, ..*self }
    }

    /// The columns before and from `column` on.
    ///
    /// # Panics
    /// If `column` exceeds the width.
    pub fn split_columns(self, column: usize) -> (RowsMut<'a>, RowsMut<'a>) {
        assert!(column <= self.width, "split at column {column} of {}", self.width);
        let (rows, width) = (self.rows, self.width);
        // SAFETY: `self` is consumed, and the two rectangles have no column in common.
        unsafe { (self.rectangle(0..rows, 0..column), self.rectangle(0..rows, column..width)) }
    }

    /// The rows before and from `row` on.
    ///
    /// # Panics
    /// If `row` exceeds the number of rows.
    pub fn split_rows(self, row: usize) -> (RowsMut<'a>, RowsMut<'a>) {
        assert!(row <= self.rows, "split at row {row} of {}", self.rows);
        let (rows, width) = (self.rows, self.width);
        // SAFETY: `self` is consumed, and the two rectangles have no row in common.
        unsafe { (self.rectangle(0..row, 0..width), self.rectangle(row..rows, 0..width)) }
    }

    /// A part of the rectangle.
    ///
    /// # Safety
    /// The ranges lie within the rectangle, and no other live `RowsMut` covers any part of it.
    unsafe fn rectangle(&self, rows: Range<usize>, columns: Range<usize>) -> RowsMut<'a> {
        debug_assert!(rows.end <= self.rows && columns.end <= self.width);
        // An empty rectangle has no first float that must exist.
        let offset = if rows.is_empty() { 0 } else { rows.start * self.stride + columns.start };
        RowsMut {
            // SAFETY: the caller's ranges lie within the rectangle, so this is in the borrowed slice or at
            // its end.
            first: unsafe { self.first.add(offset) },
            rows: rows.len(),
            width: columns.len(),
            stride: self.stride,
            borrow: PhantomData,
        }
    }
}

impl fmt::Debug for RowsMut<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowsMut")
            .field("rows", &self.rows)
            .field("width", &self.width)
            .field("stride", &self.stride)
            .finish()
    }
}

/// A rectangle cut into a grid of tiles, each handed out once, to whichever thread asks first.
///
/// Who computes a tile decides nothing about its values, so threads may take tiles in any order.
#[derive(Debug)]
pub struct Tiles<'a> {
    whole: RowsMut<'a>,
    tile_rows: usize,
    tile_width: usize,
    taken: AtomicUsize,
}

/// One tile: where it lies in the whole, and access to it.
#[derive(Debug)]
pub struct Tile<'a> {
    /// The rows of the whole that it covers.
    pub rows: Range<usize>,
    /// The columns of the whole that it covers.
    pub columns: Range<usize>,
    /// Its floats, `[rows.len(), columns.len()]`.
    pub out: RowsMut<'a>,
}

impl<'a> Tiles<'a> {
    /// Tiles of `tile_rows` rows and `tile_width` columns; those at the end may be smaller.
    ///
    /// # Panics
    /// If a tile would be empty.
    pub fn new(whole: RowsMut<'a>, tile_rows: usize, tile_width: usize) -> Self {
        assert!(tile_rows > 0 && tile_width > 0, "tiles of {tile_rows} × {tile_width}");
        Tiles { whole, tile_rows, tile_width, taken: AtomicUsize::new(0) }
    }

    /// How many tiles there are in all.
    pub fn count(&self) -> usize {
        self.whole.rows.div_ceil(self.tile_rows) * self.across()
    }

    /// The next tile, or `None` when all are taken. Tiles of the same columns follow each other.
    pub fn take(&self) -> Option<Tile<'a>> {
        let count = self.count();
        let next = |taken| (taken < count).then_some(taken + 1);
        let index = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        let down = self.whole.rows.div_ceil(self.tile_rows);
        let (row, column) = (index % down * self.tile_rows, index / down * self.tile_width);
        let rows = row..(row + self.tile_rows).min(self.whole.rows);
        let columns = column..(column + self.tile_width).min(self.whole.width);
        // SAFETY: within the whole by the two `min`s. The counter gives each index to one caller, tiles of
        // different indices are disjoint, and the whole is never handed out itself.
        let out = unsafe { self.whole.rectangle(rows.clone(), columns.clone()) };
        Some(Tile { rows, columns, out })
    }

    fn across(&self) -> usize {
        self.whole.width.div_ceil(self.tile_width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_fill_every_float_of_the_rectangle_once_and_none_beside_it() {
        let (rows, width, stride) = (7, 37, 40);
        let mut values = vec![-1.0; rows * stride];
        let tiles = Tiles::new(RowsMut::new(&mut values, rows, width, stride), 3, 16);
        assert_eq!(tiles.count(), 9);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some(mut tile) = tiles.take() {
                        for (r, row) in tile.rows.clone().enumerate() {
                            for (value, column) in tile.out.row_mut(r).iter_mut().zip(tile.columns.clone()) {
                                assert_eq!(*value, -1.0, "written twice");
                                *value = (row * 100 + column) as f32;
                            }
                        }
                    }
                });
            }
        });
        assert!(tiles.take().is_none());
        for (i, &value) in values.iter().enumerate() {
            let (row, column) = (i / stride, i % stride);
            let expected = if column < width { (row * 100 + column) as f32 } else { -1.0 };
            assert_eq!(value, expected, "row {row} column {column}");
        }
    }

    #[test]
    fn splits_are_disjoint_and_complete() {
        let mut values = vec![0.0; 12];
        let all = RowsMut::new(&mut values, 3, 4, 4);
        let (mut left, right) = all.split_columns(1);
        let (mut top, mut bottom) = right.split_rows(2);
        left.row_mut(2)[0] = 1.0;
        top.row_mut(1).fill(2.0);
        bottom.row_mut(0).fill(3.0);
        assert_eq!(values, [0., 0., 0., 0., 0., 2., 2., 2., 1., 3., 3., 3.]);
    }

    #[test]
    #[should_panic(expected = "do not fit")]
    fn a_rectangle_larger_than_its_floats_is_refused() {
        RowsMut::new(&mut [0.0; 11], 3, 4, 4);
    }

    #[test]
    fn the_last_row_may_end_before_its_stride() {
        assert_eq!(RowsMut::new(&mut [0.0; 11], 3, 3, 4).row_mut(2).len(), 3);
        assert_eq!(RowsMut::new(&mut [], 0, 3, 4).rows(), 0);
    }
}
