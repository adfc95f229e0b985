//! One item of attention: the queries of some rows and one group of heads against one KV head, tile by tile.
//!
//! It knows neither threads nor other items. The arithmetic is defined in the [module](super).

use std::ops::Range;

use crate::kv::{HeadRows, KvPages, KvPart, PAGE_POSITIONS, Segment, Tile, decode_tile};
use crate::lanes::{LANES, Lanes};
use crate::shared_rows::RowsMut;

use super::products::{Factors, Next, Sums, add_products};
use super::softmax::{close_split, finish, fold_split, soften, start_split, start_total};
use super::{AttentionShape, SPLIT_POSITIONS};

/// Queries that an item takes together: as many rows as make up about this many with the heads of their group.
pub(super) const QUERIES: usize = 32;

/// From this many queries on a tile is decoded to floats once instead of once for each few queries.
const WORTH_DECODING: usize = 7;

/// What one item computes.
#[derive(Debug, Clone)]
pub(super) struct Work<'a> {
    pub(super) segment: Segment<'a>,
    /// Rows of the segment, counted from its first.
    pub(super) rows: Range<usize>,
    pub(super) kv_head: usize,
    /// Splits of 512 absolute positions.
    pub(super) splits: Range<usize>,
    /// Where the records of its splits begin, if they are shared.
    pub(super) first_record: usize,
}

impl Work<'_> {
    /// The keys of one of its rows, as absolute positions.
    fn keys(&self, shape: &AttentionShape, row: usize) -> Range<usize> {
        shape.keys(self.segment.first_position + row)
    }

    /// The rows that see any of `positions`: always neighbours, since both ends of their keys ascend.
    fn rows_that_see(&self, shape: &AttentionShape, positions: Range<usize>) -> Range<usize> {
        let sees = |&row: &usize| {
            let keys = self.keys(shape, row);
            keys.start < positions.end && positions.start < keys.end
        };
        let start = self.rows.clone().find(sees).unwrap_or(self.rows.end);
        let end = (start..self.rows.end).take_while(sees).last().map_or(start, |last| last + 1);
        start..end
    }

    /// The keys of a row that lie in the tile from `first` on, counted from there.
    fn keys_in_tile(&self, shape: &AttentionShape, row: usize, first: usize) -> Range<usize> {
        let keys = self.keys(shape, row);
        keys.start.max(first) - first..keys.end.min(first + PAGE_POSITIONS) - first
    }

    /// The queries of some of its rows, counted from the item's first.
    fn queries_of(&self, rows: Range<usize>, group: usize) -> Range<usize> {
        (rows.start - self.rows.start) * group..(rows.end - self.rows.start) * group
    }
}

/// Lengths of an item's scratch, in floats.
#[derive(Debug, Clone, Copy)]
pub(super) struct ItemScratch {
    queries: usize,
    head_dim_k: usize,
    padded_v: usize,
}

impl ItemScratch {
    pub(super) fn of(shape: &AttentionShape) -> Self {
        Self {
            queries: shape.rows_per_item() * shape.group(),
            head_dim_k: shape.kv.head_dim_k,
            padded_v: shape.kv.padded_head_dim_v(),
        }
    }

    /// An output that is not yet divided: `[padded_v]`, then the greatest score and the denominator.
    pub(super) const fn record(&self) -> usize {
        self.padded_v + LANES
    }

    /// The running sums of a split: `[padded_v]`, 16 lane sums of the denominator, then the greatest score.
    const fn running(&self) -> usize {
        self.padded_v + 2 * LANES
    }

    pub(super) const fn floats(&self) -> usize {
        let per_query = self.head_dim_k + PAGE_POSITIONS + self.running() + self.record();
        self.queries * per_query + PAGE_POSITIONS * (self.head_dim_k + self.padded_v)
    }

    /// Scratch for `count` queries.
    fn cut<'a>(&self, floats: &'a mut [f32], count: usize) -> Scratch<'a> {
        assert!(count <= self.queries, "{count} queries in an item of {}", self.queries);
        let (q, rest) = floats.split_at_mut(count * self.head_dim_k);
        let (scores, rest) = rest.split_at_mut(count * PAGE_POSITIONS);
        let (running, rest) = rest.split_at_mut(count * self.running());
        let (totals, rest) = rest.split_at_mut(count * self.record());
        let (k, rest) = rest.split_at_mut(PAGE_POSITIONS * self.head_dim_k);
        Scratch { q, scores, running, totals, k, v: &mut rest[..PAGE_POSITIONS * self.padded_v] }
    }
}

