//! Sixteen lanes: the small machine that every kernel is written for, and its three implementations.
//!
//! A kernel is one `#[inline(always)]` function generic over [`Lanes`]; the macro `dispatch!` compiles it for each
//! [`Isa`](crate::isa::Isa). Every operation here returns the same bits on every implementation (any NaN
//! counts as equal to any other: payloads and signs of NaNs are not part of the promise). Nothing approximate
//! may ever be added: no reciprocals, no bf16 or tile products.

mod half;
mod scalar;

#[cfg(all(feature = "simd", target_arch = "x86_64"))]
mod avx2;
#[cfg(all(feature = "simd", target_arch = "x86_64"))]
mod avx512;

#[cfg(all(feature = "simd", target_arch = "x86_64"))]
pub use avx2::Avx2;
#[cfg(all(feature = "simd", target_arch = "x86_64"))]
pub use avx512::Avx512;
pub use half::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16, f32_to_f16_saturating};
pub use scalar::Scalar;

/// How many lanes there are, on every instruction set.
pub const LANES: usize = 16;

/// The greatest finite F16.
pub const F16_MAX: f32 = 65504.0;

/// Sixteen 32-bit lanes. A value of an implementing type is a token: having it proves that the CPU can run it.
///
/// Floats are IEEE binary32, every operation rounded once to nearest even. Integers are 32 bits and wrap.
pub trait Lanes: Copy {
    /// Sixteen `f32`.
    type F: Copy;
    /// Sixteen 32-bit integers; signedness is the operation's.
    type I: Copy;
    /// Sixteen truth values.
    type M: Copy;

    /// How many vectors of sixteen floats the registers hold: what a kernel may keep at hand. Never a matter of bits.
    const VECTORS: usize;

    /// Asks for the cache line at `bytes + ahead`; may be beyond anything that exists. It comes no nearer than the
    /// second-level cache: the first has too few requests open at a time to keep memory busy.
    #[inline(always)]
    fn prefetch(self, bytes: *const u8, ahead: usize) {
        let _ = (bytes, ahead);
    }

    // ---- into lanes and out ----

    /// The same number in every lane.
    fn splat(self, x: f32) -> Self::F;
    /// Lane i = `x[i]`.
    fn load(self, x: &[f32; LANES]) -> Self::F;
    /// `x[i]` = lane i.
    fn store(self, v: Self::F, x: &mut [f32; LANES]);
    /// Lanes of F16 bits, exactly.
    fn load_f16(self, x: &[u16; LANES]) -> Self::F;
    /// To F16 bits, nearest even; too large becomes infinite.
    fn store_f16(self, v: Self::F, x: &mut [u16; LANES]);
    /// The same integer in every lane.
    fn splat_i(self, x: i32) -> Self::I;
    /// Lane i = `x[i]`.
    fn load_i(self, x: &[i32; LANES]) -> Self::I;
    /// `x[i]` = lane i.
    fn store_i(self, v: Self::I, x: &mut [i32; LANES]);
    /// Lane i = `x[i]`, sign-extended.
    fn load_i8(self, x: &[i8; LANES]) -> Self::I;
    /// Lane i = `x[i]`, zero-extended.
    fn load_u8(self, x: &[u8; LANES]) -> Self::I;
    /// Lane i = `x[i]`, zero-extended.
    fn load_u16(self, x: &[u16; LANES]) -> Self::I;
    /// `x[i]` = the low 8 bits of lane i.
    fn store_i8(self, v: Self::I, x: &mut [i8; LANES]);
    /// `x[i]` = the low 16 bits of lane i.
    fn store_u16(self, v: Self::I, x: &mut [u16; LANES]);

    /// The first `x.len()` (≤ 16) lanes from `x`, the others `fill`.
    #[inline(always)]
    fn load_tail(self, x: &[f32], fill: f32) -> Self::F {
        let mut whole = [fill; LANES];
        whole[..x.len()].copy_from_slice(x);
        self.load(&whole)
    }

    /// The first `x.len()` (≤ 16) lanes into `x`.
    #[inline(always)]
    fn store_tail(self, v: Self::F, x: &mut [f32]) {
        let mut whole = [0.0; LANES];
        self.store(v, &mut whole);
        x.copy_from_slice(&whole[..x.len()]);
    }

    /// The first `x.len()` (≤ 16) lanes from F16 bits, the others +0.
    #[inline(always)]
    fn load_f16_tail(self, x: &[u16]) -> Self::F {
        let mut whole = [0; LANES];
        whole[..x.len()].copy_from_slice(x);
        self.load_f16(&whole)
    }

