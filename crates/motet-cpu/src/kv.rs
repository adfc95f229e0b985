//! Keys and values of past rows: their formats, how a page is laid out, how rows are written into it.
//!
//! A page holds [`PAGE_POSITIONS`] positions; for each layer that shares it, a K part and a V part, and in each
//! one **tile** per KV head:
//!
//! ```text
//! K tile  [head_dim_k][64 positions]           a score sums over head_dim in each position's lane
//! V tile  [64 positions][head_dim_v, padded]   an output sums over positions in each channel's lane
//! ```
//!
//! `head_dim_v` is padded to a multiple of 16 with zeros. Every tile starts on a multiple of 64 bytes of the layer's
//! part.
//!
//! Formats (the row's own key and value are read back through them too):
//! - **F32**: as is.
//! - **F16**: nearest even, saturating at ±65504.
//! - **Q8_0**: int8 per 32 values of one row and head (the last block may be shorter), with one scale d in F16: d =
//!   amax / 127 rounded to F16 (saturating), q = round_even(x / d) within ±127, q = 0 where d = 0. d·q has at most 18
//!   significant bits, so reading it back is exact in f32. The tile's quants come first, in the order above; then
//!   the scales, `[blocks][64 positions]` for K and V alike. A block with a NaN has d = NaN.
//!
//! 0x00 in every byte reads as zeros, 0xFF as NaNs, whatever the format. This module never knows whose page it is.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

pub use motet_model::KvFormat;

use crate::isa::Isa;
use crate::lanes::{LANES, Lanes, dispatch, f16_to_f32, f32_to_f16_saturating};
use crate::pool::{Pool, WorkerPanic};

/// Positions in a page.
pub const PAGE_POSITIONS: usize = motet_model::PAGE;

/// The entry of a page table where a page has left it (behind a sliding window). It is never touched.
pub const ABSENT_PAGE: u32 = motet_model::batch::NO_PAGE;

/// The byte that makes a page read as NaN in every format.
pub const NAN_FILL: u8 = 0xff;

/// Values that share a scale in [`KvFormat::Q8_0`].
const BLOCK: usize = 32;

/// Bytes of a tile of `channels` (padded) at 64 positions.
const fn tile_bytes(format: KvFormat, channels: usize) -> usize {
    let values = channels * PAGE_POSITIONS;
    match format {
        KvFormat::F16 => 2 * values,
        KvFormat::F32 => 4 * values,
        KvFormat::Q8_0 => values + 2 * channels.div_ceil(BLOCK) * PAGE_POSITIONS,
    }
}

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvPart {
    /// Keys.
    K,
    /// Values.
    V,
}

/// What one layer keeps of each position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    /// The format of both parts.
    pub format: KvFormat,
    /// KV heads.
    pub kv_heads: usize,
    /// Channels of a key, at least 1.
    pub head_dim_k: usize,
    /// Channels of a value, at least 1.
    pub head_dim_v: usize,
}

impl KvShape {
    /// Channels of a value, padded to whole lanes.
    #[must_use]
    pub const fn padded_head_dim_v(&self) -> usize {
        self.head_dim_v.next_multiple_of(LANES)
    }

    /// Bytes of one layer's part of a page.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        self.kv_heads * (self.tile_bytes(KvPart::K) + self.tile_bytes(KvPart::V))
    }

    /// Channels of a row of `part`, without padding.
    #[must_use]
    pub const fn head_dim(&self, part: KvPart) -> usize {
        match part {
            KvPart::K => self.head_dim_k,
            KvPart::V => self.head_dim_v,
        }
    }

    const fn tile_bytes(&self, part: KvPart) -> usize {
        match part {
            KvPart::K => tile_bytes(self.format, self.head_dim_k),
            KvPart::V => tile_bytes(self.format, self.padded_head_dim_v()),
        }
    }

    /// Where a tile lies in the layer's part of a page.
    fn tile_range(&self, part: KvPart, kv_head: usize) -> Range<usize> {
        assert!(kv_head < self.kv_heads, "KV head {kv_head} of {}", self.kv_heads);
        let (start, bytes) = (self.part_start(part), self.tile_bytes(part));
        start + kv_head * bytes..start + (kv_head + 1) * bytes
    }

    const fn part_start(&self, part: KvPart) -> usize {
        match part {
            KvPart::K => 0,
            KvPart::V => self.kv_heads * self.tile_bytes(KvPart::K),
        }
    }

    /// Where channel 0 of position 0 .. lies in a tile: (distance of positions, distance of channels).
    const fn strides(&self, part: KvPart) -> (usize, usize) {
        match part {
            KvPart::K => (1, PAGE_POSITIONS),
            KvPart::V => (self.padded_head_dim_v(), 1),
        }
    }
}

