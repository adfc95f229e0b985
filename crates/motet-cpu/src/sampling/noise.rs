//! The noise of the race: a function of (seed, position, choice, token), by Philox4x32-10 (Salmon et al. 2011,
//! "Parallel random numbers: as easy as 1, 2, 3").

use super::{GROUP, Settings};
use crate::lanes::{LANES, Lanes, Scalar};
use crate::math;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// Philox4x32-10 on lanes: sixteen counters under one key.
#[inline(always)]
fn philox<L: Lanes>(l: L, mut c: [L::I; 4], mut key: [u32; 2]) -> [L::I; 4] {
    let m = MULTIPLIERS.map(|m| l.splat_i(m as i32));
    for _ in 0..10 {
        let high = [l.mul_high_unsigned(m[0], c[0]), l.mul_high_unsigned(m[1], c[2])];
        let low = [l.imul(m[0], c[0]), l.imul(m[1], c[2])];
        c = [
            l.xor(l.xor(high[1], c[1]), l.splat_i(key[0] as i32)),
            low[1],
            l.xor(l.xor(high[0], c[3]), l.splat_i(key[1] as i32)),
            low[0],
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    c
}

/// Philox4x32-10: four random words from a counter and a key.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    philox(Scalar, counter.map(|c| Scalar.splat_i(c as i32)), key).map(|words| words[0] as u32)
}

/// The random words of tokens `group · 64 …`: word w of lane i is that of token 4i + w.
#[inline(always)]
pub(super) fn words<L: Lanes>(l: L, settings: &Settings, group: u32) -> [L::I; 4] {
    const LANE: [i32; LANES] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    let counter = [
        l.splat_i(settings.position as i32),
        l.iadd(l.splat_i((group as i32) << 4), l.load_i(&LANE)),
        l.splat_i(settings.choice as i32),
        l.splat_i(0),
    ];
    philox(l, counter, [settings.seed as u32, (settings.seed >> 32) as u32])
}

/// v = (word + ½)·2⁻³², in f32.
#[inline(always)]
fn fraction<L: Lanes>(l: L, words: L::I) -> L::F {
    l.mul(l.add(l.to_float_unsigned(words), l.splat(0.5)), l.splat(1.0 / 4_294_967_296.0))
}

/// −ln(−log1p(−v)): a standard Gumbel number, −∞ … 22.88.
#[inline(always)]
pub(super) fn gumbel<L: Lanes>(l: L, words: L::I) -> L::F {
    let exponential = l.neg(math::log1p(l, l.neg(fraction(l, words))));
    l.neg(math::ln(l, exponential))
}

/// Whether any of the group's words could lift a token with t ≤ `t` to `score`: most often none can, and the logarithms
/// are spared. The noise is at most −ln v, so that takes v ≤ e^(t − score), here with room for all rounding.
#[inline(always)]
pub(super) fn may_reach<L: Lanes>(l: L, words: &[L::I; 4], score: f32, t: f32) -> bool {
    let room = 0.01 + (t.abs() + score.abs()) * 1e-6;
    let bound = math::exp(l, l.splat(t - score + room));
    let mut reach = 0;
    for &words in words {
        // Not "v ≤ bound": a bound that is NaN must exclude nothing.
        reach |= !l.mask_bits(l.lt(bound, fraction(l, words)));
    }
    reach != 0
}

/// The noise of a group's words, in order of the tokens.
#[inline(always)]
pub(super) fn in_order<L: Lanes>(l: L, words: [L::I; 4]) -> [L::F; 4] {
    let by_word =
        [l.to_array_i(words[0]), l.to_array_i(words[1]), l.to_array_i(words[2]), l.to_array_i(words[3])];
    let mut by_token = [0; GROUP];
    for i in 0..LANES {
        for w in 0..4 {
            by_token[4 * i + w] = by_word[w][i];
        }
    }
    let (chunks, _) = by_token.as_chunks::<LANES>();
    [
        gumbel(l, l.load_i(&chunks[0])),
        gumbel(l, l.load_i(&chunks[1])),
        gumbel(l, l.load_i(&chunks[2])),
        gumbel(l, l.load_i(&chunks[3])),
    ]
}
