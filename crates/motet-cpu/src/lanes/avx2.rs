//! Sixteen lanes as two 256-bit vectors: AVX2, FMA and F16C.

use std::arch::x86_64::*;

use super::{LANES, Lanes};

/// The proof that this CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The CPU must have AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn assume_available() -> Avx2 {
        Avx2(())
    }
}

type F = [__m256; 2];
type I = [__m256i; 2];

/// Intrinsics, in a method of the token.
macro_rules! simd {
    ($($body:tt)*) => {
        // SAFETY: `self` proves that the CPU has the features; pointers come from arrays of the size that is used.
        unsafe { $($body)* }
    };
}

/// An intrinsic on each half of its operands.
macro_rules! halves {
    ($op:ident, $($arg:ident),+) => {
        simd!([$op($($arg[0]),+), $op($($arg[1]),+)])
    };
}

impl Avx2 {
    #[inline(always)]
    fn truth(self, m: I) -> F {
        simd!([_mm256_castsi256_ps(m[0]), _mm256_castsi256_ps(m[1])])
    }

    #[inline(always)]
    fn mul_high_half(self, a: __m256i, b: __m256i) -> __m256i {
        simd!({
            let even = _mm256_mul_epu32(a, b);
            let odd = _mm256_mul_epu32(_mm256_srli_epi64::<32>(a), _mm256_srli_epi64::<32>(b));
            _mm256_blend_epi32::<0b1010_1010>(_mm256_srli_epi64::<32>(even), odd)
        })
    }
}

impl Lanes for Avx2 {
    type F = F;
    type I = I;
    type M = F;

    const VECTORS: usize = 8;

