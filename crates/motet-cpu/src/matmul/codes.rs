//! The quants of a block as numbers: from planes of bits to dot products in `i32`, exactly.

use super::quads::{Quads, pair};
use crate::activations::ActivationBlock;
use crate::panels::layout::{GROUP, Planes};

/// How the quants of a block are stored and what they are.
pub(crate) trait Codes: Copy {
    /// Where they lie in the panel.
    const PLANES: Planes;

    /// The eight groups of a block, from its planes.
    fn load<L: Quads>(self, l: L, planes: &[u8]) -> [L::Q; 8];
    /// Per row: Σ w · x over the 32 values of a block, where w is the quant with its offset.
    fn dot<L: Quads, const R: usize>(self, l: L, w: &[L::Q; 8], x: [&ActivationBlock; R]) -> [L::I; R];
    /// The same over the first and over the last 16 values.
    fn dot_halves<L: Quads, const R: usize>(
        self,
        l: L,
        w: &[L::Q; 8],
        x: [&ActivationBlock; R],
    ) -> [[L::I; R]; 2];
}

/// w = code − OFFSET, for codes of BITS bits (2 to 6).
#[derive(Clone, Copy)]
pub(crate) struct Unsigned<const BITS: u32, const OFFSET: i16>;

/// w = code − 128.
#[derive(Clone, Copy)]
pub(crate) struct SignedBytes;

