//! Activations for quantised weights: rows of floats as int8 with one scale per 32 values.
//!
//! There is one activation format for every weight format, it depends on the row alone, and one quantisation
//! serves all users of a buffer. Values are never looked at beyond their own block of 32.

use bytemuck::{Pod, Zeroable};

use crate::lanes::{LANES, Lanes, dispatch};

/// How many values share a scale.
pub const BLOCK: usize = 32;

/// Below this (2⁻¹⁰⁰) the largest magnitude of a block counts as zero.
const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);

/// 32 values of a row: `value ≈ d · quant`.
///
/// A row of K values is K / 32 of these, one after the other, so that a kernel follows one stream per row.
/// All zero bytes are a block of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct ActivationBlock {
    /// −127 … 127.
    pub(crate) quants: [i8; BLOCK],
    /// The scale.
    pub(crate) d: f32,
    /// d · (the sum of the quants), rounded: what a format's minimum is multiplied with.
    pub(crate) d_sum: f32,
    /// The sums of the first and the last 16 quants, as `i16` in the low and the high half.
    pub(crate) sums: i32,
}

dispatch! {
    /// Quantises `values` (rows of a multiple of 32, one after the other) into one block per 32 values.
    ///
    /// With amax the largest magnitude of a block: d = amax / 127 and quant = x / d, rounded to nearest even and
    /// clamped to ±127. If amax < 2⁻¹⁰⁰, d and all quants are 0. If a value is infinite or NaN, d is NaN and all
    /// quants are 0, so that every product of the row is NaN.
    ///
    /// # Panics
    /// If `values` is not 32 times as long as `blocks`.
    pub fn quantise(values: &[f32], blocks: &mut [ActivationBlock]) = quantise_blocks;
}

#[inline(always)]
fn quantise_blocks<L: Lanes>(l: L, values: &[f32], blocks: &mut [ActivationBlock]) {
    assert_eq!(values.len(), blocks.len() * BLOCK, "values of {} blocks", blocks.len());
    for (values, block) in values.as_chunks::<BLOCK>().0.iter().zip(blocks) {
        let (halves, _) = values.as_chunks::<LANES>();
        let (low, high) = (l.load(&halves[0]), l.load(&halves[1]));
        let amax = l.max_lane(l.max(l.abs(low), l.abs(high)));
        // A sum of magnitudes would overflow; NaN − NaN and ∞ − ∞ are NaN, all else is 0.
        let odd = l.mask_bits(l.is_nan(l.sub(low, low))) | l.mask_bits(l.is_nan(l.sub(high, high)));
        if odd == 0 && amax >= SMALLEST {
            let d = amax / 127.0;
            let (of_low, of_high) = block.quants.split_at_mut(LANES);
            let low = quants(l, low, d, of_low);
            let high = quants(l, high, d, of_high);
            block.d = d;
            block.d_sum = d * (low + high) as f32;
            block.sums = low & 0xffff | high << 16;
        } else {
            let d = if odd == 0 { 0.0 } else { f32::NAN };
            *block = ActivationBlock { quants: [0; BLOCK], d, d_sum: d, sums: 0 };
        }
    }
}