    #[inline(always)]
    fn prefetch(self, bytes: *const u8, ahead: usize) {
        // SAFETY: a prefetch reads nothing; any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.wrapping_add(ahead).cast()) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> F {
        simd!([_mm256_set1_ps(x); 2])
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> F {
        simd!([_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))])
    }
    #[inline(always)]
    fn store(self, v: F, x: &mut [f32; LANES]) {
        simd!({
            _mm256_storeu_ps(x.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(x.as_mut_ptr().add(8), v[1]);
        })
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> F {
        simd!({
            let x: *const __m128i = x.as_ptr().cast();
            [_mm256_cvtph_ps(_mm_loadu_si128(x)), _mm256_cvtph_ps(_mm_loadu_si128(x.add(1)))]
        })
    }
    #[inline(always)]
    fn store_f16(self, v: F, x: &mut [u16; LANES]) {
        simd!({
            let x: *mut __m128i = x.as_mut_ptr().cast();
            _mm_storeu_si128(x, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[0]));
            _mm_storeu_si128(x.add(1), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v[1]));
        })
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        simd!([_mm256_set1_epi32(x); 2])
    }
    #[inline(always)]
    fn load_i(self, x: &[i32; LANES]) -> I {
        simd!({
            let x: *const __m256i = x.as_ptr().cast();
            [_mm256_loadu_si256(x), _mm256_loadu_si256(x.add(1))]
        })
    }
    #[inline(always)]
    fn store_i(self, v: I, x: &mut [i32; LANES]) {
        simd!({
            let x: *mut __m256i = x.as_mut_ptr().cast();
            _mm256_storeu_si256(x, v[0]);
            _mm256_storeu_si256(x.add(1), v[1]);
        })
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> I {
        simd!({
            let bytes = _mm_loadu_si128(x.as_ptr().cast());
            [_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))]
        })
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8; LANES]) -> I {
        simd!({
            let bytes = _mm_loadu_si128(x.as_ptr().cast());
            [_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes))]
        })
    }
    #[inline(always)]
    fn load_u16(self, x: &[u16; LANES]) -> I {
        simd!({
            let x: *const __m128i = x.as_ptr().cast();
            [_mm256_cvtepu16_epi32(_mm_loadu_si128(x)), _mm256_cvtepu16_epi32(_mm_loadu_si128(x.add(1)))]
        })
    }
    #[inline(always)]
    fn store_i8(self, v: I, x: &mut [i8; LANES]) {
        simd!({
            let low = _mm256_set1_epi32(0xff);
            // Packing works in 128-bit halves: words of lanes 0–3, 8–11 | 4–7, 12–15, put in order, then bytes.
            let words = _mm256_packus_epi32(_mm256_and_si256(v[0], low), _mm256_and_si256(v[1], low));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(x.as_mut_ptr().cast(), bytes);
        })
    }
    #[inline(always)]
    fn store_u16(self, v: I, x: &mut [u16; LANES]) {
        simd!({
            let low = _mm256_set1_epi32(0xffff);
            let words = _mm256_packus_epi32(_mm256_and_si256(v[0], low), _mm256_and_si256(v[1], low));
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(words);
            _mm256_storeu_si256(x.as_mut_ptr().cast(), words);
        })
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        halves!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        halves!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        halves!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        halves!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn sqrt(self, a: F) -> F {
        halves!(_mm256_sqrt_ps, a)
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        halves!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn fnma(self, a: F, b: F, c: F) -> F {
        halves!(_mm256_fnmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        halves!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        halves!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn round_even(self, a: F) -> F {
        simd!([
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[0]),
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a[1])
        ])
    }
    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        simd!({
            let eight = _mm256_add_ps(a[0], a[1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn max_lane(self, a: F) -> f32 {
        simd!({
            let eight = _mm256_max_ps(a[0], a[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn swap_pairs(self, a: F) -> F {
        simd!([_mm256_permute_ps::<0b10_11_00_01>(a[0]), _mm256_permute_ps::<0b10_11_00_01>(a[1])])
    }

    #[inline(always)]
    fn bits(self, a: F) -> I {
        halves!(_mm256_castps_si256, a)
    }
    #[inline(always)]
    fn floats(self, a: I) -> F {
        halves!(_mm256_castsi256_ps, a)
    }
    #[inline(always)]
    fn to_int(self, a: F) -> I {
        halves!(_mm256_cvtps_epi32, a)
    }
    #[inline(always)]
    fn to_float(self, a: I) -> F {
        halves!(_mm256_cvtepi32_ps, a)
    }
    #[inline(always)]
    fn to_float_unsigned(self, a: I) -> F {
        // Both halves of the bits are exact, their sum is rounded once.
        let high = self.to_float(self.shr::<16>(a));
        let low = self.to_float(self.and(a, self.splat_i(0xffff)));
        self.fma(high, self.splat(65536.0), low)
    }

    #[inline(always)]
    fn iadd(self, a: I, b: I) -> I {
        halves!(_mm256_add_epi32, a, b)
    }
    #[inline(always)]
    fn isub(self, a: I, b: I) -> I {
        halves!(_mm256_sub_epi32, a, b)
    }
    #[inline(always)]
    fn imul(self, a: I, b: I) -> I {
        halves!(_mm256_mullo_epi32, a, b)
    }
    #[inline(always)]
    fn mul_high_unsigned(self, a: I, b: I) -> I {
        [self.mul_high_half(a[0], b[0]), self.mul_high_half(a[1], b[1])]
    }
    #[inline(always)]
    fn and(self, a: I, b: I) -> I {
        halves!(_mm256_and_si256, a, b)
    }
    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        halves!(_mm256_or_si256, a, b)
    }
    #[inline(always)]
    fn xor(self, a: I, b: I) -> I {
        halves!(_mm256_xor_si256, a, b)
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: I) -> I {
        simd!({
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_sll_epi32(a[0], n), _mm256_sll_epi32(a[1], n)]
        })
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: I) -> I {
        simd!({
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_srl_epi32(a[0], n), _mm256_srl_epi32(a[1], n)]
        })
    }
    #[inline(always)]
    fn sar<const N: u32>(self, a: I) -> I {
        simd!({
            let n = _mm_cvtsi32_si128(N as i32);
            [_mm256_sra_epi32(a[0], n), _mm256_sra_epi32(a[1], n)]
        })
    }

    #[inline(always)]
    fn lt(self, a: F, b: F) -> F {
        simd!([_mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])])
    }
    #[inline(always)]
    fn le(self, a: F, b: F) -> F {
        simd!([_mm256_cmp_ps::<_CMP_LE_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_LE_OQ>(a[1], b[1])])
    }
    #[inline(always)]
    fn eq(self, a: F, b: F) -> F {
        simd!([_mm256_cmp_ps::<_CMP_EQ_OQ>(a[0], b[0]), _mm256_cmp_ps::<_CMP_EQ_OQ>(a[1], b[1])])
    }
    #[inline(always)]
    fn is_nan(self, a: F) -> F {
        simd!([_mm256_cmp_ps::<_CMP_UNORD_Q>(a[0], a[0]), _mm256_cmp_ps::<_CMP_UNORD_Q>(a[1], a[1])])
    }
    #[inline(always)]
    fn ieq(self, a: I, b: I) -> F {
        self.truth(halves!(_mm256_cmpeq_epi32, a, b))
    }
    #[inline(always)]
    fn igt(self, a: I, b: I) -> F {
        self.truth(halves!(_mm256_cmpgt_epi32, a, b))
    }
    #[inline(always)]
    fn select(self, m: F, a: F, b: F) -> F {
        halves!(_mm256_blendv_ps, b, a, m)
    }
    #[inline(always)]
    fn select_i(self, m: F, a: I, b: I) -> I {
        self.bits(self.select(m, self.floats(a), self.floats(b)))
    }
    #[inline(always)]
    fn mask(self, bits: u16) -> F {
        simd!({
            let bits = _mm256_set1_epi32(i32::from(bits));
            let low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let high = _mm256_slli_epi32::<8>(low);
            self.truth([
                _mm256_cmpeq_epi32(_mm256_and_si256(bits, low), low),
                _mm256_cmpeq_epi32(_mm256_and_si256(bits, high), high),
            ])
        })
    }
    #[inline(always)]
    fn mask_bits(self, m: F) -> u16 {
        simd!((_mm256_movemask_ps(m[0]) | _mm256_movemask_ps(m[1]) << 8) as u16)
    }
    #[inline(always)]
    fn both(self, a: F, b: F) -> F {
        halves!(_mm256_and_ps, a, b)
    }
}
