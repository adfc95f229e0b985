//! Quads as two 256-bit vectors: `maddubs` adds two products in 16 bits and saturates, so never more is summed
//! there than fits.

use std::arch::x86_64::*;

use super::{Quads, four};
use crate::activations::ActivationBlock;
use crate::lanes::Avx2;
use crate::panels::layout::GROUP;

/// Intrinsics, in a method of the token.
macro_rules! simd {
    ($($body:tt)*) => {
        // SAFETY: `self` proves that the CPU has the features; pointers come from arrays of the size that is used.
        unsafe { $($body)* }
    };
}

type Q = [__m256i; 2];

/// Products of unsigned weights with the same four quants in every lane, added in pairs.
#[inline(always)]
fn products(w: __m256i, x: i32) -> __m256i {
    // SAFETY: called by methods of the token only, which proves that the CPU has the features.
    unsafe { _mm256_maddubs_epi16(w, _mm256_set1_epi32(x)) }
}

/// How many groups of weights below 2^bits can be summed in `i16`: two products of each, |x| ≤ 127.
const fn groups_in_16_bits(bits: u32) -> usize {
    let two_products = 2 * ((1 << bits) - 1) * 127;
    let groups = i16::MAX as usize / two_products;
    if groups >= 8 {
        8
    } else if groups >= 4 {
        4
    } else {
        assert!(groups >= 2);
        2
    }
}

impl Quads for Avx2 {
    type Q = Q;
    const ROWS: usize = 4;

    #[inline(always)]
    fn load_quads(self, bytes: &[u8; GROUP]) -> Q {
        let (low, high) = bytes.split_at(GROUP / 2);
        simd!([_mm256_loadu_si256(low.as_ptr().cast()), _mm256_loadu_si256(high.as_ptr().cast())])
    }
    #[inline(always)]
    fn field_down<const N: u32>(self, a: Q, mask: u8) -> Q {
        // What a 16-bit shift brings over from the neighbour is masked away.
        simd!({
            let (n, mask) = (_mm_cvtsi32_si128(N as i32), _mm256_set1_epi8(mask as i8));
            [
                _mm256_and_si256(_mm256_srl_epi16(a[0], n), mask),
                _mm256_and_si256(_mm256_srl_epi16(a[1], n), mask),
            ]
        })
    }
    #[inline(always)]
    fn field_up<const N: u32>(self, a: Q, mask: u8) -> Q {
        simd!({
            let (n, mask) = (_mm_cvtsi32_si128(N as i32), _mm256_set1_epi8(mask as i8));
            [
                _mm256_and_si256(_mm256_sll_epi16(a[0], n), mask),
                _mm256_and_si256(_mm256_sll_epi16(a[1], n), mask),
            ]
        })
    }
    #[inline(always)]
    fn or_quads(self, a: Q, b: Q) -> Q {
        simd!([_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])])
    }
    #[inline(always)]
    fn signed(self, biased: Q) -> Q {
        simd!({
            let sign = _mm256_set1_epi8(-128);
            [_mm256_xor_si256(biased[0], sign), _mm256_xor_si256(biased[1], sign)]
        })
    }
    #[inline(always)]
    fn table(self, index: Q, table: &[i8; 16]) -> Q {
        simd!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            [_mm256_shuffle_epi8(table, index[0]), _mm256_shuffle_epi8(table, index[1])]
        })
    }

    #[inline(always)]
    fn dot<const BITS: u32, const FROM: usize, const TO: usize, const R: usize>(
        self,
        start: [Q; R],
        w: &[Q; 8],
        x: [&ActivationBlock; R],
    ) -> [Q; R] {
        let together = const { groups_in_16_bits(BITS) };
        let mut acc = start;
        let mut g = FROM;
        while g < TO {
            let end = if g + together < TO { g + together } else { TO };
            for r in 0..R {
                for half in 0..2 {
                    let mut words = products(w[g][half], four(x[r], g));
                    for g in g + 1..end {
                        words = simd!(_mm256_add_epi16(words, products(w[g][half], four(x[r], g))));
                    }
                    let sums = simd!(_mm256_madd_epi16(words, _mm256_set1_epi16(1)));
                    acc[r][half] = simd!(_mm256_add_epi32(acc[r][half], sums));
                }
            }
            g = end;
        }
        acc
    }
    #[inline(always)]
    fn dot_signed<const R: usize>(self, w: &[Q; 8], x: [&ActivationBlock; R]) -> [Q; R] {
        // |w| ≤ 128 and |x| ≤ 127: two products are at most 32,512.
        let mut acc = [simd!([_mm256_setzero_si256(); 2]); R];
        for g in 0..8 {
            for half in 0..2 {
                let magnitude = simd!(_mm256_abs_epi8(w[g][half]));
                for r in 0..R {
                    acc[r][half] = simd!({
                        let x = _mm256_sign_epi8(_mm256_set1_epi32(four(x[r], g)), w[g][half]);
                        let words = _mm256_maddubs_epi16(magnitude, x);
                        _mm256_add_epi32(acc[r][half], _mm256_madd_epi16(words, _mm256_set1_epi16(1)))
                    });
                }
            }
        }
        acc
    }
    #[inline(always)]
    fn dot_sums(self, a: Q, sums: i32) -> Q {
        simd!({
            let sums = _mm256_set1_epi32(sums);
            [_mm256_madd_epi16(a[0], sums), _mm256_madd_epi16(a[1], sums)]
        })
    }
}