    /// Lanes of BF16 bits, exactly.
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> Self::F {
        self.floats(self.shl::<16>(self.load_u16(x)))
    }

    /// The first `x.len()` (≤ 16) lanes from BF16 bits, the others +0.
    #[inline(always)]
    fn load_bf16_tail(self, x: &[u16]) -> Self::F {
        let mut whole = [0; LANES];
        whole[..x.len()].copy_from_slice(x);
        self.load_bf16(&whole)
    }

    /// To F16 bits, nearest even; beyond ±65504 becomes ±65504 (infinities too), NaN stays NaN.
    #[inline(always)]
    fn store_f16_saturating(self, v: Self::F, x: &mut [u16; LANES]) {
        self.store_f16(self.clamp(v, -F16_MAX, F16_MAX), x);
    }

    /// To BF16 bits, nearest even; too large becomes infinite, NaN stays NaN.
    #[inline(always)]
    fn store_bf16(self, v: Self::F, x: &mut [u16; LANES]) {
        let bits = self.bits(v);
        let odd = self.and(self.shr::<16>(bits), self.splat_i(1));
        let rounded = self.shr::<16>(self.iadd(self.iadd(bits, self.splat_i(0x7fff)), odd));
        let quiet = self.or(self.shr::<16>(bits), self.splat_i(0x40));
        self.store_u16(self.select_i(self.is_nan(v), quiet, rounded), x);
    }

    /// All lanes, in order.
    #[inline(always)]
    fn to_array(self, v: Self::F) -> [f32; LANES] {
        let mut x = [0.0; LANES];
        self.store(v, &mut x);
        x
    }

    /// All lanes, in order.
    #[inline(always)]
    fn to_array_i(self, v: Self::I) -> [i32; LANES] {
        let mut x = [0; LANES];
        self.store_i(v, &mut x);
        x
    }

    // ---- floats ----

    /// a + b
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// a − b
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// a / b
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// √a
    fn sqrt(self, a: Self::F) -> Self::F;
    /// a · b + c, rounded once
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// c − a · b, rounded once
    fn fnma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`: b when either is NaN or both are zeros.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`: b when either is NaN or both are zeros.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// To the nearest integer, ties to even; −0 and everything that has no fraction stays.
    fn round_even(self, a: Self::F) -> Self::F;

    /// Into lo..=hi; NaN stays NaN.
    #[inline(always)]
    fn clamp(self, a: Self::F, lo: f32, hi: f32) -> Self::F {
        self.min(self.splat(hi), self.max(self.splat(lo), a))
    }

