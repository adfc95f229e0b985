//! Quads as one 512-bit vector: VNNI multiplies unsigned by signed bytes and adds four products to a lane, exactly.

use std::arch::x86_64::*;

use super::{Quads, four, pair};
use crate::activations::ActivationBlock;
use crate::lanes::{Avx512, Lanes};
use crate::panels::layout::GROUP;

/// Intrinsics, in a method of the token.
macro_rules! simd {
    ($($body:tt)*) => {
        // SAFETY: `self` proves that the CPU has the features; pointers come from arrays of the size that is used.
        unsafe { $($body)* }
    };
}

impl Quads for Avx512 {
    type Q = __m512i;
    const ROWS: usize = 8;

    #[inline(always)]
    fn load_quads(self, bytes: &[u8; GROUP]) -> __m512i {
        simd!(_mm512_loadu_si512(bytes.as_ptr().cast()))
    }
    #[inline(always)]
    fn field_down<const N: u32>(self, a: __m512i, mask: u8) -> __m512i {
        // What a 16-bit shift brings over from the neighbour is masked away.
        simd!(_mm512_and_si512(
            _mm512_srl_epi16(a, _mm_cvtsi32_si128(N as i32)),
            _mm512_set1_epi8(mask as i8)
        ))
    }
    #[inline(always)]
    fn field_up<const N: u32>(self, a: __m512i, mask: u8) -> __m512i {
        simd!(_mm512_and_si512(
            _mm512_sll_epi16(a, _mm_cvtsi32_si128(N as i32)),
            _mm512_set1_epi8(mask as i8)
        ))
    }
    #[inline(always)]
    fn or_quads(self, a: __m512i, b: __m512i) -> __m512i {
        simd!(_mm512_or_si512(a, b))
    }
    // Signed weights keep 128 added, and their dot products start from −128 · the sum of x.
    #[inline(always)]
    fn signed(self, biased: __m512i) -> __m512i {
        biased
    }
    #[inline(always)]
    fn table(self, index: __m512i, table: &[i8; 16]) -> __m512i {
        let biased = table.map(|value| value as u8 ^ 0x80);
        simd!({
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(biased.as_ptr().cast()));
            _mm512_shuffle_epi8(table, index)
        })
    }

    #[inline(always)]
    fn dot<const BITS: u32, const FROM: usize, const TO: usize, const R: usize>(
        self,
        start: [__m512i; R],
        w: &[__m512i; 8],
        x: [&ActivationBlock; R],
    ) -> [__m512i; R] {
        let mut acc = start;
        for g in FROM..TO {
            for r in 0..R {
                acc[r] = simd!(_mm512_dpbusd_epi32(acc[r], w[g], _mm512_set1_epi32(four(x[r], g))));
            }
        }
        acc
    }
    #[inline(always)]
    fn dot_signed<const R: usize>(self, w: &[__m512i; 8], x: [&ActivationBlock; R]) -> [__m512i; R] {
        let offset = self.splat_i(pair(-128, -128));
        let mut start = [offset; R];
        for r in 0..R {
            start[r] = self.dot_sums(offset, x[r].sums);
        }
        self.dot::<8, 0, 8, R>(start, w, x)
    }
    #[inline(always)]
    fn dot_sums(self, a: __m512i, sums: i32) -> __m512i {
        simd!(_mm512_madd_epi16(a, _mm512_set1_epi32(sums)))
    }
}
