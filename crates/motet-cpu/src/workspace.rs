//! The row buffers of a stage: one stretch of memory, laid out by lifetime, and views of its columns.
//!
//! Buffers of one operation never share bytes (the layout gives buffers that live at the same time different columns),
//! and this module checks it again for every pair of views that it hands out together.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

use motet_model::program::{BufferId, Cols, RESIDUAL};

use crate::activations::ActivationBlock;
use crate::rows::Rows;
use crate::shared_rows::RowsMut;

/// Where a buffer lies for the current capacity: `[capacity, width]` floats from `at` on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) at: usize,
    pub(crate) width: usize,
}

/// The row buffers during one run over `rows` rows.
#[derive(Debug)]
pub(crate) struct Buffers<'a> {
    residual: *mut f32,
    floats: *mut f32,
    places: &'a [Option<Place>],
    d_model: usize,
    rows: usize,
    borrow: PhantomData<&'a mut [f32]>,
}

impl<'a> Buffers<'a> {
    /// Buffers for `rows` rows: `residual` is `[rows, d_model]`, the others lie in `floats`.
    ///
    /// # Panics
    /// If a place ends beyond `floats`, or `residual` is too short.
    pub(crate) fn new(
        residual: &'a mut [f32],
        d_model: usize,
        floats: &'a mut [f32],
        places: &'a [Option<Place>],
        rows: usize,
    ) -> Self {
        assert!(rows * d_model <= residual.len(), "{rows} rows in a hand-off of {} floats", residual.len());
        for place in places.iter().flatten() {
            assert!(
                place.at + rows * place.width <= floats.len(),
                "{rows} rows at {place:?} of {}",
                floats.len()
            );
        }
        let (residual, floats) = (residual.as_mut_ptr(), floats.as_mut_ptr());
        Self { residual, floats, places, d_model, rows, borrow: PhantomData }
    }

    /// The number of rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Start and row length of a buffer.
    fn buffer(&self, id: BufferId) -> (*mut f32, usize) {
        if id == RESIDUAL {
            return (self.residual, self.d_model);
        }
        let place = self.places[id.0].expect("an operation of this stage touches the buffer");
        // SAFETY: `new` checked that the place lies within the floats.
        (unsafe { self.floats.add(place.at) }, place.width)
    }

    /// Floats from a row of the buffer to the next.
    pub(crate) fn stride(&self, id: BufferId) -> usize {
        self.buffer(id).1
    }

    /// The whole buffer, to read. Nothing may be written to it meanwhile: `&self`.
    pub(crate) fn floats(&self, id: BufferId) -> &[f32] {
        let (start, width) = self.buffer(id);
        // SAFETY: `new` checked the extent; `&self` keeps writers away, which take `&mut self`.
        unsafe { std::slice::from_raw_parts(start, self.rows * width) }
    }

    /// The rows of a buffer from its column `at` on, to read.
    pub(crate) fn tail_from(&self, id: BufferId, at: usize) -> &[f32] {
        &self.floats(id)[at.min(self.rows * self.stride(id))..]
    }

    /// Columns, to read.
    pub(crate) fn read(&self, cols: Cols) -> Rows<'_> {
        Rows::new(self.tail_from(cols.buffer, cols.at), self.rows, cols.width, self.stride(cols.buffer))
    }

    /// All columns of a buffer, to write.
    pub(crate) fn write(&mut self, id: BufferId) -> RowsMut<'_> {
        let (start, width) = self.buffer(id);
        // SAFETY: `new` checked the extent; `&mut self` makes the access exclusive.
        let floats = unsafe { std::slice::from_raw_parts_mut(start, self.rows * width) };
        RowsMut::new(floats, self.rows, width, width)
    }

    /// One buffer to write and, beside it, others to read: the reader panics for the buffer that is written.
    pub(crate) fn write_beside(&mut self, id: BufferId) -> (RowsMut<'_>, Others<'_, 'a>) {
        let (start, width) = self.buffer(id);
        // SAFETY: `new` checked the extent. `&mut self` keeps others away; `Others` hands out no buffer that
        // overlaps this one.
        let floats = unsafe { std::slice::from_raw_parts_mut(start, self.rows * width) };
        (RowsMut::new(floats, self.rows, width, width), Others { buffers: self, written: id })
    }

    /// Columns of one or several buffers to write, beside others to read.
    ///
    /// # Panics
    /// If two of them overlap.
    pub(crate) fn write_columns<const N: usize>(
        &mut self,
        cols: &[Cols],
        read: BufferId,
    ) -> ([Option<RowsMut<'_>>; N], &[f32]) {
        assert!(cols.len() <= N, "{} outputs at once", cols.len());
        let mut out = [const { None }; N];
        for (i, c) in cols.iter().enumerate() {
            let apart = |o: &Cols| {
                self.apart(c.buffer, o.buffer)
                    || (c.buffer == o.buffer && (c.at + c.width <= o.at || o.at + o.width <= c.at))
            };
            assert!(
                cols[..i].iter().all(apart) && self.apart(c.buffer, read),
                "outputs overlap: {cols:?}, {read:?}"
            );
            let (start, stride) = self.buffer(c.buffer);
            assert!(c.at + c.width <= stride, "columns {c:?} of a buffer of {stride}");
            // SAFETY: the columns lie within the buffer, whose extent `new` checked; the assertion above makes the
            // rectangles disjoint from each other and from what is read, and `&mut self` keeps everyone else away.
            out[i] = Some(unsafe { RowsMut::from_raw(start.add(c.at), self.rows, c.width, stride) });
        }
        let (start, width) = self.buffer(read);
        // SAFETY: as above: no output overlaps this buffer.
        (out, unsafe { std::slice::from_raw_parts(start, self.rows * width) })
    }

    /// The rows of some buffers, `count` at a time, for threads that work on different rows at the same time; and with
    /// each row its part of `quantised`, the same number of blocks for all.
    ///
    /// # Panics
    /// If two of the buffers overlap, or the blocks don't divide evenly.
    pub(crate) fn by_rows<'b>(
        &'b mut self,
        touched: &'b [BufferId],
        count: usize,
        quantised: &'b mut [ActivationBlock],
    ) -> ByRows<'b, 'a> {
        for (i, &id) in touched.iter().enumerate() {
            let apart = touched[..i].iter().all(|&other| self.apart(id, other));
            assert!(apart, "buffers of one region overlap: {touched:?}");
        }
        let blocks = quantised.len() / self.rows.max(1);
        assert_eq!(blocks * self.rows, quantised.len(), "blocks of {} rows", self.rows);
        let quantised = quantised.as_mut_ptr();
        ByRows { buffers: self, touched, count, quantised, blocks, taken: AtomicUsize::new(0) }
    }

    /// Whether two buffers have no byte in common.
    fn apart(&self, a: BufferId, b: BufferId) -> bool {
        let ((a, a_width), (b, b_width)) = (self.buffer(a), self.buffer(b));
        let (a, b) = (a.addr(), b.addr());
        a + 4 * a_width * self.rows <= b || b + 4 * b_width * self.rows <= a
    }
}