    /// |a|, by the sign bit.
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        self.floats(self.and(self.bits(a), self.splat_i(0x7fff_ffff)))
    }

    /// −a, by the sign bit.
    #[inline(always)]
    fn neg(self, a: Self::F) -> Self::F {
        self.floats(self.xor(self.bits(a), self.splat_i(i32::MIN)))
    }

    /// The sum of all lanes by one tree: lanes i and i + 8, then i and i + 4, i + 2, i + 1.
    fn sum(self, a: Self::F) -> f32;
    /// The greatest lane, by [`Lanes::max`] along the tree of [`Lanes::sum`] (lower lane first).
    fn max_lane(self, a: Self::F) -> f32;
    /// Lanes 2i and 2i + 1 exchanged.
    fn swap_pairs(self, a: Self::F) -> Self::F;

    // ---- between floats, bits and integers ----

    /// The bits of floats.
    fn bits(self, a: Self::F) -> Self::I;
    /// Floats of bits.
    fn floats(self, a: Self::I) -> Self::F;
    /// To the nearest integer, ties to even. NaN and what does not fit `i32` give `i32::MIN`; kernels clamp first.
    fn to_int(self, a: Self::F) -> Self::I;
    /// Signed integers to floats, nearest even.
    fn to_float(self, a: Self::I) -> Self::F;
    /// Unsigned integers to floats, rounded once, nearest even.
    fn to_float_unsigned(self, a: Self::I) -> Self::F;

    // ---- integers ----

    /// a + b, wrapping
    fn iadd(self, a: Self::I, b: Self::I) -> Self::I;
    /// a − b, wrapping
    fn isub(self, a: Self::I, b: Self::I) -> Self::I;
    /// The low 32 bits of a · b
    fn imul(self, a: Self::I, b: Self::I) -> Self::I;
    /// The high 32 bits of the unsigned product a · b
    fn mul_high_unsigned(self, a: Self::I, b: Self::I) -> Self::I;
    /// a & b
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    /// a | b
    fn or(self, a: Self::I, b: Self::I) -> Self::I;
    /// a ^ b
    fn xor(self, a: Self::I, b: Self::I) -> Self::I;
    /// a << N
    fn shl<const N: u32>(self, a: Self::I) -> Self::I;
    /// a >> N, zeros from above
    fn shr<const N: u32>(self, a: Self::I) -> Self::I;
    /// a >> N, the sign bit from above
    fn sar<const N: u32>(self, a: Self::I) -> Self::I;

    // ---- truth values ----

    /// a < b (false with a NaN)
    fn lt(self, a: Self::F, b: Self::F) -> Self::M;
    /// a ≤ b (false with a NaN)
    fn le(self, a: Self::F, b: Self::F) -> Self::M;
    /// a = b (false with a NaN)
    fn eq(self, a: Self::F, b: Self::F) -> Self::M;
    /// a is NaN
    fn is_nan(self, a: Self::F) -> Self::M;
    /// a = b
    fn ieq(self, a: Self::I, b: Self::I) -> Self::M;
    /// a > b, signed
    fn igt(self, a: Self::I, b: Self::I) -> Self::M;
    /// m ? a : b
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F;
    /// m ? a : b
    fn select_i(self, m: Self::M, a: Self::I, b: Self::I) -> Self::I;
    /// Lane i = bit i.
    fn mask(self, bits: u16) -> Self::M;
    /// Bit i = lane i.
    fn mask_bits(self, m: Self::M) -> u16;

    /// The first n (≤ 16) lanes true.
    #[inline(always)]
    fn first(self, n: usize) -> Self::M {
        self.mask(((1u32 << n) - 1) as u16)
    }

    /// Both true.
    #[inline(always)]
    fn both(self, a: Self::M, b: Self::M) -> Self::M {
        self.mask(self.mask_bits(a) & self.mask_bits(b))
    }
}

/// Compiles one kernel for every instruction set and makes the function that chooses.
///
/// ```text
/// dispatch! {
///     /// What it does.
///     pub fn double(x: &mut [f32]) = double_on_lanes;
/// }
/// #[inline(always)]
/// fn double_on_lanes<L: Lanes>(l: L, x: &mut [f32]) { … }
/// ```
/// makes `pub fn double(isa: Isa, x: &mut [f32])`. It panics if `isa` is not available. Type parameters
/// (`fn f<K: Format>(…)`) must follow from the arguments. The kernel and all it calls on lanes must be
/// `#[inline(always)]` functions (not closures), or they are compiled without the instruction set. The scalar lanes are compiled
/// twice, with and without FMA instructions: the same bits, but the library's `fmaf` is slow.
macro_rules! dispatch {
    ($(#[$meta:meta])* $vis:vis fn $name:ident $(<$($g:ident : $b:path),+>)?
        ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? = $kernel:path;) => {
        $(#[$meta])*
        $vis fn $name $(<$($g: $b),+>)? (isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "fma")]
            fn scalar_with_fma $(<$($g: $b),+>)? ($($arg: $ty),*) $(-> $ret)? {
                $kernel($crate::lanes::Scalar, $($arg),*)
            }
            #[cfg(all(feature = "simd", target_arch = "x86_64"))]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2 $(<$($g: $b),+>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: called only after `is_available` said that the CPU has these features.
                $kernel(unsafe { $crate::lanes::Avx2::assume_available() }, $($arg),*)
            }
            #[cfg(all(feature = "simd", target_arch = "x86_64"))]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
            fn avx512 $(<$($g: $b),+>)? ($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: called only after `is_available` said that the CPU has these features.
                $kernel(unsafe { $crate::lanes::Avx512::assume_available() }, $($arg),*)
            }
            assert!(isa.is_available(), "the instruction set {isa} is not available here");
            match isa {
                #[cfg(all(feature = "simd", target_arch = "x86_64"))]
                // SAFETY: available, as just asserted.
                $crate::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
                #[cfg(all(feature = "simd", target_arch = "x86_64"))]
                // SAFETY: available, as just asserted.
                $crate::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                _ if std::arch::is_x86_feature_detected!("fma") => {
                    // SAFETY: FMA is there, as just detected.
                    unsafe { scalar_with_fma($($arg),*) }
                }
                _ => $kernel($crate::lanes::Scalar, $($arg),*),
            }
        }
    };
}

pub(crate) use dispatch;

#[cfg(test)]
mod tests;
