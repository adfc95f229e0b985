//! The row buffers of a stage: one stretch of memory, laid out by lifetime, and views of its columns.
//!
//! Buffers of one operation never share bytes (the layout gives buffers that live at the same time different columns),
//! and this module checks it again for every pair of views that it hands out together.

use std::marker::PhantomData;

use motet_model::program::{BufferId, Cols, RESIDUAL};

use crate::matmul;
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

    /// Columns, as input of a product with float weights.
    pub(crate) fn product_input(&self, cols: Cols) -> matmul::Rows<'_> {
        let stride = self.stride(cols.buffer);
        matmul::Rows::float(self.tail_from(cols.buffer, cols.at), self.rows, cols.width, stride)
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

    /// One row of a buffer.
    pub(crate) fn row(&self, id: BufferId, row: usize) -> &[f32] {
        let stride = self.stride(id);
        &self.tail_from(id, 0)[row * stride..][..stride]
    }

    /// Floats from a row of the buffer to the next.
    pub(crate) fn stride(&self, id: BufferId) -> usize {
        self.buffers.stride(id)
    }
}