/// The buffers beside one that is being written.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Others<'b, 'a> {
    buffers: &'b Buffers<'a>,
    written: BufferId,
}

// SAFETY: it only reads, and only buffers that nobody writes while it lives.
unsafe impl Sync for Others<'_, '_> {}

impl Others<'_, '_> {
    /// The rows of a buffer from its column `at` on.
    ///
    /// # Panics
    /// If the buffer overlaps the one that is written.
    pub(crate) fn tail_from(&self, id: BufferId, at: usize) -> &[f32] {
        assert!(self.buffers.apart(id, self.written), "{id:?} is being written");
        self.buffers.tail_from(id, at)
    }

    /// Floats from a row of the buffer to the next.
    pub(crate) fn stride(&self, id: BufferId) -> usize {
        self.buffers.stride(id)
    }
}

/// Hands out rows of some buffers, each once.
#[derive(Debug)]
pub(crate) struct ByRows<'b, 'a> {
    buffers: &'b Buffers<'a>,
    touched: &'b [BufferId],
    count: usize,
    quantised: *mut ActivationBlock,
    blocks: usize,
    taken: AtomicUsize,
}

// SAFETY: exclusive access to plain numbers (made from `&mut`), of which `take` gives each row to one caller.
unsafe impl Sync for ByRows<'_, '_> {}

impl<'b, 'a> ByRows<'b, 'a> {
    /// The next rows; none when all are taken.
    pub(crate) fn take(&self) -> impl Iterator<Item = Row<'_, 'b, 'a>> {
        let first = self.taken.fetch_add(self.count, Ordering::Relaxed).min(self.buffers.rows);
        let end = (first + self.count).min(self.buffers.rows);
        (first..end).map(|row| Row { of: self, row })
    }
}

/// One row of buffers that no one else has.
#[derive(Debug)]
pub(crate) struct Row<'r, 'b, 'a> {
    of: &'r ByRows<'b, 'a>,
    row: usize,
}

impl Row<'_, '_, '_> {
    /// Its number in the batch.
    pub(crate) fn number(&self) -> usize {
        self.row
    }

    /// This row of different buffers.
    ///
    /// # Panics
    /// If two of them are the same, or one is not among those that were asked for.
    pub(crate) fn parts<const N: usize>(&mut self, ids: [BufferId; N]) -> [&mut [f32]; N] {
        let ByRows { buffers, touched, .. } = self.of;
        for (i, id) in ids.iter().enumerate() {
            assert!(touched.contains(id) && !ids[..i].contains(id), "{ids:?} of {touched:?}");
        }
        ids.map(|id| {
            let (start, width) = buffers.buffer(id);
            // SAFETY: `Buffers::new` checked the extent and `by_rows` that the buffers are apart; `take` hands each row
            // out once, `&mut self` lends it once at a time, and the buffers differ from each other.
            unsafe { std::slice::from_raw_parts_mut(start.add(self.row * width), width) }
        })
    }

    /// Some columns of a buffer, and the row's quantised blocks.
    ///
    /// # Panics
    /// If the buffer is not among those that were asked for.
    pub(crate) fn beside_blocks(&mut self, cols: Cols) -> (&[f32], &mut [ActivationBlock]) {
        let (first, blocks) = (self.of.quantised, self.of.blocks);
        // SAFETY: `by_rows` checked that there are so many blocks for each row; the row is ours alone.
        let quantised = unsafe { std::slice::from_raw_parts_mut(first.add(self.row * blocks), blocks) };
        let [row] = self.parts([cols.buffer]);
        (&row[cols.at..cols.at + cols.width], quantised)
    }
}