/// Bytes of one layer's part of a page: what the plan multiplies by layers and pages.
#[must_use]
pub const fn page_bytes(format: KvFormat, kv_heads: usize, head_dim_k: usize, head_dim_v: usize) -> usize {
    KvShape { format, kv_heads, head_dim_k, head_dim_v }.page_bytes()
}

/// Where one layer's parts lie in a pool of pages: page `n` has them at `n * page_stride + offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPlace {
    /// Bytes from one page to the next, a multiple of 64.
    pub page_stride: usize,
    /// Bytes before this layer's part in each page, a multiple of 64.
    pub offset: usize,
    /// What lies there.
    pub shape: KvShape,
}

impl KvPlace {
    fn check(&self) {
        assert!(self.shape.head_dim_k > 0 && self.shape.head_dim_v > 0, "heads without channels: {self:?}");
        assert!(self.page_stride.is_multiple_of(64) && self.offset.is_multiple_of(64), "unaligned: {self:?}");
        assert!(
            self.offset.checked_add(self.shape.page_bytes()).is_some_and(|end| end <= self.page_stride),
            "the layer's part does not fit in a page: {self:?}"
        );
    }

    /// The bytes of a tile in the pool.
    fn tile_range(&self, page: u32, part: KvPart, kv_head: usize) -> Range<usize> {
        assert!(page != ABSENT_PAGE, "a page that has left its table was asked for");
        let start = page as usize * self.page_stride + self.offset;
        let tile = self.shape.tile_range(part, kv_head);
        start + tile.start..start + tile.end
    }
}

/// One layer's keys and values in a pool of pages, to be read.
#[derive(Debug, Clone, Copy)]
pub struct KvPages<'a> {
    pool: &'a [u8],
    place: KvPlace,
}

impl<'a> KvPages<'a> {
    /// The layer at `place` of the pages in `pool`.
    ///
    /// # Panics
    /// If the layer does not fit in a page, or the pool does not start on a multiple of 4 bytes.
    #[must_use]
    pub fn new(pool: &'a [u8], place: KvPlace) -> Self {
        place.check();
        assert!(
            pool.as_ptr().cast::<f32>().is_aligned(),
            "a pool of pages must start on a multiple of 4 bytes"
        );
        Self { pool, place }
    }

    /// What the layer keeps.
    #[must_use]
    pub fn shape(&self) -> &KvShape {
        &self.place.shape
    }

    /// The tile of one head in one page.
    ///
    /// # Panics
    /// If the pool has no such page, or the layer no such head.
    #[inline]
    pub(crate) fn tile(&self, page: u32, part: KvPart, kv_head: usize) -> Tile<'a> {
        let bytes = &self.pool[self.place.tile_range(page, part, kv_head)];
        match self.place.shape.format {
            KvFormat::F32 => Tile::F32(bytemuck::cast_slice(bytes)),
            KvFormat::F16 => Tile::F16(bytemuck::cast_slice(bytes)),
            KvFormat::Q8_0 => {
                let scales = match part {
                    KvPart::K => self.place.shape.head_dim_k,
                    KvPart::V => self.place.shape.padded_head_dim_v(),
                };
                let (quants, scales) = bytes.split_at(scales * PAGE_POSITIONS);
                Tile::Q8_0 { quants: bytemuck::cast_slice(quants), scales: bytemuck::cast_slice(scales) }
            }
        }
    }

    /// Reads one head's key or value of one position back, one number at a time (for tests and diagnostics).
    ///
    /// # Panics
    /// If there is no such page, head or position, or `out` is not as long as the head has channels.
    pub fn read(&self, page: u32, part: KvPart, kv_head: usize, position_in_page: usize, out: &mut [f32]) {
        let shape = self.shape();
        assert!(position_in_page < PAGE_POSITIONS, "position {position_in_page} in a page");
        assert_eq!(out.len(), shape.head_dim(part), "channels of {part:?}");
        let tile = self.tile(page, part, kv_head);
        let (by_position, by_channel) = shape.strides(part);
        for (channel, out) in out.iter_mut().enumerate() {
            let at = position_in_page * by_position + channel * by_channel;
            *out = match tile {
                Tile::F32(values) => values[at],
                Tile::F16(halves) => f16_to_f32(halves[at]),
                Tile::Q8_0 { quants, scales } => {
                    f16_to_f32(scales[channel / BLOCK * PAGE_POSITIONS + position_in_page])
                        * f32::from(quants[at])
                }
            };
        }
    }
}