/// Sixteen quants, and their sum.
///
/// A product with 1 / d is within 3 · 127 · 2⁻²⁴ < 3·10⁻⁵ of the quotient, so it rounds to the same integer unless it
/// lies close to the middle between two: then the quotient itself decides. (Divisions are slow.)
#[inline(always)]
fn quants<L: Lanes>(l: L, values: L::F, d: f32, into: &mut [i8]) -> i32 {
    let quotient = l.mul(values, l.splat(1.0 / d));
    let mut rounded = l.round_even(quotient);
    let off = l.abs(l.sub(quotient, rounded));
    if l.mask_bits(l.lt(l.splat(0.5 - 1e-4), off)) != 0 {
        rounded = l.round_even(l.div(values, l.splat(d)));
    }
    let rounded = l.clamp(rounded, -127.0, 127.0);
    let into: &mut [i8; LANES] = into.try_into().expect("half a block");
    l.store_i8(l.to_int(rounded), into);
    // Exact in any order: whole numbers below 2²⁴.
    l.sum(rounded) as i32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::testing::Random;

    /// The rule, step by step.
    fn expected(values: &[f32]) -> ActivationBlock {
        let amax = values.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
        let d = amax / 127.0;
        let mut quants = [0i8; BLOCK];
        for (q, x) in quants.iter_mut().zip(values) {
            *q = (x / d).round_ties_even().clamp(-127.0, 127.0) as i8;
        }
        let low: i32 = quants[..16].iter().map(|&q| i32::from(q)).sum();
        let high: i32 = quants[16..].iter().map(|&q| i32::from(q)).sum();
        let sums = i32::from_le_bytes(
            [(low as i16).to_le_bytes(), (high as i16).to_le_bytes()].concat().try_into().unwrap(),
        );
        ActivationBlock { quants, d, d_sum: d * (low + high) as f32, sums }
    }

    fn one(isa: Isa, values: &[f32]) -> ActivationBlock {
        // Filled with rubbish before: nothing of a block may survive.
        let mut block = ActivationBlock { quants: [99; BLOCK], d: 7.0, d_sum: 7.0, sums: 7 };
        quantise(isa, values, std::slice::from_mut(&mut block));
        block
    }

    #[test]
    fn blocks_follow_the_rule_on_every_instruction_set() {
        let mut random = Random::new(1);
        for round in 0..2000 {
            let magnitude = 2f32.powi(round % 220 - 98);
            let mut values = [0f32; BLOCK];
            for v in &mut values {
                *v = random.unit() * magnitude;
            }
            if round % 3 == 0 {
                // Halves of d: the ties.
                let d = magnitude.max(1e-20);
                values = std::array::from_fn(|i| (i as f32 * 7.0 - 100.0 + 0.5) * d);
                values[5] = 127.0 * d;
            }
            for isa in Isa::available() {
                assert_eq!(one(isa, &values), expected(&values), "{isa} {values:?}");
            }
        }
    }

    #[test]
    fn quotients_beside_the_middle_of_two_integers_round_like_the_division() {
        let mut random = Random::new(2);
        for _ in 0..2000 {
            let amax = random.unit().abs() + 0.01;
            let d = amax / 127.0;
            let mut values: [f32; BLOCK] = std::array::from_fn(|i| {
                let middle = (i as f32 * 7.0 - 110.0 + 0.5) * d;
                f32::from_bits(middle.to_bits().wrapping_add_signed(i as i32 % 7 - 3))
            });
            values[31] = amax;
            for isa in Isa::available() {
                assert_eq!(one(isa, &values), expected(&values), "{isa} {values:?}");
            }
        }
    }

    #[test]
    fn zeros_and_tiny_values_become_zero_and_the_limit_does_not() {
        let zero = ActivationBlock { quants: [0; BLOCK], d: 0.0, d_sum: 0.0, sums: 0 };
        for isa in Isa::available() {
            assert_eq!(one(isa, &[0.0; BLOCK]), zero);
            assert_eq!(one(isa, &[-0.0; BLOCK]), zero);
            assert_eq!(one(isa, &[f32::from_bits(1); BLOCK]), zero);
            assert_eq!(one(isa, &[f32::from_bits(SMALLEST.to_bits() - 1); BLOCK]), zero);
            let limit = one(isa, &[-SMALLEST; BLOCK]);
            assert_eq!((limit.quants, limit.d), ([-127; BLOCK], SMALLEST / 127.0));
        }
        assert_eq!(f64::from(SMALLEST), 2f64.powi(-100));
    }

    #[test]
    fn what_is_not_finite_poisons_its_block_only() {
        for isa in Isa::available() {
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0x7f80_0001)] {
                let mut values = [1.0; 3 * BLOCK];
                values[BLOCK + 17] = bad;
                let mut blocks = [ActivationBlock::zeroed(); 3];
                quantise(isa, &values, &mut blocks);
                assert!(blocks[1].d.is_nan() && blocks[1].d_sum.is_nan());
                assert_eq!((blocks[1].quants, blocks[1].sums), ([0; BLOCK], 0));
                assert_eq!(blocks[0], expected(&values[..BLOCK]));
                assert_eq!(blocks[2], blocks[0]);
            }
        }
    }

    #[test]
    fn the_greatest_floats_keep_a_finite_scale() {
        for isa in Isa::available() {
            let block = one(isa, &[f32::MAX; BLOCK]);
            assert_eq!((block.quants, block.d), ([127; BLOCK], f32::MAX / 127.0));
        }
    }
}
