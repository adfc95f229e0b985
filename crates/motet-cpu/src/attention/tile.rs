//! One item of attention: the queries of some rows and one group of heads against one KV head, tile by tile.
//!
//! This file is the arithmetic; see the [module](super) for its definition. It knows neither threads nor sessions.

use std::ops::Range;

use crate::kv::{KvPages, KvPart, PAGE_POSITIONS, Segment, Tile, decode_tile};
use crate::lanes::{LANES, Lanes};
use crate::math::exp;
use crate::shared_rows::RowsMut;

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
}

/// Where an item's result goes.
pub(super) enum Output<'a> {
    /// All splits, combined and divided: `[rows, group · head_dim_v]`.
    Rows(RowsMut<'a>),
    /// The records of one split, to be combined later: `[rows · group, record]`. Those of rows that see nothing of
    /// the split are left as they were.
    Split(RowsMut<'a>),
}

/// Runs one item.
#[inline(always)]
pub(super) fn attend_item<L: Lanes>(
    l: L,
    shape: &AttentionShape,
    pages: &KvPages<'_>,
    work: &Work<'_>,
    queries: crate::kv::HeadRows<'_>,
    scratch: &mut [f32],
    mut out: Output<'_>,
) {
    let lens = ItemScratch::of(shape);
    let (group, head_dim, padded_v) = (shape.group(), lens.head_dim_k, lens.padded_v);
    let count = work.rows.len() * group;
    let (q, rest) = scratch.split_at_mut(lens.queries * head_dim);
    let (scores, rest) = rest.split_at_mut(lens.queries * PAGE_POSITIONS);
    let (running, rest) = rest.split_at_mut(lens.queries * lens.running());
    let (totals, rest) = rest.split_at_mut(lens.queries * lens.record());
    let (k_floats, rest) = rest.split_at_mut(PAGE_POSITIONS * head_dim);
    let v_floats = &mut rest[..PAGE_POSITIONS * padded_v];

    // Query i is head i % group of the item's row i / group.
    for (i, q) in q.chunks_exact_mut(head_dim).take(count).enumerate() {
        let row = work.segment.first_row + work.rows.start + i / group;
        q.copy_from_slice(queries.head(row, work.kv_head * group + i % group, head_dim));
    }
    let totals = &mut totals[..count * lens.record()];
    for total in totals.chunks_exact_mut(lens.record()) {
        start_total(total, padded_v);
    }

    for split in work.splits.clone() {
        let positions = split * SPLIT_POSITIONS..(split + 1) * SPLIT_POSITIONS;
        for running in running.chunks_exact_mut(lens.running()).take(count) {
            running.fill(0.0);
            running[padded_v + LANES] = f32::NEG_INFINITY;
        }
        for first in positions.clone().step_by(PAGE_POSITIONS) {
            let rows = work.rows_that_see(shape, first..first + PAGE_POSITIONS);
            if rows.is_empty() {
                continue;
            }
            let keys_of = |row: usize| {
                let keys = work.keys(shape, row);
                keys.start.max(first) - first..keys.end.min(first + PAGE_POSITIONS) - first
            };
            let active = (rows.start - work.rows.start) * group..(rows.end - work.rows.start) * group;
            let page = work.segment.pages[first / PAGE_POSITIONS];
            let mut k = pages.tile(page, KvPart::K, work.kv_head);
            if is_worth_decoding(k, active.len()) {
                decode_tile(l, k, KvPart::K, k_floats);
                k = Tile::F32(k_floats);
            }
            let scores_of_active = &mut scores[active.start * PAGE_POSITIONS..active.end * PAGE_POSITIONS];
            scores_of_active.fill(0.0);
            let sums = Sums { all: scores_of_active, stride: PAGE_POSITIONS };
            let factors =
                Factors { all: &q[active.start * head_dim..], stride: head_dim, terms: 0..head_dim };
            add_products(l, factors, k, PAGE_POSITIONS, active.len(), sums);

            for i in active.clone() {
                let keys = keys_of(work.rows.start + i / group);
                let scores = &mut scores[i * PAGE_POSITIONS..][..PAGE_POSITIONS];
                let running = &mut running[i * lens.running()..][..lens.running()];
                soften(l, scores, keys, shape.scale, running, padded_v);
            }

            let mut v = pages.tile(page, KvPart::V, work.kv_head);
            if is_worth_decoding(v, active.len()) {
                decode_tile(l, v, KvPart::V, v_floats);
                v = Tile::F32(v_floats);
            }
            // Keys in ascending order, in runs that the same rows see.
            let mut key = 0;
            while key < PAGE_POSITIONS {
                let sees = |&row: &usize| keys_of(row).contains(&key);
                let next_change = |row: usize| {
                    let keys = keys_of(row);
                    if key < keys.start {
                        keys.start
                    } else if key < keys.end {
                        keys.end
                    } else {
                        PAGE_POSITIONS
                    }
                };
                let end = rows.clone().map(next_change).min().unwrap_or(PAGE_POSITIONS);
                let first_row = rows.clone().find(sees);
                if let Some(first_row) = first_row {
                    let last_row = (first_row..rows.end).take_while(sees).last().unwrap_or(first_row);
                    let (from, to) = (first_row - work.rows.start, last_row + 1 - work.rows.start);
                    let sums = Sums {
                        all: &mut running[from * group * lens.running()..to * group * lens.running()],
                        stride: lens.running(),
                    };
                    let factors = Factors {
                        all: &scores[from * group * PAGE_POSITIONS..],
                        stride: PAGE_POSITIONS,
                        terms: key..end,
                    };
                    add_products(l, factors, v, padded_v, (to - from) * group, sums);
                }
                key = end;
            }
        }
        let rows = work.rows_that_see(shape, positions);
        for i in (rows.start - work.rows.start) * group..(rows.end - work.rows.start) * group {
            let running = &mut running[i * lens.running()..][..lens.running()];
            let denominator = l.sum(l.load(lanes_at(running, padded_v)));
            // A running sum with its denominator summed up is a record.
            running[padded_v + 1] = denominator;
            running[padded_v] = running[padded_v + LANES];
            let record = &running[..lens.record()];
            match &mut out {
                Output::Rows(_) => {
                    fold_split(l, &mut totals[i * lens.record()..][..lens.record()], record, padded_v)
                }
                Output::Split(records) => records.row_mut(i).copy_from_slice(record),
            }
        }
    }
    if let Output::Rows(mut rows) = out {
        for (i, total) in totals.chunks_exact(lens.record()).enumerate() {
            let head = i % group * shape.kv.head_dim_v;
            finish(l, total, padded_v, &mut rows.row_mut(i / group)[head..head + shape.kv.head_dim_v]);
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

/// Q8_0 is always decoded first, F32 never.
fn is_worth_decoding(tile: Tile<'_>, queries: usize) -> bool {
    match tile {
        Tile::F32(_) => false,
        Tile::F16(_) => queries >= WORTH_DECODING,
        Tile::Q8_0 { .. } => true,
    }
}

/// Sixteen floats of a slice.
#[inline(always)]
fn lanes_at(values: &[f32], at: usize) -> &[f32; LANES] {
    &values[at..].as_chunks().0[0]
}

#[inline(always)]
fn lanes_at_mut(values: &mut [f32], at: usize) -> &mut [f32; LANES] {
    &mut values[at..].as_chunks_mut().0[0]
}

/// Turns the dot products of one query with a tile's keys into weights, and brings the split's running sums up to
/// the tile's greatest score. Positions outside `keys` get the score −∞, hence the weight +0.
#[inline(always)]
fn soften<L: Lanes>(
    l: L,
    scores: &mut [f32],
    keys: Range<usize>,
    scale: f32,
    running: &mut [f32],
    padded_v: usize,
) {
    // Bit i: key i belongs to the row. `keys` is not empty and ends at 64 or before.
    let visible = (u64::MAX >> (PAGE_POSITIONS - keys.len())) << keys.start;
    let (scores, _) = scores.as_chunks_mut::<LANES>();
    let mut greatest = l.splat(f32::NEG_INFINITY);
    for (i, scores) in scores.iter_mut().enumerate() {
        let seen = l.mask((visible >> (i * LANES)) as u16);
        let scaled = l.mul(l.load(scores), l.splat(scale));
        let score = l.select(seen, scaled, l.splat(f32::NEG_INFINITY));
        greatest = l.max(greatest, score);
        l.store(score, scores);
    }
    let before = running[padded_v + LANES];
    let tile = l.max_lane(greatest);
    let now = if tile > before { tile } else { before };
    if now > before {
        // exp(−∞) = +0 for the split's first tile. Multiplying by exp(0) = 1 would change nothing.
        let factor = exp(l, l.splat(before - now));
        let (sums, _) = running[..padded_v + LANES].as_chunks_mut::<LANES>();
        for sums in sums {
            l.store(l.mul(l.load(sums), factor), sums);
        }
        running[padded_v + LANES] = now;
    }
    let mut denominator = l.load(lanes_at(running, padded_v));
    for scores in scores {
        let weight = exp(l, l.sub(l.load(scores), l.splat(now)));
        denominator = l.add(denominator, weight);
        l.store(weight, scores);
    }
    l.store(denominator, lanes_at_mut(running, padded_v));
}

/// The state before the first split.
#[inline(always)]
fn start_total(total: &mut [f32], padded_v: usize) {
    total.fill(0.0);
    total[padded_v] = f32::NEG_INFINITY;
}

/// Adds the next split, in ascending order.
#[inline(always)]
fn fold_split<L: Lanes>(l: L, total: &mut [f32], split: &[f32], padded_v: usize) {
    let (before, of_split) = (total[padded_v], split[padded_v]);
    let now = if of_split > before { of_split } else { before };
    let keep = exp(l, l.splat(before - now));
    let add = exp(l, l.splat(of_split - now));
    let (sums, _) = total[..padded_v].as_chunks_mut::<LANES>();
    let (split_sums, _) = split[..padded_v].as_chunks::<LANES>();
    for (sum, split_sum) in sums.iter_mut().zip(split_sums) {
        l.store(l.fma(l.load(split_sum), add, l.mul(l.load(sum), keep)), sum);
    }
    let denominator = l.fma(l.splat(split[padded_v + 1]), add, l.mul(l.splat(total[padded_v + 1]), keep));
    total[padded_v + 1] = l.to_array(denominator)[0];
    total[padded_v] = now;
}

/// Divides by the denominator.
#[inline(always)]
fn finish<L: Lanes>(l: L, total: &[f32], padded_v: usize, out: &mut [f32]) {
    let denominator = l.splat(total[padded_v + 1]);
    let (sums, _) = total[..padded_v].as_chunks::<LANES>();
    for (out, sums) in out.chunks_mut(LANES).zip(sums) {
        l.store_tail(l.div(l.load(sums), denominator), out);
    }
}

/// One factor per query and term: query `q`'s are at `q * stride + terms`.
#[derive(Debug, Clone)]
struct Factors<'a> {
    all: &'a [f32],
    stride: usize,
    terms: Range<usize>,
}

/// One row of sums per query, `stride` floats apart.
#[derive(Debug)]
struct Sums<'a> {
    all: &'a mut [f32],
    stride: usize,
}

/// What a tile is made of.
trait Element: Copy {
    fn load<L: Lanes>(l: L, values: &[Self; LANES]) -> L::F;
}

impl Element for f32 {
    #[inline(always)]
    fn load<L: Lanes>(l: L, values: &[f32; LANES]) -> L::F {
        l.load(values)
    }
}

/// F16 bits.
impl Element for u16 {
    #[inline(always)]
    fn load<L: Lanes>(l: L, values: &[u16; LANES]) -> L::F {
        l.load_f16(values)
    }
}

/// sums[q][column] = fma(factors[q][t], tile[t][column], sums[q][column]) for each term t in ascending order: both
/// products of attention. `width` is the length of the tile's rows, a multiple of 16.
#[inline(always)]
fn add_products<L: Lanes>(
    l: L,
    factors: Factors<'_>,
    tile: Tile<'_>,
    width: usize,
    queries: usize,
    sums: Sums<'_>,
) {
    match tile {
        Tile::F32(values) => add_products_of(l, factors, values, width, queries, sums),
        Tile::F16(halves) => add_products_of(l, factors, halves, width, queries, sums),
        Tile::Q8_0 { .. } => unreachable!("Q8_0 tiles are decoded first"),
    }
}

#[inline(always)]
fn add_products_of<L: Lanes, E: Element>(
    l: L,
    factors: Factors<'_>,
    tile: &[E],
    width: usize,
    queries: usize,
    mut sums: Sums<'_>,
) {
    let mut column = 0;
    while column < width {
        // As many sums as the registers hold, see `Lanes::VECTORS`.
        let vectors = if L::VECTORS >= 32 { ((width - column) / LANES).min(4) } else { 1 };
        match vectors {
            4 => add_columns::<L, E, 4>(l, &factors, tile, width, column, queries, &mut sums),
            2 | 3 => add_columns::<L, E, 2>(l, &factors, tile, width, column, queries, &mut sums),
            _ => add_columns::<L, E, 1>(l, &factors, tile, width, column, queries, &mut sums),
        }
        column += LANES * if vectors == 3 { 2 } else { vectors };
    }
}

#[inline(always)]
fn add_columns<L: Lanes, E: Element, const V: usize>(
    l: L,
    factors: &Factors<'_>,
    tile: &[E],
    width: usize,
    column: usize,
    queries: usize,
    sums: &mut Sums<'_>,
) {
    let mut query = 0;
    while query < queries {
        query += match queries - query {
            1 => add_block::<L, E, 1, V>(l, factors, tile, width, column, query, sums),
            2 => add_block::<L, E, 2, V>(l, factors, tile, width, column, query, sums),
            3 | 5 => add_block::<L, E, 3, V>(l, factors, tile, width, column, query, sums),
            4 | 7 | 8 => add_block::<L, E, 4, V>(l, factors, tile, width, column, query, sums),
            _ => add_block::<L, E, 6, V>(l, factors, tile, width, column, query, sums),
        };
    }
}

/// `Q` queries times `V` vectors of columns, kept in registers. Returns `Q`.
#[inline(always)]
fn add_block<L: Lanes, E: Element, const Q: usize, const V: usize>(
    l: L,
    factors: &Factors<'_>,
    tile: &[E],
    width: usize,
    column: usize,
    query: usize,
    sums: &mut Sums<'_>,
) -> usize {
    let terms = factors.terms.len();
    let mut factor_of = [&[][..]; Q];
    let mut sum = [[l.splat(0.0); V]; Q];
    for (q, (factor_of, sum)) in factor_of.iter_mut().zip(&mut sum).enumerate() {
        *factor_of = &factors.all[(query + q) * factors.stride + factors.terms.start..][..terms];
        for (v, sum) in sum.iter_mut().enumerate() {
            *sum = l.load(lanes_at(sums.all, (query + q) * sums.stride + column + v * LANES));
        }
    }
    let rows = tile[factors.terms.start * width..factors.terms.end * width].chunks_exact(width);
    for (t, row) in rows.enumerate() {
        let row = &row[column..column + V * LANES].as_chunks::<LANES>().0[..V];
        let mut values = [l.splat(0.0); V];
        for (values, row) in values.iter_mut().zip(row) {
            *values = E::load(l, row);
        }
        for (factor_of, sum) in factor_of.iter().zip(&mut sum) {
            let factor = l.splat(factor_of[t]);
            for (sum, values) in sum.iter_mut().zip(values) {
                *sum = l.fma(factor, values, *sum);
            }
        }
    }
    for (q, sum) in sum.iter().enumerate() {
        for (v, sum) in sum.iter().enumerate() {
            l.store(*sum, lanes_at_mut(sums.all, (query + q) * sums.stride + column + v * LANES));
        }
    }
    Q
}