/// Where an item's result goes.
pub(super) enum Output<'a> {
    /// All splits, combined and divided: `[rows, group · head_dim_v]`.
    Rows(RowsMut<'a>),
    /// The records of one split, to be combined later: `[rows · group, record]`. Those of rows that see nothing of
    /// the split are left as they were.
    Split(RowsMut<'a>),
}

/// An item's scratch. Query `i` is head `i % group` of the item's row `i / group`.
struct Scratch<'a> {
    /// `[queries, head_dim_k]`
    q: &'a mut [f32],
    /// `[queries, 64]`: scores, then weights
    scores: &'a mut [f32],
    /// `[queries, running]`
    running: &'a mut [f32],
    /// `[queries, record]`
    totals: &'a mut [f32],
    /// A decoded tile of keys.
    k: &'a mut [f32],
    /// A decoded tile of values.
    v: &'a mut [f32],
}

/// Runs one item; `then` is what the thread will probably run next, a matter of time only.
#[inline(always)]
pub(super) fn attend_item<L: Lanes>(
    l: L,
    shape: &AttentionShape,
    pages: &KvPages<'_>,
    work: &Work<'_>,
    then: Option<&Work<'_>>,
    queries: HeadRows<'_>,
    scratch: &mut [f32],
    mut out: Output<'_>,
) {
    let lens = ItemScratch::of(shape);
    let (group, padded_v) = (shape.group(), lens.padded_v);
    let mut scratch = lens.cut(scratch, work.rows.len() * group);
    for (i, q) in scratch.q.chunks_exact_mut(lens.head_dim_k).enumerate() {
        let row = work.segment.first_row + work.rows.start + i / group;
        q.copy_from_slice(queries.head(row, work.kv_head * group + i % group, lens.head_dim_k));
    }
    for total in scratch.totals.chunks_exact_mut(lens.record()) {
        start_total(total, padded_v);
    }
    for split in work.splits.clone() {
        let positions = split * SPLIT_POSITIONS..(split + 1) * SPLIT_POSITIONS;
        for running in scratch.running.chunks_exact_mut(lens.running()) {
            start_split(running, padded_v);
        }
        for first in positions.clone().step_by(PAGE_POSITIONS) {
            attend_tile(l, shape, pages, work, then, first, &lens, &mut scratch);
        }
        for i in work.queries_of(work.rows_that_see(shape, positions), group) {
            let running = &mut scratch.running[i * lens.running()..][..lens.running()];
            close_split(l, running, padded_v);
            let record = &running[..lens.record()];
            match &mut out {
                Output::Rows(_) => {
                    let total = &mut scratch.totals[i * lens.record()..][..lens.record()];
                    fold_split(l, total, record, padded_v);
                }
                Output::Split(records) => records.row_mut(i).copy_from_slice(record),
            }
        }
    }
    if let Output::Rows(mut rows) = out {
        for (i, total) in scratch.totals.chunks_exact(lens.record()).enumerate() {
            let head = i % group * shape.kv.head_dim_v;
            finish(l, total, padded_v, &mut rows.row_mut(i / group)[head..head + shape.kv.head_dim_v]);
        }
    }
}