/// One tile as it is stored.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Tile<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    Q8_0 { quants: &'a [i8], scales: &'a [u16] },
}

impl Tile<'_> {
    /// Where it lies and how many bytes it has.
    pub(crate) fn extent(&self) -> (*const u8, usize) {
        match self {
            Tile::F32(values) => (values.as_ptr().cast(), size_of_val(*values)),
            Tile::F16(halves) => (halves.as_ptr().cast(), size_of_val(*halves)),
            Tile::Q8_0 { quants, scales } => {
                (quants.as_ptr().cast(), size_of_val(*quants) + size_of_val(*scales))
            }
        }
    }
}

/// Decodes a tile to floats in its own order, exactly. `out` has the tile's length, a multiple of 64.
#[inline(always)]
pub(crate) fn decode_tile<L: Lanes>(l: L, tile: Tile<'_>, part: KvPart, out: &mut [f32]) {
    let (out, _) = out.as_chunks_mut::<LANES>();
    match tile {
        Tile::F32(values) => {
            for (out, values) in out.iter_mut().zip(values.as_chunks().0) {
                *out = *values;
            }
        }
        Tile::F16(halves) => {
            for (out, halves) in out.iter_mut().zip(halves.as_chunks().0) {
                l.store(l.load_f16(halves), out);
            }
        }
        Tile::Q8_0 { quants, scales } => {
            let (quants, _) = quants.as_chunks::<LANES>();
            let per_row = quants.len() / PAGE_POSITIONS;
            for (block, scales) in scales.as_chunks::<PAGE_POSITIONS>().0.iter().enumerate() {
                let mut d = [[0.0; LANES]; PAGE_POSITIONS / LANES];
                for (d, scales) in d.iter_mut().zip(scales.as_chunks().0) {
                    l.store(l.load_f16(scales), d);
                }
                match part {
                    // A row of the tile is a channel: its positions are the lanes.
                    KvPart::K => {
                        let rows = block * BLOCK * 4..((block + 1) * BLOCK * 4).min(quants.len());
                        for (i, (out, quants)) in out[rows.clone()].iter_mut().zip(&quants[rows]).enumerate()
                        {
                            l.store(l.mul(l.load(&d[i % 4]), l.to_float(l.load_i8(quants))), out);
                        }
                    }
                    // A row of the tile is a position: the block is up to 2 × 16 of its channels.
                    KvPart::V => {
                        let d = d.as_flattened();
                        let first = block * (BLOCK / LANES);
                        for i in first..(first + BLOCK / LANES).min(per_row) {
                            for (position, d) in d.iter().enumerate() {
                                let at = position * per_row + i;
                                l.store(l.mul(l.splat(*d), l.to_float(l.load_i8(&quants[at]))), &mut out[at]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// New keys or values of rows that lie in a buffer: head `h` of row `r` starts at `r * row_stride + h * head_stride`.
#[derive(Debug, Clone, Copy)]
pub struct HeadRows<'a> {
    /// The buffer, from row 0 on.
    pub values: &'a [f32],
    /// Floats from one row to the next.
    pub row_stride: usize,
    /// Floats from one head to the next.
    pub head_stride: usize,
}

impl<'a> HeadRows<'a> {
    /// One head of one row.
    ///
    /// # Panics
    /// If the buffer ends before.
    #[inline]
    #[must_use]
    pub fn head(&self, row: usize, head: usize, head_dim: usize) -> &'a [f32] {
        &self.values[row * self.row_stride + head * self.head_stride..][..head_dim]
    }
}

/// The rows of one session in a batch, and where its keys and values are.
#[derive(Debug, Clone, Copy)]
pub struct Segment<'a> {
    /// The position of its first row.
    pub first_position: usize,
    /// Its first row in the batch's buffers.
    pub first_row: usize,
    /// How many rows it has, at ascending positions.
    pub rows: usize,
    /// The page of positions `64 i..64 (i + 1)` at `i`; [`ABSENT_PAGE`] where no row looks any more.
    pub pages: &'a [u32],
}

/// One layer's keys and values in a pool of pages, to be written.
///
/// It is taken apart into [`HeadWriter`]s, one for each part and head, which write different bytes of the same pages
/// and so may work at the same time.
#[derive(Debug)]
pub struct KvPagesMut<'a> {
    pool: *mut u8,
    pool_len: usize,
    place: KvPlace,
    taken: AtomicUsize,
    borrow: std::marker::PhantomData<&'a mut [u8]>,
}

// SAFETY: it has exclusive access to plain bytes for its life, and `take` hands out disjoint parts of them, each
// once.
unsafe impl Sync for KvPagesMut<'_> {}
// SAFETY: as above; exclusive access to plain bytes may move to another thread.
unsafe impl Send for KvPagesMut<'_> {}

impl<'a> KvPagesMut<'a> {
    /// The layer at `place` of the pages in `pool`.
    ///
    /// # Panics
    /// If the layer does not fit in a page, or the pool does not start on a multiple of 4 bytes.
    #[must_use]
    pub fn new(pool: &'a mut [u8], place: KvPlace) -> Self {
        place.check();
        assert!(
            pool.as_ptr().cast::<f32>().is_aligned(),
            "a pool of pages must start on a multiple of 4 bytes"
        );
        Self {
            pool: pool.as_mut_ptr(),
            pool_len: pool.len(),
            place,
            taken: AtomicUsize::new(0),
            borrow: std::marker::PhantomData,
        }
    }

    /// How many writers there are in all.
    #[must_use]
    pub fn writers(&self) -> usize {
        2 * self.place.shape.kv_heads
    }

    /// The next part and head that nobody writes yet.
    #[must_use]
    pub fn take(&self) -> Option<HeadWriter<'a>> {
        let writers = self.writers();
        let next = |taken| (taken < writers).then_some(taken + 1);
        let index = self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        let part = if index.is_multiple_of(2) { KvPart::K } else { KvPart::V };
        Some(HeadWriter {
            pool: self.pool,
            pool_len: self.pool_len,
            place: self.place,
            part,
            kv_head: index / 2,
            borrow: std::marker::PhantomData,
        })
    }
}

/// The right to write one part of one KV head of one layer, in all pages.
#[derive(Debug)]
pub struct HeadWriter<'a> {
    pool: *mut u8,
    pool_len: usize,
    place: KvPlace,
    part: KvPart,
    kv_head: usize,
    borrow: std::marker::PhantomData<&'a mut [u8]>,
}

// SAFETY: it is the only one with access to its tiles (see `KvPagesMut::take`), which are plain bytes.
unsafe impl Send for HeadWriter<'_> {}

impl HeadWriter<'_> {
    /// Keys or values?
    #[must_use]
    pub fn part(&self) -> KvPart {
        self.part
    }

    /// Writes this head's keys or values of all rows of a segment to their positions' places.
    ///
    /// # Panics
    /// If a position has no page, or a row ends beyond its buffer.
    pub fn write(&mut self, isa: Isa, segment: &Segment<'_>, rows: HeadRows<'_>) {
        let (shape, part, head) = (self.place.shape, self.part, self.kv_head);
        for i in 0..segment.rows {
            let position = segment.first_position + i;
            let values = rows.head(segment.first_row + i, head, shape.head_dim(part));
            let tile = self.tile_mut(segment.pages[position / PAGE_POSITIONS]);
            write_row(isa, &shape, part, position % PAGE_POSITIONS, values, tile);
        }
    }

    fn tile_mut(&mut self, page: u32) -> &mut [u8] {
        let range = self.place.tile_range(page, self.part, self.kv_head);
        assert!(range.end <= self.pool_len, "page {page} lies beyond the pool of {} bytes", self.pool_len);
        // SAFETY: within the pool, as just checked. Tiles of different parts, heads or pages do not overlap (each
        // part fits in its page, see `KvPlace::check`), `take` made only one writer for this part and head, and
        // `&mut self` keeps it to one tile at a time.
        unsafe { std::slice::from_raw_parts_mut(self.pool.add(range.start), range.len()) }
    }
}

/// Writes the keys and values of all segments, in parallel over parts and heads where that pays.
///
/// # Errors
/// [`WorkerPanic`] as [`Pool::run`].
///
/// # Panics
/// As [`HeadWriter::write`].
pub fn write_segments(
    isa: Isa,
    pool: &mut Pool,
    pages: &KvPagesMut<'_>,
    segments: &[Segment<'_>],
    k: HeadRows<'_>,
    v: HeadRows<'_>,
) -> Result<(), WorkerPanic> {
    /// Below this many numbers a region is taken to cost more than it saves.
    const WORTH_SHARING: usize = 512;
    let shape = &pages.place.shape;
    let rows: usize = segments.iter().map(|segment| segment.rows).sum();
    let numbers = rows * shape.kv_heads * (shape.head_dim_k + shape.head_dim_v);
    let tasks = if numbers < WORTH_SHARING { 1 } else { pages.writers() };
    pool.run(tasks, |_, _| {
        let mut budget = pages.writers().div_ceil(tasks);
        while let Some(mut writer) = (budget > 0).then(|| pages.take()).flatten() {
            budget -= 1;
            let rows = if writer.part() == KvPart::K { k } else { v };
            for segment in segments {
                writer.write(isa, segment, rows);
            }
        }
    })
}

dispatch! {
    /// Writes one row of one head into its tile.
    fn write_row(
        shape: &KvShape,
        part: KvPart,
        position_in_page: usize,
        values: &[f32],
        tile: &mut [u8],
    ) = write_row_on_lanes;
}

#[inline(always)]
fn write_row_on_lanes<L: Lanes>(
    l: L,
    shape: &KvShape,
    part: KvPart,
    position: usize,
    values: &[f32],
    tile: &mut [u8],
) {
    let (by_position, by_channel) = shape.strides(part);
    let start = position * by_position;
    // A value's padding is written too, as zeros; a key has none.
    let channels = if part == KvPart::V { shape.padded_head_dim_v() } else { values.len() };
    match shape.format {
        KvFormat::F32 => {
            let tile: &mut [f32] = bytemuck::cast_slice_mut(tile);
            for channel in 0..channels {
                tile[start + channel * by_channel] = values.get(channel).copied().unwrap_or(0.0);
            }
        }
        KvFormat::F16 => {
            let tile: &mut [u16] = bytemuck::cast_slice_mut(tile);
            for first in (0..channels).step_by(LANES) {
                let mut halves = [0; LANES];
                let some = &values[first.min(values.len())..(first + LANES).min(values.len())];
                l.store_f16_saturating(l.load_tail(some, 0.0), &mut halves);
                for (i, half) in halves.into_iter().take(channels - first).enumerate() {
                    tile[start + (first + i) * by_channel] = half;
                }
            }
        }
        KvFormat::Q8_0 => {
            let (quants, scales) = tile.split_at_mut(channels * PAGE_POSITIONS);
            let quants: &mut [i8] = bytemuck::cast_slice_mut(quants);
            let scales: &mut [u16] = bytemuck::cast_slice_mut(scales);
            for (block, first) in (0..channels).step_by(BLOCK).enumerate() {
                let some = &values[first.min(values.len())..(first + BLOCK).min(values.len())];
                let (low, high) = some.split_at(some.len().min(LANES));
                let halves = [l.load_tail(low, 0.0), l.load_tail(high, 0.0)];
                let amax = l.max_lane(l.max(l.abs(halves[0]), l.abs(halves[1])));
                let has_nan = l.mask_bits(l.is_nan(halves[0])) | l.mask_bits(l.is_nan(halves[1])) != 0;
                let scale = if has_nan { f32::NAN } else { amax / 127.0 };
                let scale = f32_to_f16_saturating(scale);
                scales[block * PAGE_POSITIONS + position] = scale;
                let d = f16_to_f32(scale);
                let mut q = [[0; LANES]; 2];
                if d > 0.0 {
                    for (half, q) in halves.into_iter().zip(&mut q) {
                        let scaled = l.clamp(l.div(half, l.splat(d)), -127.0, 127.0);
                        l.store_i8(l.to_int(scaled), q);
                    }
                }
                for (i, q) in q.as_flattened().iter().take(channels - first).enumerate() {
                    quants[start + (first + i) * by_channel] = *q;
                }
            }
        }
    }
}
