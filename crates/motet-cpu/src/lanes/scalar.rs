//! The definition of every operation on lanes, in portable Rust.

use super::{LANES, Lanes, half};

/// Sixteen lanes as arrays. Runs everywhere.
#[derive(Clone, Copy, Debug)]
pub struct Scalar;

type F = [f32; LANES];
type I = [i32; LANES];
type M = [bool; LANES];

/// One lane's expression, for all lanes.
macro_rules! each {
    ($i:ident => $lane:expr) => {{
        let mut out = [Default::default(); LANES];
        for $i in 0..LANES {
            out[$i] = $lane;
        }
        out
    }};
}

impl Lanes for Scalar {
    type F = F;
    type I = I;
    type M = M;

    const VECTORS: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> F {
        *x
    }
    #[inline(always)]
    fn store(self, v: F, x: &mut [f32; LANES]) {
        *x = v;
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> F {
        each!(i => half::f16_to_f32(x[i]))
    }
    #[inline(always)]
    fn store_f16(self, v: F, x: &mut [u16; LANES]) {
        *x = each!(i => half::f32_to_f16(v[i]));
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> I {
        [x; LANES]
    }
    #[inline(always)]
    fn load_i(self, x: &[i32; LANES]) -> I {
        *x
    }
    #[inline(always)]
    fn store_i(self, v: I, x: &mut [i32; LANES]) {
        *x = v;
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> I {
        each!(i => i32::from(x[i]))
    }
    #[inline(always)]
    fn load_u8(self, x: &[u8; LANES]) -> I {
        each!(i => i32::from(x[i]))
    }
    #[inline(always)]
    fn load_u16(self, x: &[u16; LANES]) -> I {
        each!(i => i32::from(x[i]))
    }
    #[inline(always)]
    fn store_i8(self, v: I, x: &mut [i8; LANES]) {
        *x = each!(i => v[i] as i8);
    }
    #[inline(always)]
    fn store_u16(self, v: I, x: &mut [u16; LANES]) {
        *x = each!(i => v[i] as u16);
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        each!(i => a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        each!(i => a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        each!(i => a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        each!(i => a[i] / b[i])
    }
    #[inline(always)]
    fn sqrt(self, a: F) -> F {
        each!(i => a[i].sqrt())
    }
    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        each!(i => a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn fnma(self, a: F, b: F, c: F) -> F {
        each!(i => (-a[i]).mul_add(b[i], c[i]))
    }
    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        each!(i => if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        each!(i => if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn round_even(self, a: F) -> F {
        // Adding and taking away 2^23 rounds to an integer; the sign is put back for results of −0.
        each!(i => {
            let magnitude = a[i].abs();
            let rounded = if magnitude < 8_388_608.0 { (magnitude + 8_388_608.0) - 8_388_608.0 } else { magnitude };
            rounded.copysign(a[i])
        })
    }
    #[inline(always)]
    fn sum(self, mut a: F) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] += a[i + half];
            }
        }
        a[0]
    }
    #[inline(always)]
    fn max_lane(self, mut a: F) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                a[i] = if a[i] > a[i + half] { a[i] } else { a[i + half] };
            }
        }
        a[0]
    }
    #[inline(always)]
    fn swap_pairs(self, a: F) -> F {
        each!(i => a[i ^ 1])
    }

    #[inline(always)]
    fn bits(self, a: F) -> I {
        each!(i => a[i].to_bits() as i32)
    }
    #[inline(always)]
    fn floats(self, a: I) -> F {
        each!(i => f32::from_bits(a[i] as u32))
    }
    #[inline(always)]
    fn to_int(self, a: F) -> I {
        let rounded = self.round_even(a);
        // Above 2^31 − 128 comes 2^31; the comparison is also false for NaN.
        each!(i => if rounded[i].abs() < 2_147_483_648.0 { rounded[i] as i32 } else { i32::MIN })
    }
    #[inline(always)]
    fn to_float(self, a: I) -> F {
        each!(i => a[i] as f32)
    }
    #[inline(always)]
    fn to_float_unsigned(self, a: I) -> F {
        each!(i => a[i] as u32 as f32)
    }

    #[inline(always)]
    fn iadd(self, a: I, b: I) -> I {
        each!(i => a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn isub(self, a: I, b: I) -> I {
        each!(i => a[i].wrapping_sub(b[i]))
    }
    #[inline(always)]
    fn imul(self, a: I, b: I) -> I {
        each!(i => a[i].wrapping_mul(b[i]))
    }
    #[inline(always)]
    fn mul_high_unsigned(self, a: I, b: I) -> I {
        each!(i => ((u64::from(a[i] as u32) * u64::from(b[i] as u32)) >> 32) as i32)
    }
    #[inline(always)]
    fn and(self, a: I, b: I) -> I {
        each!(i => a[i] & b[i])
    }
    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        each!(i => a[i] | b[i])
    }
    #[inline(always)]
    fn xor(self, a: I, b: I) -> I {
        each!(i => a[i] ^ b[i])
    }
    #[inline(always)]
    fn shl<const N: u32>(self, a: I) -> I {
        each!(i => a[i] << N)
    }
    #[inline(always)]
    fn shr<const N: u32>(self, a: I) -> I {
        each!(i => (a[i] as u32 >> N) as i32)
    }
    #[inline(always)]
    fn sar<const N: u32>(self, a: I) -> I {
        each!(i => a[i] >> N)
    }

    #[inline(always)]
    fn lt(self, a: F, b: F) -> M {
        each!(i => a[i] < b[i])
    }
    #[inline(always)]
    fn le(self, a: F, b: F) -> M {
        each!(i => a[i] <= b[i])
    }
    #[inline(always)]
    fn eq(self, a: F, b: F) -> M {
        each!(i => a[i] == b[i])
    }
    #[inline(always)]
    fn is_nan(self, a: F) -> M {
        each!(i => a[i].is_nan())
    }
    #[inline(always)]
    fn ieq(self, a: I, b: I) -> M {
        each!(i => a[i] == b[i])
    }
    #[inline(always)]
    fn igt(self, a: I, b: I) -> M {
        each!(i => a[i] > b[i])
    }
    #[inline(always)]
    fn select(self, m: M, a: F, b: F) -> F {
        each!(i => if m[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn select_i(self, m: M, a: I, b: I) -> I {
        each!(i => if m[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn mask(self, bits: u16) -> M {
        each!(i => bits >> i & 1 == 1)
    }
    #[inline(always)]
    fn mask_bits(self, m: M) -> u16 {
        let mut bits = 0;
        for (i, lane) in m.into_iter().enumerate() {
            bits |= u16::from(lane) << i;
        }
        bits
    }
}
