//! Rows of floats that several threads write at once, in rectangles that never overlap.
//!
//! The one place that argues for disjoint writes: a [`RowsMut`] is exclusive access to a rectangle (some
//! columns of some rows), it can be split but never copied, and [`Tiles`] hands each rectangle of a grid to
//! exactly one taker. Kernels get their output only through these.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

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

/// Rectangles of the same rows, cut into tiles of some columns, each handed out once.
///
/// Each worker has a run of neighbouring tiles, so that it reads one stretch of memory from front to back; one that has
/// finished its own takes from the back of another's. Who computes a tile decides nothing about its values.
#[derive(Debug)]
pub struct Tiles<'a, const N: usize = 1> {
    wholes: [Option<RowsMut<'a>>; N],
    tile_width: usize,
    count: usize,
    /// The tiles that are left of each worker's run.
    runs: [Run; RUNS],
    workers: usize,
}

/// Workers that have a run of their own; more than so many share them.
const RUNS: usize = 16;

/// One tile: where it lies, and access to it.
#[derive(Debug)]
pub struct Tile<'a> {
    /// Which of the rectangles it belongs to.
    pub part: usize,
    /// The columns of the rectangle that it covers.
    pub columns: Range<usize>,
    /// Its floats, `[rows, columns.len()]`.
    pub out: RowsMut<'a>,
}

impl<'a, const N: usize> Tiles<'a, N> {
    /// Tiles of `tile_width` columns for so many workers; the last one of a rectangle may be smaller.
    ///
    /// # Panics
    /// If a tile would be empty, or there are no workers.
    pub fn new(wholes: [Option<RowsMut<'a>>; N], tile_width: usize, workers: usize) -> Self {
        assert!(tile_width > 0 && workers > 0, "tiles of {tile_width} columns for {workers} workers");
        let count = wholes.iter().flatten().map(|w| w.width.div_ceil(tile_width)).sum();
        let workers = workers.min(RUNS);
        let border = |run: usize| count * run.min(workers) / workers;
        let runs = std::array::from_fn(|run| Run::new(border(run)..border(run + 1)));
        Tiles { wholes, tile_width, count, runs, workers }
    }

    /// How many tiles there are in all.
    pub fn count(&self) -> usize {
        self.count
    }

    /// A tile for this worker, or `None` when all are taken.
    pub fn take(&self, worker: usize) -> Option<Tile<'a>> {
        let own = worker % self.workers;
        let others = (1..self.workers).map(|i| (own + i) % self.workers);
        let mut index =
            self.runs[own].first().or_else(|| others.into_iter().find_map(|run| self.runs[run].last()))?;
        let mut part = 0;
        let whole = loop {
            if let Some(whole) = &self.wholes[part] {
                let across = whole.width.div_ceil(self.tile_width);
                if index < across {
                    break whole;
                }
                index -= across;
            }
            part += 1;
        };
        let first = index * self.tile_width;
        let columns = first..(first + self.tile_width).min(whole.width);
        // SAFETY: within the whole by the `min`. The runs are disjoint and give each index to one caller, tiles of
        // different indices are disjoint, and the whole is never handed out itself.
        let out = unsafe { whole.rectangle(0..whole.rows, columns.clone()) };
        Some(Tile { part, columns, out })
    }
}

/// Numbers that are handed out from both ends, each once. On a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct Run(AtomicU64);

impl Run {
    fn new(range: Range<usize>) -> Self {
        Run(AtomicU64::new(pack(range.start as u32, range.end as u32)))
    }

    /// The least number that is left.
    fn first(&self) -> Option<usize> {
        self.shrink(|start, end| (start + 1, end)).map(|(start, _)| start as usize)
    }

    /// The greatest number that is left.
    fn last(&self) -> Option<usize> {
        self.shrink(|start, end| (start, end - 1)).map(|(_, end)| end as usize - 1)
    }

    /// Shrinks a range that is not empty and returns what it was.
    fn shrink(&self, shrunk: impl Fn(u32, u32) -> (u32, u32)) -> Option<(u32, u32)> {
        let update = |packed| {
            let (start, end) = unpack(packed);
            (start < end).then(|| {
                let (start, end) = shrunk(start, end);
                pack(start, end)
            })
        };
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, update).ok().map(unpack)
    }
}

fn pack(start: u32, end: u32) -> u64 {
    u64::from(start) << 32 | u64::from(end)
}

fn unpack(packed: u64) -> (u32, u32) {
    ((packed >> 32) as u32, packed as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_fill_every_float_of_the_rectangles_once_and_none_beside_them() {
        let (rows, width, stride) = (7, 37, 40);
        let mut values = [vec![-1.0; rows * stride], vec![-1.0; rows * stride]];
        let [a, b] = &mut values;
        let wholes = [Some(RowsMut::new(a, rows, width, stride)), Some(RowsMut::new(b, rows, width, stride))];
        let tiles = Tiles::new(wholes, 4, 3);
        assert_eq!(tiles.count(), 20);
        std::thread::scope(|scope| {
            // One worker never comes: the others take its run.
            for worker in [0, 2] {
                let tiles = &tiles;
                scope.spawn(move || {
                    while let Some(mut tile) = tiles.take(worker) {
                        for row in 0..rows {
                            for (value, column) in tile.out.row_mut(row).iter_mut().zip(tile.columns.clone())
                            {
                                assert_eq!(*value, -1.0, "written twice");
                                *value = (1000 * tile.part + row * 100 + column) as f32;
                            }
                        }
                    }
                });
            }
        });
        assert!((0..3).all(|worker| tiles.take(worker).is_none()));
        for (part, values) in values.iter().enumerate() {
            for (i, &value) in values.iter().enumerate() {
                let (row, column) = (i / stride, i % stride);
                let expected = if column < width { (1000 * part + row * 100 + column) as f32 } else { -1.0 };
                assert_eq!(value, expected, "part {part} row {row} column {column}");
            }
        }
    }

    #[test]
    fn a_worker_takes_its_own_run_from_front_to_back_and_then_others_from_the_back() {
        let mut values = vec![0.0; 8];
        let tiles = Tiles::new([Some(RowsMut::new(&mut values, 1, 8, 8))], 1, 2);
        let take = |worker| tiles.take(worker).map(|t| t.columns.start);
        assert_eq!([take(1), take(0), take(1), take(1), take(1)], [4, 0, 5, 6, 7].map(Some));
        assert_eq!([take(1), take(0), take(1), take(0)], [Some(3), Some(1), Some(2), None]);
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
