//! Sixteen lanes as one 512-bit vector: AVX-512 F, BW, VL and DQ.

use std::arch::x86_64::*;

use super::{LANES, Lanes};

/// The proof that this CPU has AVX-512 F, BW, VL, DQ and VNNI, and all that [`super::Avx2`] stands for.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The CPU must have AVX2, FMA, F16C and AVX-512 F, BW, VL, DQ and VNNI.
    #[inline(always)]
    pub unsafe fn assume_available() -> Avx512 {
        Avx512(())
    }
}

type F = __m512;
type I = __m512i;
type M = __mmask16;

/// Intrinsics, in a method of the token.
macro_rules! simd {
    ($($body:tt)*) => {
        // SAFETY: `self` proves that the CPU has the features; pointers come from arrays of the size that is used.
        unsafe { $($body)* }
    };
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

impl Lanes for Avx512 {
    type F = F;
    type I = I;
    type M = M;

    const VECTORS: usize = 32;

    #[inline(always)]
    fn prefetch(self, bytes: *const u8, ahead: usize) {
        // SAFETY: a prefetch reads nothing; any address is allowed.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(bytes.wrapping_add(ahead).cast()) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> F {
        simd!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> F {
        simd!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn store(self, v: F, x: &mut [f32; LANES]) {
        simd!(_mm512_storeu_ps(x.as_mut_ptr(), v))
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> F {
        simd!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn store_f16(self, v: F, x: &mut [u16; LANES]) {
        simd!(_mm256_storeu_si256(x.as_mut_ptr().cast(), _mm512_cvtps_ph::<NEAREST>(v)))
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        simd!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn load_i(self, x: &[i32; LANES]) -> I {
        simd!(_mm512_loadu_si512(x.as_ptr().cast()))
    }
    #[inline(always)]
    fn store_i(self, v: I, x: &mut [i32; LANES]) {
        simd!(_mm512_storeu_si512(x.as_mut_ptr().cast(), v))
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> I {
        simd!(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8; LANES]) -> I {
        simd!(_mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_u16(self, x: &[u16; LANES]) -> I {
        simd!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn store_i8(self, v: I, x: &mut [i8; LANES]) {
        simd!(_mm_storeu_si128(x.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(v)))
    }
    #[inline(always)]
    fn store_u16(self, v: I, x: &mut [u16; LANES]) {
        simd!(_mm256_storeu_si256(x.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(v)))
    }
    #[inline(always)]
    fn load_tail(self, x: &[f32], fill: f32) -> F {
        assert!(x.len() <= LANES);
        let m = self.first(x.len());
        // Lanes that the mask leaves out are not read.
        simd!(_mm512_mask_loadu_ps(self.splat(fill), m, x.as_ptr()))
    }
    #[inline(always)]
    fn store_tail(self, v: F, x: &mut [f32]) {
        assert!(x.len() <= LANES);
        let m = self.first(x.len());
        // Lanes that the mask leaves out are not written.
        simd!(_mm512_mask_storeu_ps(x.as_mut_ptr(), m, v))
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        simd!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        simd!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        simd!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        simd!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: F) -> F {
        simd!(_mm512_sqrt_ps(a))
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        simd!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn fnma(self, a: F, b: F, c: F) -> F {
        simd!(_mm512_fnmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        simd!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        simd!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn round_even(self, a: F) -> F {
        simd!(_mm512_roundscale_ps::<NEAREST>(a))
    }
    #[inline(always)]
    fn sum(self, a: F) -> f32 {
        simd!({
            let eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn max_lane(self, a: F) -> f32 {
        simd!({
            let eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn swap_pairs(self, a: F) -> F {
        simd!(_mm512_permute_ps::<0b10_11_00_01>(a))
    }

    #[inline(always)]
    fn bits(self, a: F) -> I {
        simd!(_mm512_castps_si512(a))
    }
    #[inline(always)]
    fn floats(self, a: I) -> F {
        simd!(_mm512_castsi512_ps(a))
    }
    #[inline(always)]
    fn to_int(self, a: F) -> I {
        simd!(_mm512_cvtps_epi32(a))
    }
    #[inline(always)]
    fn to_float(self, a: I) -> F {
        simd!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn to_float_unsigned(self, a: I) -> F {
        simd!(_mm512_cvtepu32_ps(a))
    }

    #[inline(always)]
    fn iadd(self, a: I, b: I) -> I {
        simd!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn isub(self, a: I, b: I) -> I {
        simd!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn imul(self, a: I, b: I) -> I {
        simd!(_mm512_mullo_epi32(a, b))
    }
    #[inline(always)]
    fn mul_high_unsigned(self, a: I, b: I) -> I {
        simd!({
            let even = _mm512_mul_epu32(a, b);
            let odd = _mm512_mul_epu32(_mm512_srli_epi64::<32>(a), _mm512_srli_epi64::<32>(b));
            _mm512_mask_blend_epi32(0b1010_1010_1010_1010, _mm512_srli_epi64::<32>(even), odd)
        })
    }
    #[inline(always)]
    fn and(self, a: I, b: I) -> I {
        simd!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        simd!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn xor(self, a: I, b: I) -> I {
        simd!(_mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: I) -> I {
        simd!(_mm512_slli_epi32::<N>(a))
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: I) -> I {
        simd!(_mm512_srli_epi32::<N>(a))
    }
    #[inline(always)]
    fn sar<const N: u32>(self, a: I) -> I {
        simd!(_mm512_srai_epi32::<N>(a))
    }

    #[inline(always)]
    fn lt(self, a: F, b: F) -> M {
        simd!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn le(self, a: F, b: F) -> M {
        simd!(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b))
    }
    #[inline(always)]
    fn eq(self, a: F, b: F) -> M {
        simd!(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b))
    }
    #[inline(always)]
    fn is_nan(self, a: F) -> M {
        simd!(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a))
    }
    #[inline(always)]
    fn ieq(self, a: I, b: I) -> M {
        simd!(_mm512_cmpeq_epi32_mask(a, b))
    }
    #[inline(always)]
    fn igt(self, a: I, b: I) -> M {
        simd!(_mm512_cmpgt_epi32_mask(a, b))
    }
    #[inline(always)]
    fn select(self, m: M, a: F, b: F) -> F {
        simd!(_mm512_mask_blend_ps(m, b, a))
    }
    #[inline(always)]
    fn select_i(self, m: M, a: I, b: I) -> I {
        simd!(_mm512_mask_blend_epi32(m, b, a))
    }
    #[inline(always)]
    fn mask(self, bits: u16) -> M {
        bits
    }
    #[inline(always)]
    fn mask_bits(self, m: M) -> u16 {
        m
    }
}
