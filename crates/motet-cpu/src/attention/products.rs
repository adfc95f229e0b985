//! Both products of attention, queries × keys and weights × values, as one kernel: a few queries times a few vectors of
//! a tile's columns in registers, terms in ascending order.

use std::ops::Range;

use crate::kv::Tile;
use crate::lanes::{LANES, Lanes};

/// One factor per query and term: query `q`'s are at `q * stride + terms`.
#[derive(Debug, Clone)]
pub(super) struct Factors<'a> {
    pub(super) all: &'a [f32],
    pub(super) stride: usize,
    pub(super) terms: Range<usize>,
}

/// One row of sums per query, `stride` floats apart.
#[derive(Debug)]
pub(super) struct Sums<'a> {
    pub(super) all: &'a mut [f32],
    pub(super) stride: usize,
}

/// The tile that is needed a tile later, asked for line by line meanwhile.
#[derive(Debug, Clone, Copy)]
pub(super) struct Next {
    bytes: *const u8,
    lines_per_term: usize,
}

impl Next {
    /// All of `tile`, while `terms` terms are added up.
    pub(super) fn tile(tile: Tile<'_>, terms: usize) -> Self {
        let (bytes, len) = tile.extent();
        Self { bytes, lines_per_term: len.div_ceil(CACHE_LINE).div_ceil(terms) }
    }

    /// None.
    pub(super) const NONE: Self = Self { bytes: std::ptr::null(), lines_per_term: 0 };

    #[inline(always)]
    fn ask<L: Lanes>(self, l: L, term: usize) {
        for line in 0..self.lines_per_term {
            l.prefetch(self.bytes, (term * self.lines_per_term + line) * CACHE_LINE);
        }
    }
}

const CACHE_LINE: usize = 64;

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

/// `sums[q][column] = fma(factors[q][t], tile[t][column], sums[q][column])` for each term t in ascending order: both
/// products of attention. `columns` are computed, of a tile whose rows have `width`; both are multiples of 16. `next` is a
/// matter of time only.
#[inline(always)]
pub(super) fn add_products<L: Lanes>(
    l: L,
    factors: Factors<'_>,
    tile: Tile<'_>,
    width: usize,
    columns: usize,
    queries: usize,
    sums: Sums<'_>,
    next: Next,
) {
    match tile {
        Tile::F32(values) => add_products_of(l, factors, values, width, columns, queries, sums, next),
        Tile::F16(halves) => add_products_of(l, factors, halves, width, columns, queries, sums, next),
        Tile::Q8_0 { .. } => unreachable!("Q8_0 tiles are decoded first"),
    }
}

#[inline(always)]
fn add_products_of<L: Lanes, E: Element>(
    l: L,
    factors: Factors<'_>,
    tile: &[E],
    width: usize,
    columns: usize,
    queries: usize,
    mut sums: Sums<'_>,
    mut next: Next,
) {
    let mut column = 0;
    while column < columns {
        // As many sums as the registers hold, see `Lanes::VECTORS`.
        let vectors = if L::VECTORS >= 32 { ((columns - column) / LANES).min(4) } else { 1 };
        match vectors {
            4 => add_columns::<L, E, 4>(l, &factors, tile, width, column, queries, &mut sums, next),
            2 | 3 => add_columns::<L, E, 2>(l, &factors, tile, width, column, queries, &mut sums, next),
            _ => add_columns::<L, E, 1>(l, &factors, tile, width, column, queries, &mut sums, next),
        }
        next = Next::NONE;
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
    mut next: Next,
) {
    let mut query = 0;
    while query < queries {
        query += match queries - query {
            1 => add_block::<L, E, 1, V>(l, factors, tile, width, column, query, sums, next),
            2 => add_block::<L, E, 2, V>(l, factors, tile, width, column, query, sums, next),
            3 | 5 => add_block::<L, E, 3, V>(l, factors, tile, width, column, query, sums, next),
            4 | 7 | 8 => add_block::<L, E, 4, V>(l, factors, tile, width, column, query, sums, next),
            _ => add_block::<L, E, 6, V>(l, factors, tile, width, column, query, sums, next),
        };
        next = Next::NONE;
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
    next: Next,
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
        next.ask(l, factors.terms.start + t);
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

/// Sixteen floats of a slice.
#[inline(always)]
pub(super) fn lanes_at(values: &[f32], at: usize) -> &[f32; LANES] {
    &values[at..].as_chunks().0[0]
}

#[inline(always)]
pub(super) fn lanes_at_mut(values: &mut [f32], at: usize) -> &mut [f32; LANES] {
    &mut values[at..].as_chunks_mut().0[0]
}
