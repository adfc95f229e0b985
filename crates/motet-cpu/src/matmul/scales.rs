//! The scales and minima of a block: from the panel's bytes to what the sums are multiplied with.

use super::quads::Quads;
use crate::lanes::LANES;

/// How the scales of a format are stored and combined.
pub(crate) trait Scales: Copy {
    /// Blocks of 32 per header.
    const BLOCKS: usize;
    /// Bytes of the header.
    const HEADER: usize;
    /// Bytes of sub-scales per block.
    const SUB: usize;
    /// Whether each 16 values have a scale (and a minimum) of their own.
    const HALVES: bool;
    /// Whether there is a minimum.
    const MIN: bool;

    /// d and the minimum (or its scale) of a super-block.
    fn header<L: Quads>(self, l: L, header: &[u8]) -> [L::F; 2];
    /// The factors of one block.
    fn block<L: Quads>(self, l: L, header: [L::F; 2], sub: &[u8]) -> Factors<L>;
}

/// The factors of one block. What a format does not have is zero and unused.
#[derive(Clone, Copy)]
pub(crate) struct Factors<L: Quads> {
    /// What the dot product is multiplied with, beside the row's own scale.
    pub(crate) scale: L::F,
    /// What the sum of the row's quants is multiplied with; its sign is included.
    pub(crate) min: L::F,
    /// The integer scales of the first and the last 16 values, as floats.
    pub(crate) halves: [L::F; 2],
    /// The integer minima of the first and the last 16 values, as a pair of `i16`.
    pub(crate) min_halves: L::I,
}

impl<L: Quads> Factors<L> {
    #[inline(always)]
    fn new(l: L, scale: L::F, min: L::F) -> Self {
        let zero = l.splat(0.0);
        Factors { scale, min, halves: [zero; 2], min_halves: l.splat_i(0) }
    }
}

/// d: F16 per block of 32.
#[derive(Clone, Copy)]
pub(crate) struct Scale;

/// d and min: F16 per block of 32; w = d · q + min.
#[derive(Clone, Copy)]
pub(crate) struct ScaleMin;

/// d = 2^(e − 128) per block of 32, where e is a byte.
#[derive(Clone, Copy)]
pub(crate) struct Exponent;

/// d: F16 per 256; a signed byte s per 32; w = d · s · q.
#[derive(Clone, Copy)]
pub(crate) struct SubScale;

/// d and min: F16 per 256; bytes s and m per 32; w = d · s · q − min · m.
#[derive(Clone, Copy)]
pub(crate) struct SubScaleMin;

/// d: F16 per 256; a signed byte s per 16; w = d · s · q.
#[derive(Clone, Copy)]
pub(crate) struct HalfScale;

/// d and min: F16 per 256; four bits s and four bits m per 16; w = d · s · q − min · m.
#[derive(Clone, Copy)]
pub(crate) struct HalfScaleMin;

impl Scales for Scale {
    const BLOCKS: usize = 1;
    const HEADER: usize = 2 * LANES;
    const SUB: usize = 0;
    const HALVES: bool = false;
    const MIN: bool = false;

    #[inline(always)]
    fn header<L: Quads>(self, l: L, header: &[u8]) -> [L::F; 2] {
        [f16s(l, header, 0), l.splat(0.0)]
    }
    #[inline(always)]
    fn block<L: Quads>(self, l: L, [d, min]: [L::F; 2], _: &[u8]) -> Factors<L> {
        Factors::new(l, d, min)
    }
}

impl Scales for ScaleMin {
    const BLOCKS: usize = 1;
    const HEADER: usize = 4 * LANES;
    const SUB: usize = 0;
    const HALVES: bool = false;
    const MIN: bool = true;

    #[inline(always)]
    fn header<L: Quads>(self, l: L, header: &[u8]) -> [L::F; 2] {
        [f16s(l, header, 0), f16s(l, header, 1)]
    }
    #[inline(always)]
    fn block<L: Quads>(self, l: L, [d, min]: [L::F; 2], _: &[u8]) -> Factors<L> {
        Factors::new(l, d, min)
    }
}

impl Scales for Exponent {
    const BLOCKS: usize = 1;
    const HEADER: usize = LANES;
    const SUB: usize = 0;
    const HALVES: bool = false;
    const MIN: bool = false;

