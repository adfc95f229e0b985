//! A rectangle of a row buffer of which tasks take parts of different sessions, heads or channels.

use crate::shared_rows::RowsMut;

/// A rectangle of which tasks take disjoint parts.
pub(super) struct Shared<'a> {
    first: *mut f32,
    rows: usize,
    width: usize,
    stride: usize,
    borrow: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: exclusive access to plain floats, of which `part`'s callers take disjoint parts.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(super) fn new(mut rows: RowsMut<'a>) -> Self {
        let (count, width) = (rows.rows(), rows.width());
        let first = if count == 0 { std::ptr::null_mut() } else { rows.row_mut(0).as_mut_ptr() };
        Shared { first, rows: count, width, stride: rows.stride(), borrow: std::marker::PhantomData }
    }

    /// `width` columns from `column` on, of some rows.
    ///
    /// # Safety
    /// No other part that is alive has a float in common with this one.
    pub(super) unsafe fn part(
        &self,
        rows: std::ops::Range<usize>,
        column: usize,
        width: usize,
    ) -> RowsMut<'_> {
        assert!(
            rows.start < rows.end && rows.end <= self.rows && column + width <= self.width,
            "{rows:?} {column}"
        );
        // SAFETY: within the rectangle by the assertion; disjoint from other parts by the caller's promise.
        unsafe {
            RowsMut::from_raw(
                self.first.add(rows.start * self.stride + column),
                rows.len(),
                width,
                self.stride,
            )
        }
    }
}