/// The tile of 64 positions from `first` on, for the rows that see any of them.
#[inline(always)]
fn attend_tile<L: Lanes>(
    l: L,
    shape: &AttentionShape,
    pages: &KvPages<'_>,
    work: &Work<'_>,
    then: Option<&Work<'_>>,
    first: usize,
    lens: &ItemScratch,
    scratch: &mut Scratch<'_>,
) {
    let (group, head_dim, padded_v) = (shape.group(), lens.head_dim_k, lens.padded_v);
    let rows = work.rows_that_see(shape, first..first + PAGE_POSITIONS);
    if rows.is_empty() {
        return;
    }
    let queries = work.queries_of(rows.clone(), group);
    let page = work.segment.pages[first / PAGE_POSITIONS];
    let next = next_tile(shape, work, then, first);

    let v = pages.tile(page, KvPart::V, work.kv_head);
    let k = ready(l, pages.tile(page, KvPart::K, work.kv_head), KvPart::K, queries.len(), scratch.k);
    let scores = &mut scratch.scores[queries.start * PAGE_POSITIONS..queries.end * PAGE_POSITIONS];
    scores.fill(0.0);
    let factors =
        Factors { all: &scratch.q[queries.start * head_dim..], stride: head_dim, terms: 0..head_dim };
    let sums = Sums { all: scores, stride: PAGE_POSITIONS };
    // Nobody sees the keys behind those of the last row.
    let end = work.keys_in_tile(shape, rows.end - 1, first).end;
    let seen = end.next_multiple_of(LANES);
    add_products(
        l,
        factors,
        k,
        PAGE_POSITIONS,
        seen,
        queries.len(),
        sums,
        next.map_or(Next::NONE, |(page, head)| Next::tile(pages.tile(page, KvPart::K, head), head_dim)),
    );

    for i in queries.clone() {
        let keys = work.keys_in_tile(shape, work.rows.start + i / group, first);
        let scores = &mut scratch.scores[i * PAGE_POSITIONS..][..PAGE_POSITIONS];
        let running = &mut scratch.running[i * lens.running()..][..lens.running()];
        soften(l, scores, keys, shape.scale, running, padded_v);
    }

    let next =
        next.map_or(Next::NONE, |(page, head)| Next::tile(pages.tile(page, KvPart::V, head), PAGE_POSITIONS));
    let v = ready(l, v, KvPart::V, queries.len(), scratch.v);
    // Keys in ascending order, in runs that the same rows see.
    let mut key = 0;
    while key < PAGE_POSITIONS {
        let next_change = |row| {
            let keys = work.keys_in_tile(shape, row, first);
            [keys.start, keys.end].into_iter().find(|&change| change > key).unwrap_or(PAGE_POSITIONS)
        };
        let end = rows.clone().map(next_change).min().unwrap_or(PAGE_POSITIONS);
        let queries = work.queries_of(work.rows_that_see(shape, first + key..first + end), group);
        let factors = Factors {
            all: &scratch.scores[queries.start * PAGE_POSITIONS..],
            stride: PAGE_POSITIONS,
            terms: key..end,
        };
        let sums = Sums {
            all: &mut scratch.running[queries.start * lens.running()..queries.end * lens.running()],
            stride: lens.running(),
        };
        add_products(l, factors, v, padded_v, padded_v, queries.len(), sums, next);
        key = end;
    }
}

/// The tile behind the one from position `first` on: the item's next, or the first of the item that comes then. As page
/// and KV head.
fn next_tile(
    shape: &AttentionShape,
    work: &Work<'_>,
    then: Option<&Work<'_>>,
    first: usize,
) -> Option<(u32, usize)> {
    let next = first + PAGE_POSITIONS;
    let end = work.keys(shape, work.rows.end - 1).end.min(work.splits.end * SPLIT_POSITIONS);
    if next < end {
        return Some((work.segment.pages[next / PAGE_POSITIONS], work.kv_head));
    }
    let then = then?;
    let first = then.keys(shape, then.rows.start).start.max(then.splits.start * SPLIT_POSITIONS);
    Some((then.segment.pages[first / PAGE_POSITIONS], then.kv_head))
}

/// The tile as the products can read it: decoded to floats where that pays or there is no other way.
#[inline(always)]
fn ready<'a, L: Lanes>(
    l: L,
    tile: Tile<'a>,
    part: KvPart,
    queries: usize,
    floats: &'a mut [f32],
) -> Tile<'a> {
    match tile {
        Tile::F16(_) if queries < WORTH_DECODING => tile,
        Tile::F32(_) => tile,
        Tile::F16(_) | Tile::Q8_0 { .. } => {
            decode_tile(l, tile, part, floats);
            Tile::F32(floats)
        }
    }
}

/// Combines the records of the splits of one item and divides. `records` is `[splits, rows · group, record]`, from
/// the item's first split on.
#[inline(always)]
pub(super) fn combine_item<L: Lanes>(
    l: L,
    shape: &AttentionShape,
    work: &Work<'_>,
    records: &[f32],
    scratch: &mut [f32],
    mut out: RowsMut<'_>,
) {
    let lens = ItemScratch::of(shape);
    let (group, padded_v) = (shape.group(), lens.padded_v);
    let count = work.rows.len() * group;
    let total = &mut scratch[..lens.record()];
    for i in 0..count {
        start_total(total, padded_v);
        let keys = work.keys(shape, work.rows.start + i / group);
        for split in keys.start / SPLIT_POSITIONS..keys.end.div_ceil(SPLIT_POSITIONS) {
            let at = (split - work.splits.start) * count + i;
            fold_split(l, total, &records[at * lens.record()..][..lens.record()], padded_v);
        }
        let head = i % group * shape.kv.head_dim_v;
        finish(l, total, padded_v, &mut out.row_mut(i / group)[head..head + shape.kv.head_dim_v]);
    }
}