/// `w = table[code]`, for codes of 4 bits.
#[derive(Clone, Copy)]
pub(crate) struct Table(pub(crate) &'static [i8; 16]);

impl<const BITS: u32, const OFFSET: i16> Codes for Unsigned<BITS, OFFSET> {
    const PLANES: Planes = match BITS {
        2 | 3 => Planes { low: 2, high: BITS as usize - 2 },
        4..=6 => Planes { low: 4, high: BITS as usize - 4 },
        _ => panic!("codes have 2 to 6 bits"),
    };

    #[inline(always)]
    fn load<L: Quads>(self, l: L, planes: &[u8]) -> [L::Q; 8] {
        let plane = |v: usize| l.load_quads(group(planes, v));
        match BITS {
            2 => twos(l, plane(0), plane(1)),
            3 => {
                let high = plane(2);
                let mut w = twos(l, plane(0), plane(1));
                w[0] = l.or_quads(w[0], l.field_up::<2>(high, 4));
                w[1] = l.or_quads(w[1], l.field_up::<1>(high, 4));
                w[2] = l.or_quads(w[2], l.field_down::<0>(high, 4));
                w[3] = l.or_quads(w[3], l.field_down::<1>(high, 4));
                w[4] = l.or_quads(w[4], l.field_down::<2>(high, 4));
                w[5] = l.or_quads(w[5], l.field_down::<3>(high, 4));
                w[6] = l.or_quads(w[6], l.field_down::<4>(high, 4));
                w[7] = l.or_quads(w[7], l.field_down::<5>(high, 4));
                w
            }
            4 => nibbles(l, planes),
            5 => {
                let high = plane(4);
                let mut w = nibbles(l, planes);
                w[0] = l.or_quads(w[0], l.field_up::<4>(high, 16));
                w[1] = l.or_quads(w[1], l.field_up::<3>(high, 16));
                w[2] = l.or_quads(w[2], l.field_up::<2>(high, 16));
                w[3] = l.or_quads(w[3], l.field_up::<1>(high, 16));
                w[4] = l.or_quads(w[4], l.field_down::<0>(high, 16));
                w[5] = l.or_quads(w[5], l.field_down::<1>(high, 16));
                w[6] = l.or_quads(w[6], l.field_down::<2>(high, 16));
                w[7] = l.or_quads(w[7], l.field_down::<3>(high, 16));
                w
            }
            _ => {
                let mut w = nibbles(l, planes);
                for v in 0..2 {
                    let high = plane(4 + v);
                    w[v] = l.or_quads(w[v], l.field_up::<4>(high, 48));
                    w[v + 2] = l.or_quads(w[v + 2], l.field_up::<2>(high, 48));
                    w[v + 4] = l.or_quads(w[v + 4], l.field_down::<0>(high, 48));
                    w[v + 6] = l.or_quads(w[v + 6], l.field_down::<2>(high, 48));
                }
                w
            }
        }
    }

    #[inline(always)]
    fn dot<L: Quads, const R: usize>(self, l: L, w: &[L::Q; 8], x: [&ActivationBlock; R]) -> [L::I; R] {
        l.dot::<BITS, 0, 8, R>(starts(l, pair(-OFFSET, -OFFSET), x), w, x)
    }

    #[inline(always)]
    fn dot_halves<L: Quads, const R: usize>(
        self,
        l: L,
        w: &[L::Q; 8],
        x: [&ActivationBlock; R],
    ) -> [[L::I; R]; 2] {
        [
            l.dot::<BITS, 0, 4, R>(starts(l, pair(-OFFSET, 0), x), w, x),
            l.dot::<BITS, 4, 8, R>(starts(l, pair(0, -OFFSET), x), w, x),
        ]
    }
}

/// What the offset of the codes adds to a dot product: offset · the sums of x.
#[inline(always)]
fn starts<L: Quads, const R: usize>(l: L, offset: i32, x: [&ActivationBlock; R]) -> [L::I; R] {
    let mut starts = [l.splat_i(0); R];
    if offset != 0 {
        for r in 0..R {
            starts[r] = l.dot_sums(l.splat_i(offset), x[r].sums);
        }
    }
    starts
}

impl Codes for SignedBytes {
    const PLANES: Planes = Planes { low: 8, high: 0 };

    #[inline(always)]
    fn load<L: Quads>(self, l: L, planes: &[u8]) -> [L::Q; 8] {
        let mut w = [l.signed(l.load_quads(group(planes, 0))); 8];
        for (v, w) in w.iter_mut().enumerate().skip(1) {
            *w = l.signed(l.load_quads(group(planes, v)));
        }
        w
    }

    #[inline(always)]
    fn dot<L: Quads, const R: usize>(self, l: L, w: &[L::Q; 8], x: [&ActivationBlock; R]) -> [L::I; R] {
        l.dot_signed(w, x)
    }

    #[inline(always)]
    fn dot_halves<L: Quads, const R: usize>(
        self,
        _: L,
        _: &[L::Q; 8],
        _: [&ActivationBlock; R],
    ) -> [[L::I; R]; 2] {
        unreachable!("no format has signed quants and scales of 16")
    }
}

impl Codes for Table {
    const PLANES: Planes = Planes { low: 4, high: 0 };

    #[inline(always)]
    fn load<L: Quads>(self, l: L, planes: &[u8]) -> [L::Q; 8] {
        let mut w = nibbles(l, planes);
        for w in &mut w {
            *w = l.table(*w, self.0);
        }
        w
    }

    #[inline(always)]
    fn dot<L: Quads, const R: usize>(self, l: L, w: &[L::Q; 8], x: [&ActivationBlock; R]) -> [L::I; R] {
        l.dot_signed(w, x)
    }

    #[inline(always)]
    fn dot_halves<L: Quads, const R: usize>(
        self,
        _: L,
        _: &[L::Q; 8],
        _: [&ActivationBlock; R],
    ) -> [[L::I; R]; 2] {
        unreachable!("no format has a table and scales of 16")
    }
}

/// Vector v of the planes of a block.
#[inline(always)]
fn group(planes: &[u8], v: usize) -> &[u8; GROUP] {
    &planes.as_chunks::<GROUP>().0[v]
}

/// A plane of 4 bits.
#[inline(always)]
fn nibbles<L: Quads>(l: L, planes: &[u8]) -> [L::Q; 8] {
    let mut w = [l.load_quads(group(planes, 0)); 8];
    for v in 0..4 {
        let packed = l.load_quads(group(planes, v));
        w[v] = l.field_down::<0>(packed, 15);
        w[v + 4] = l.field_down::<4>(packed, 15);
    }
    w
}

/// A plane of 2 bits.
#[inline(always)]
fn twos<L: Quads>(l: L, even: L::Q, odd: L::Q) -> [L::Q; 8] {
    [
        l.field_down::<0>(even, 3),
        l.field_down::<0>(odd, 3),
        l.field_down::<2>(even, 3),
        l.field_down::<2>(odd, 3),
        l.field_down::<4>(even, 3),
        l.field_down::<4>(odd, 3),
        l.field_down::<6>(even, 3),
        l.field_down::<6>(odd, 3),
    ]
}
