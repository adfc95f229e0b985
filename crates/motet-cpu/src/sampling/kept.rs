//! Top-k and top-p as one prefix of the tokens in order of (t descending, id ascending), found without sorting them.
//!
//! Weights e^(t − max) are rounded to multiples of 2⁻³⁰ and summed as integers: exact, so the order of summation
//! does not matter and a selection by digits (radix) gives what a sort would give. The digits are those of the bits of
//! t, made to ascend with t: 11, 11 and 10 bits.

use super::Settings;
use crate::lanes::{LANES, Lanes};
use crate::math;

const ONE: f32 = 1_073_741_824.0;

/// A prefix: all tokens above `t`, and those equal to it with ids up to `last`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Kept {
    t: f32,
    last: u32,
}

const ALL: Kept = Kept { t: f32::MIN, last: u32::MAX };

impl Kept {
    /// Which of 16 tokens from `first_id` on belong to the prefix, by bit.
    #[inline(always)]
    pub(super) fn lanes<L: Lanes>(&self, l: L, t: L::F, first_id: u32) -> u16 {
        let bound = l.splat(self.t);
        let above = l.mask_bits(l.lt(bound, t));
        let equal = l.mask_bits(l.eq(bound, t));
        // How many of the 16 ids are ≤ last.
        let count = (u64::from(self.last) + 1).saturating_sub(u64::from(first_id)).min(16);
        above | equal & ((1u32 << count) - 1) as u16
    }
}

/// How much of the order is to be kept: whichever comes first.
#[derive(Clone, Copy)]
struct Target {
    count: u64,
    mass: u64,
}

/// What has been kept so far, or what a bin holds.
#[derive(Clone, Copy, Default)]
struct Amount {
    count: u64,
    mass: u64,
}

impl Amount {
    #[inline(always)]
    fn plus(self, other: Amount) -> Amount {
        Amount { count: self.count + other.count, mass: self.mass + other.mass }
    }

    #[inline(always)]
    fn reaches(self, target: Target) -> bool {
        self.count >= target.count || self.mass >= target.mass
    }
}

/// The prefix that top-k and top-p leave. `t` is finite and padded with −∞ to whole lanes; `max` its greatest.
#[inline(always)]
pub(super) fn prefix<L: Lanes>(l: L, t: &[f32], max: f32, settings: &Settings) -> Kept {
    let (chunks, _) = t.as_chunks::<LANES>();
    let by_count = settings.top_k > 0 && (settings.top_k as usize) < t.len();
    let by_mass = settings.top_p < 1.0;
    if !by_count && !by_mass {
        return ALL;
    }
    let mass = if by_mass {
        let share = f64::from(settings.top_p.max(0.0)) * total_mass(l, chunks, max) as f64;
        (share.ceil() as u64).max(1)
    } else {
        u64::MAX
    };
    let target = Target { count: if by_count { u64::from(settings.top_k) } else { u64::MAX }, mass };
    // Most often the prefix ends soon after the greatest: far tokens are only looked at if it does not.
    for reach in [8.0, 24.0, f32::INFINITY] {
        let floor = if reach == f32::INFINITY { f32::MIN } else { max - reach };
        if let Some(kept) = select(l, chunks, max, floor, target) {
            return kept;
        }
    }
    ALL
}

/// Weights of 16 tokens in units of 2⁻³⁰.
#[inline(always)]
fn masses<L: Lanes>(l: L, t: L::F, max: f32) -> L::I {
    let weight = math::exp(l, l.sub(t, l.splat(max)));
    // Not above 1 by rounding, so that 2³⁰ is the most.
    l.to_int(l.mul(l.min(weight, l.splat(1.0)), l.splat(ONE)))
}

#[inline(always)]
fn total_mass<L: Lanes>(l: L, chunks: &[[f32; LANES]], max: f32) -> u64 {
    let mut total = 0;
    // High and low 16 bits apart: sums of 2¹⁴ of them stay below 2³¹.
    for chunks in chunks.chunks(1 << 14) {
        let (mut high, mut low) = (l.splat_i(0), l.splat_i(0));
        for chunk in chunks {
            let mass = masses(l, l.load(chunk), max);
            high = l.iadd(high, l.shr::<16>(mass));
            low = l.iadd(low, l.and(mass, l.splat_i(0xffff)));
        }
        for (high, low) in l.to_array_i(high).into_iter().zip(l.to_array_i(low)) {
            total += (high as u64) << 16;
            total += low as u64;
        }
    }
    total
}

/// The bits of t as integers that ascend with t.
#[inline(always)]
fn keys<L: Lanes>(l: L, t: L::F) -> L::I {
    let bits = l.bits(t);
    l.xor(bits, l.or(l.sar::<31>(bits), l.splat_i(i32::MIN)))
}

