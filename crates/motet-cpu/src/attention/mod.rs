//! Attention of a batch's rows over their sessions' pages.
//!
//! Bits depend on a row's own query, position and keys only; never on what other rows are in the batch, how rows
//! were cut into chunks, where pages lie, how many threads there are, or which splits they share.
//!
//! # Definition
//!
//! For the row at position p and one of its heads with query q, the keys are the positions j from max(first, p −
//! window + 1) to p. Every key and value, the row's own too, is read back through the KV format. All numbers are
//! f32; `fma` rounds once, every other operation too; `exp` is [`math::exp`](crate::math::exp).
//!
//! 1. Positions are cut into **splits** of 512 absolute positions and these into **tiles** of 64 (a page). Splits and
//!    tiles without a key of the row do not exist for it. Each split starts with m = −∞, l\[0..16\] = +0, a\[..\] = +0.
//! 2. For each of its tiles, in ascending order:
//!    - score: s = +0, then s = fma(q\[d\], k_j\[d\], s) for d ascending; s_j = s · scale;
//!    - t = max of the s_j, m' = max(m, t). If m' > m: c = exp(m − m'), every l and a is multiplied by c, m = m';
//!    - weight: w_j = exp(s_j − m); for j ascending: l\[j mod 16\] += w_j;
//!    - for j ascending: a\[d\] = fma(w_j, v_j\[d\], a\[d\]).
//! 3. At the end of the split the 16 sums l become one number by the tree of [`Lanes::sum`].
//! 4. Splits are combined in ascending order, also when there is only one, from M = −∞, L = +0, A = +0: M' = max(M,
//!    m), x = exp(M − M'), y = exp(m − M'), L = fma(l, y, L · x), A\[d\] = fma(a\[d\], y, A\[d\] · x), M = M'.
//! 5. out\[d\] = A\[d\] / L.
//!
//! Positions of a tile that are not keys of the row take no part: their score is *selected* to −∞ (so their weight is
//! +0, which changes neither maximum nor denominators), and their value is never multiplied. So whatever bytes are
//! there, NaN too, are without effect.
//!
//! A score of NaN or +∞ makes the row's output NaN, and so do scores that are all −∞: then the row's session ends, as
//! with any number that is not finite.
//!
//! Sources: the running maximum is Milakov and Gimelshein (2018, "Online normalizer calculation for softmax"), the
//! splits are those of Flash-Decoding (Dao et al., 2023).

mod item;
mod products;
mod softmax;
mod source;

use std::ops::Range;
use std::sync::Mutex;

use crate::isa::Isa;
use crate::kv::{HeadRows, KvPages, KvShape, PAGE_POSITIONS, Segment};
#[cfg(doc)]
use crate::lanes::Lanes;
use crate::lanes::dispatch;
use crate::pool::{Pool, WorkerPanic};
use crate::shared_rows::RowsMut;
use crate::worker_scratch::WorkerScratch;

use item::{ItemScratch, Output, QUERIES, Work, attend_item, combine_item};
use source::{Pass, Plan, Source, Taken};

/// Absolute positions that start afresh together.
pub const SPLIT_POSITIONS: usize = 512;

/// A session with few rows and a long context may share its splits between threads; this many rows of a stage, at the
/// greatest context, have room for it.
const ROWS_WITH_SHARED_SPLITS: usize = 4;

/// What a layer's attention is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// KV heads and their channels.
    pub kv: KvShape,
    /// Query heads, a multiple of the KV heads: heads `g · n..g · (n + 1)` look at KV head `g`.
    pub heads: usize,
    /// The factor of the scores, usually 1 / √head_dim_k.
    pub scale: f32,
    /// How many positions a row sees at most, its own included; at least 1.
    pub window: Option<usize>,
    /// The first position that exists: 0, or 1 in an MTP layer.
    pub first: usize,
}

impl AttentionShape {
    fn group(&self) -> usize {
        self.heads / self.kv.kv_heads
    }

    fn rows_per_item(&self) -> usize {
        (QUERIES / self.group()).max(1)
    }

    /// The keys of the row at `position`.
    fn keys(&self, position: usize) -> Range<usize> {
        let start = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        start.max(self.first)..position + 1
    }

    fn check(&self) {
        assert!(self.kv.kv_heads > 0 && self.heads > 0, "attention without heads: {self:?}");
        assert!(self.heads.is_multiple_of(self.kv.kv_heads), "heads are not whole groups: {self:?}");
        assert!(self.window != Some(0), "a row sees at least itself: {self:?}");
    }
}

