//! The definition of every operation on quads, in portable Rust.

use super::Quads;
use crate::activations::ActivationBlock;
use crate::lanes::{LANES, Scalar};
use crate::panels::layout::GROUP;

type Q = [u8; GROUP];

#[inline(always)]
fn each(mut a: Q, f: impl Fn(u8) -> u8) -> Q {
    for byte in &mut a {
        *byte = f(*byte);
    }
    a
}

/// `acc[lane]` += Σ w · x over some groups. Not inlined: a copy in every kernel would outgrow the instruction cache.
#[inline(never)]
fn accumulate(acc: &mut [i32; LANES], w: &[Q], x: &[i8]) {
    for (w, x) in w.iter().zip(x.as_chunks::<4>().0) {
        for (acc, w) in acc.iter_mut().zip(w.as_chunks::<4>().0) {
            for i in 0..4 {
                *acc += i32::from(w[i]) * i32::from(x[i]);
            }
        }
    }
}

/// The same for signed weights.
#[inline(never)]
fn accumulate_signed(acc: &mut [i32; LANES], w: &[Q], x: &[i8]) {
    for (w, x) in w.iter().zip(x.as_chunks::<4>().0) {
        for (acc, w) in acc.iter_mut().zip(w.as_chunks::<4>().0) {
            for i in 0..4 {
                *acc += i32::from(w[i] as i8) * i32::from(x[i]);
            }
        }
    }
}

impl Quads for Scalar {
    type Q = Q;
    const ROWS: usize = 1;

    #[inline(always)]
    fn load_quads(self, bytes: &[u8; GROUP]) -> Q {
        *bytes
    }
    #[inline(always)]
    fn field_down<const N: u32>(self, a: Q, mask: u8) -> Q {
        each(a, |byte| byte >> N & mask)
    }
    #[inline(always)]
    fn field_up<const N: u32>(self, a: Q, mask: u8) -> Q {
        each(a, |byte| byte << N & mask)
    }
    #[inline(always)]
    fn or_quads(self, mut a: Q, b: Q) -> Q {
        for (a, b) in a.iter_mut().zip(b) {
            *a |= b;
        }
        a
    }
    #[inline(always)]
    fn signed(self, biased: Q) -> Q {
        each(biased, |byte| byte ^ 0x80)
    }
    #[inline(always)]
    fn table(self, index: Q, table: &[i8; 16]) -> Q {
        each(index, |byte| table[usize::from(byte & 15)] as u8)
    }

    #[inline(always)]
    fn dot<const BITS: u32, const FROM: usize, const TO: usize, const R: usize>(
        self,
        mut start: [Self::I; R],
        w: &[Q; 8],
        x: [&ActivationBlock; R],
    ) -> [Self::I; R] {
        for (acc, x) in start.iter_mut().zip(x) {
            accumulate(acc, &w[FROM..TO], &x.quants[4 * FROM..4 * TO]);
        }
        start
    }
    #[inline(always)]
    fn dot_signed<const R: usize>(self, w: &[Q; 8], x: [&ActivationBlock; R]) -> [Self::I; R] {
        let mut sums = [[0; LANES]; R];
        for (acc, x) in sums.iter_mut().zip(x) {
            accumulate_signed(acc, w, &x.quants);
        }
        sums
    }
    #[inline(always)]
    fn dot_sums(self, mut a: Self::I, sums: i32) -> Self::I {
        for a in &mut a {
            *a = i32::from(*a as i16) * i32::from(sums as i16) + (*a >> 16) * (sums >> 16);
        }
        a
    }
}