fn of_key(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key ^ 0x8000_0000 } else { !key })
}

/// The prefix if it ends among the tokens with t ≥ `floor`.
#[inline(always)]
fn select<L: Lanes>(l: L, chunks: &[[f32; LANES]], max: f32, floor: f32, target: Target) -> Option<Kept> {
    let (first, kept, _) = descend(l, chunks, max, floor, target, Amount::default(), Top)?;
    let (second, kept, _) = descend(l, chunks, max, floor, target, kept, Middle(first))?;
    let (key, kept, last) = descend(l, chunks, max, floor, target, kept, Bottom(second))?;
    // All of the last bin are equal, in t and so in mass: keep as many as it takes, lower ids first.
    let by_count = target.count - kept.count;
    let each = last.mass / last.count;
    let by_mass = if each == 0 { u64::MAX } else { (target.mass - kept.mass).div_ceil(each) };
    let mut needed = by_count.min(by_mass);
    let t = of_key(key);
    for (i, chunk) in chunks.iter().enumerate() {
        let mut equal = l.mask_bits(l.eq(l.load(chunk), l.splat(t)));
        if u64::from(equal.count_ones()) < needed {
            needed -= u64::from(equal.count_ones());
            continue;
        }
        for _ in 1..needed {
            equal &= equal - 1;
        }
        return Some(Kept { t, last: (i * LANES) as u32 + equal.trailing_zeros() });
    }
    None
}

/// Which digit of the keys is looked at, of which keys.
trait Digit: Copy {
    /// Of 16 keys: which count, and their digits.
    fn of<L: Lanes>(self, l: L, keys: L::I) -> (u16, L::I);
    /// The high digits of all keys in that bin.
    fn key(self, bin: u32) -> u32;
}

/// The first 11 bits of all keys.
#[derive(Clone, Copy)]
struct Top;

/// The next 11 bits of keys with these first ones.
#[derive(Clone, Copy)]
struct Middle(u32);

/// The last 10 bits of keys with these first ones.
#[derive(Clone, Copy)]
struct Bottom(u32);

impl Digit for Top {
    #[inline(always)]
    fn of<L: Lanes>(self, l: L, keys: L::I) -> (u16, L::I) {
        (u16::MAX, l.shr::<21>(keys))
    }
    fn key(self, bin: u32) -> u32 {
        bin
    }
}

impl Digit for Middle {
    #[inline(always)]
    fn of<L: Lanes>(self, l: L, keys: L::I) -> (u16, L::I) {
        let same = l.mask_bits(l.ieq(l.shr::<21>(keys), l.splat_i(self.0 as i32)));
        (same, l.and(l.shr::<10>(keys), l.splat_i(0x7ff)))
    }
    fn key(self, bin: u32) -> u32 {
        self.0 << 11 | bin
    }
}

impl Digit for Bottom {
    #[inline(always)]
    fn of<L: Lanes>(self, l: L, keys: L::I) -> (u16, L::I) {
        let same = l.mask_bits(l.ieq(l.shr::<10>(keys), l.splat_i(self.0 as i32)));
        (same, l.and(keys, l.splat_i(0x3ff)))
    }
    fn key(self, bin: u32) -> u32 {
        self.0 << 10 | bin
    }
}

/// The bin of a digit in which the target is reached, coming from above with `kept`: its key so far, what is kept
/// above it, and what it holds. `None` if it is not reached.
#[inline(always)]
fn descend<L: Lanes>(
    l: L,
    chunks: &[[f32; LANES]],
    max: f32,
    floor: f32,
    target: Target,
    mut kept: Amount,
    digit: impl Digit,
) -> Option<(u32, Amount, Amount)> {
    let mut bins = [Amount::default(); 2048];
    for chunk in chunks {
        let t = l.load(chunk);
        let near = l.mask_bits(l.le(l.splat(floor), t));
        if near == 0 {
            continue;
        }
        let (same, digits) = digit.of(l, keys(l, t));
        let mut lanes = near & same;
        if lanes == 0 {
            continue;
        }
        let masses = if target.mass == u64::MAX { l.splat_i(0) } else { masses(l, t, max) };
        let (digits, masses) = (l.to_array_i(digits), l.to_array_i(masses));
        while lanes != 0 {
            let lane = lanes.trailing_zeros() as usize;
            lanes &= lanes - 1;
            let bin = &mut bins[digits[lane] as usize & 2047];
            *bin = bin.plus(Amount { count: 1, mass: masses[lane] as u64 });
        }
    }
    for (bin, amount) in bins.into_iter().enumerate().rev() {
        let with = kept.plus(amount);
        if amount.count > 0 && with.reaches(target) {
            return Some((digit.key(bin as u32), kept, amount));
        }
        kept = with;
    }
    None
}