/// Records that splits may be shared through.
fn shared_records(shape: &AttentionShape, max_positions: usize) -> usize {
    let splits = max_positions.div_ceil(SPLIT_POSITIONS);
    let seen = shape.window.map_or(splits, |window| window.div_ceil(SPLIT_POSITIONS) + 2);
    ROWS_WITH_SHARED_SPLITS * shape.heads * splits.min(seen)
}

/// The floats of workspace that [`attend`] needs, for sessions of up to `max_positions`.
#[must_use]
pub fn scratch_floats(shape: &AttentionShape, threads: usize, max_positions: usize) -> usize {
    let lens = ItemScratch::of(shape);
    WorkerScratch::floats(threads, lens.floats()) + shared_records(shape, max_positions) * lens.record()
}

/// Computes attention for the rows of all segments: `out` row `r`, head `h` at column `h · head_dim_v`.
///
/// All keys and values of the segments' own rows must have been written. Rows of `out` that no segment has are left as
/// they are. More scratch than [`scratch_floats`] for no positions lets long contexts use more threads; it
/// changes no bits.
///
/// # Errors
/// [`WorkerPanic`] as [`Pool::run`]; a page table too short or an absent page within a row's reach is one.
///
/// # Panics
/// If shapes do not fit: `out` narrower than the heads, segments that do not ascend or lie outside of `out`, too little
/// scratch, or a row before the first position.
pub fn attend(
    isa: Isa,
    pool: &mut Pool,
    shape: &AttentionShape,
    pages: &KvPages<'_>,
    segments: &[Segment<'_>],
    queries: HeadRows<'_>,
    mut out: RowsMut<'_>,
    scratch: &mut [f32],
) -> Result<(), WorkerPanic> {
    shape.check();
    assert_eq!(pages.shape(), &shape.kv, "the pages belong to another layer");
    assert_eq!(out.width(), shape.heads * shape.kv.head_dim_v, "columns of the output");
    check_segments(shape, segments, out.rows());
    let lens = ItemScratch::of(shape);
    let (of_workers, records) = scratch.split_at_mut(WorkerScratch::floats(pool.threads(), lens.floats()));
    let of_workers = WorkerScratch::new(of_workers, pool.threads(), lens.floats());
    let plan = Plan::new(shape, segments, pool.threads(), records.len() / lens.record());

    let record_rows = RowsMut::new(records, plan.records(), lens.record(), lens.record());
    let threads = pool.threads();
    let source = Mutex::new(Source::new(&plan, Pass::Compute, threads, out.reborrow(), Some(record_rows)));
    pool.run(threads.min(plan.items(Pass::Compute)), |_, worker| {
        while let Some(Taken { work, out, then }) = next(&source) {
            run_item(isa, shape, pages, &work, then.as_ref(), queries, &mut of_workers.lend(worker), out);
        }
    })?;

    let source = Mutex::new(Source::new(&plan, Pass::Combine, threads, out, None));
    pool.run(threads.min(plan.items(Pass::Combine)), |_, worker| {
        while let Some(Taken { work, out: Output::Rows(out), .. }) = next(&source) {
            let records = &records[work.first_record * lens.record()..];
            run_combine(isa, shape, &work, records, &mut of_workers.lend(worker), out);
        }
    })
}

/// Takes the next item. Any worker may get any item: it computes the same bits.
fn next<'p, 'a>(source: &Mutex<Source<'p, 'a>>) -> Option<Taken<'p, 'a>> {
    source.lock().unwrap_or_else(std::sync::PoisonError::into_inner).next()
}

fn check_segments(shape: &AttentionShape, segments: &[Segment<'_>], rows: usize) {
    let mut next_row = 0;
    for (i, segment) in segments.iter().enumerate() {
        assert!(segment.first_row >= next_row, "segment {i} does not come after the one before: {segment:?}");
        next_row = segment.first_row + segment.rows;
        assert!(segment.first_position >= shape.first, "segment {i} starts before position {}", shape.first);
        let end = segment.first_position + segment.rows;
        assert!(
            end <= segment.pages.len() * PAGE_POSITIONS,
            "segment {i} reaches position {end}, its table only {} pages",
            segment.pages.len()
        );
    }
    assert!(next_row <= rows, "the segments have rows up to {next_row}, the output {rows}");
}

dispatch! {
    /// One item of the first pass.
    fn run_item(
        shape: &AttentionShape,
        pages: &KvPages<'_>,
        work: &Work<'_>,
        then: Option<&Work<'_>>,
        queries: HeadRows<'_>,
        scratch: &mut [f32],
        out: Output<'_>,
    ) = attend_item;
}

dispatch! {
    /// One item of the second pass.
    fn run_combine(
        shape: &AttentionShape,
        work: &Work<'_>,
        records: &[f32],
        scratch: &mut [f32],
        out: RowsMut<'_>,
    ) = combine_item;
}