    #[inline(always)]
    fn header<L: Quads>(self, l: L, header: &[u8]) -> [L::F; 2] {
        let e = l.load_u8(bytes(header, 0));
        // 2^(e − 128): a normal number from e = 2 on, 2^-127 and 2^-128 are denormal.
        let normal = l.shl::<23>(l.isub(e, l.splat_i(1)));
        let denormal = l.shl::<21>(l.iadd(e, l.splat_i(1)));
        [l.floats(l.select_i(l.igt(e, l.splat_i(1)), normal, denormal)), l.splat(0.0)]
    }
    #[inline(always)]
    fn block<L: Quads>(self, l: L, [d, min]: [L::F; 2], _: &[u8]) -> Factors<L> {
        Factors::new(l, d, min)
    }
}

impl Scales for SubScale {
    const BLOCKS: usize = 8;
    const HEADER: usize = 2 * LANES;
    const SUB: usize = LANES;
    const HALVES: bool = false;
    const MIN: bool = false;

    #[inline(always)]
    fn header<L: Quads>(self, l: L, header: &[u8]) -> [L::F; 2] {
        Scale.header(l, header)
    }
    #[inline(always)]
    fn block<L: Quads>(self, l: L, [d, min]: [L::F; 2], sub: &[u8]) -> Factors<L> {
        Factors::new(l, l.mul(d, l.to_float(l.load_i8(signed(sub, 0)))), min)
    }
}

impl Scales for SubScaleMin {
    const BLOCKS: usize = 8;
    const HEADER: usize = 4 * LANES;
    const SUB: usize = 2 * LANES;
    const HALVES: bool = false;
    const MIN: bool = true;

    #[inline(always)]
    fn header<L: Quads>(self, l: L, header: &[u8]) -> [L::F; 2] {
        [f16s(l, header, 0), l.neg(f16s(l, header, 1))]
    }
    #[inline(always)]
    fn block<L: Quads>(self, l: L, [d, min]: [L::F; 2], sub: &[u8]) -> Factors<L> {
        let (s, m) = (l.load_u8(bytes(sub, 0)), l.load_u8(bytes(sub, 1)));
        Factors::new(l, l.mul(d, l.to_float(s)), l.mul(min, l.to_float(m)))
    }
}

impl Scales for HalfScale {
    const BLOCKS: usize = 8;
    const HEADER: usize = 2 * LANES;
    const SUB: usize = 2 * LANES;
    const HALVES: bool = true;
    const MIN: bool = false;

    #[inline(always)]
    fn header<L: Quads>(self, l: L, header: &[u8]) -> [L::F; 2] {
        Scale.header(l, header)
    }
    #[inline(always)]
    fn block<L: Quads>(self, l: L, [d, min]: [L::F; 2], sub: &[u8]) -> Factors<L> {
        let s = [l.to_float(l.load_i8(signed(sub, 0))), l.to_float(l.load_i8(signed(sub, 1)))];
        Factors { halves: s, ..Factors::new(l, d, min) }
    }
}

impl Scales for HalfScaleMin {
    const BLOCKS: usize = 8;
    const HEADER: usize = 4 * LANES;
    const SUB: usize = 2 * LANES;
    const HALVES: bool = true;
    const MIN: bool = true;

    #[inline(always)]
    fn header<L: Quads>(self, l: L, header: &[u8]) -> [L::F; 2] {
        SubScaleMin.header(l, header)
    }
    #[inline(always)]
    fn block<L: Quads>(self, l: L, [d, min]: [L::F; 2], sub: &[u8]) -> Factors<L> {
        let (first, last) = (l.load_u8(bytes(sub, 0)), l.load_u8(bytes(sub, 1)));
        let low = l.splat_i(15);
        Factors {
            halves: [l.to_float(l.and(first, low)), l.to_float(l.and(last, low))],
            min_halves: l.or(l.shr::<4>(first), l.shl::<16>(l.shr::<4>(last))),
            ..Factors::new(l, d, min)
        }
    }
}

/// The i-th F16 of every channel.
#[inline(always)]
fn f16s<L: Quads>(l: L, header: &[u8], i: usize) -> L::F {
    l.load_f16(bytemuck::from_bytes(&header[2 * LANES * i..][..2 * LANES]))
}

/// The i-th byte of every channel.
#[inline(always)]
fn bytes(header: &[u8], i: usize) -> &[u8; LANES] {
    &header.as_chunks::<LANES>().0[i]
}

/// The i-th byte of every channel, signed.
#[inline(always)]
fn signed(header: &[u8], i: usize) -> &[i8; LANES] {
    bytemuck::cast_ref(bytes(header, i))
}
