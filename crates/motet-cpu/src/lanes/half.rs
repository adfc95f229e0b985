//! F16 and BF16 bits to `f32` and back: exact one way, nearest even the other.

use super::F16_MAX;

/// The value of F16 bits. NaN becomes a quiet NaN.
#[inline(always)]
pub fn f16_to_f32(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let rest = u32::from(half & 0x7fff);
    if rest >= 0x7c00 {
        let quiet = if rest > 0x7c00 { 0x0040_0000 } else { 0 };
        return f32::from_bits(sign | 0x7f80_0000 | quiet | (rest & 0x3ff) << 13);
    }
    // Read with F16's exponent bias in place of f32's, then scaled by 2^(127 − 15): exact, denormals too.
    f32::from_bits(sign | (f32::from_bits(rest << 13) * f32::from_bits((254 - 15) << 23)).to_bits())
}

/// F16 bits of the nearest value, ties to even; from 65520 on infinite. NaN becomes a quiet NaN.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = ((bits >> 16) & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    let half = if magnitude > 0x7f80_0000 {
        0x7e00 | (magnitude >> 13 & 0x3ff)
    } else if magnitude >= 0x477f_f000 {
        0x7c00
    } else if magnitude < 0x3880_0000 {
        // Below 2^-14 the result is a multiple of 2^-24: adding 0.5, whose last bit is 2^-24, rounds to it.
        (f32::from_bits(magnitude) + 0.5).to_bits() - 0x3f00_0000
    } else {
        let odd = magnitude >> 13 & 1;
        (magnitude - (112 << 23) + 0xfff + odd) >> 13
    };
    sign | half as u16
}

/// As [`f32_to_f16`], but beyond ±65504 (infinities too) it becomes ±65504. NaN stays NaN.
#[inline(always)]
pub fn f32_to_f16_saturating(x: f32) -> u16 {
    f32_to_f16(x.clamp(-F16_MAX, F16_MAX))
}

/// The value of BF16 bits.
#[inline(always)]
pub fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// BF16 bits of the nearest value, ties to even; too large becomes infinite. NaN becomes a quiet NaN.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    if x.is_nan() {
        return (bits >> 16 | 0x40) as u16;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}
