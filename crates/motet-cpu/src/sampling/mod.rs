//! The arithmetic of choosing a token from one row of logits, and of what people ask about the row.
//!
//! A choice is a race (see [`pick`]): it depends on the logits, the request's settings and the position only, so it
//! is the same alone and among others, with drafts and without. The logits are read, never changed; nothing is
//! allocated. What a row's session may *continue* with (stops, limits) is not known here.

mod kept;
mod noise;
mod probability;

pub use noise::philox4x32_10;
pub use probability::{LogNormaliser, digest, most_likely};

use self::kept::Kept;
use crate::isa::Isa;
use crate::lanes::{LANES, Lanes, dispatch};
use crate::math;

/// Tokens that share one look at the noise: four words of sixteen counters.
const GROUP: usize = 4 * LANES;

/// Below this a temperature counts as 0: what noise could do is far below the rounding of logits so stretched.
const COLD: f32 = 1e-6;

/// A row of logits with NaN or an infinity. Its session ends with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the logits are not finite: the model overflowed on this conversation, or its weights are damaged")]
pub struct NonFiniteLogits;

/// How a token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Key of the noise.
    pub seed: u64,
    /// Which of the `n` choices of a request this is.
    pub choice: u32,
    /// The position of the token that is being chosen.
    pub position: u32,
    /// 0 (or less than 1e-6) takes the greatest processed logit.
    pub temperature: f32,
    /// Tokens kept by rank; 0 keeps all.
    pub top_k: u32,
    /// Tokens kept by cumulated probability; 1 keeps all.
    pub top_p: f32,
    /// Tokens kept whose probability is at least this share of the greatest; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies other logits of seen tokens; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once per generated occurrence; 0 is off.
    pub frequency_penalty: f32,
    /// Subtracted once if generated; 0 is off.
    pub presence_penalty: f32,
}

/// The length of the scratch that [`pick`] needs for rows of this many logits.
pub const fn scratch_len(vocab: usize) -> usize {
    vocab.next_multiple_of(GROUP)
}

/// Chooses a token.
///
/// 1. Logits are processed: each bias is added, then each seen token's logit l becomes l / repetition_penalty if l > 0,
///    else l · repetition_penalty; minus frequency_penalty · generated; minus presence_penalty if generated > 0. Where
///    `allowed` is not empty, tokens whose bit (t % 64 of word t / 64) is 0 come last of all.
///    Then t = l / temperature, kept finite. All in f32, each step rounded. At temperature 0 the greatest l wins.
/// 2. Tokens are in order of (t descending, id ascending). Kept are those in all of: the first `top_k`; the shortest
///    prefix whose weights e^(t − max) sum up to at least `top_p` of all (in units of 2⁻³⁰ each, the sum exact);
///    those with e^(t − max) ≥ `min_p`. The first is always kept.
/// 3. The kept token with the greatest t + noise wins. The noise (standard Gumbel) depends on the seed, the position, the choice and
///    the token only: Philox4x32-10 with key = seed and counter = (position, token / 4, choice, 0), word token mod 4,
///    v = (word + ½)·2⁻³², noise = −ln(−log1p(−v)).
///
/// Equals go to the lower id everywhere. `seen` lists tokens once each with how often they were generated (0: in the
/// prompt only), `bias` what to add by token. `scratch` is [`scratch_len`] long; what it holds does not matter.
///
/// # Errors
/// [`NonFiniteLogits`].
///
/// # Panics
/// If `logits` is empty, `scratch` is too short, or a token of `seen` or `bias` is outside the vocabulary.
pub fn pick(
    isa: Isa,
    logits: &[f32],
    settings: &Settings,
    seen: impl IntoIterator<Item = (u32, u32)>,
    bias: &[(u32, f32)],
    allowed: &[u64],
    scratch: &mut [f32],
) -> Result<u32, NonFiniteLogits> {
    assert!(!logits.is_empty(), "a vocabulary of no token");
    if !crate::rows::elementwise::is_finite(isa, logits) {
        return Err(NonFiniteLogits);
    }
    let (scores, padding) = scratch[..scratch_len(logits.len())].split_at_mut(logits.len());
    scores.copy_from_slice(logits);
    padding.fill(f32::NEG_INFINITY);
    for &(token, added) in bias {
        scores[token as usize] += added;
    }
    for (token, generated) in seen {
        let l = &mut scores[token as usize];
        *l = if *l > 0.0 { *l / settings.repetition_penalty } else { *l * settings.repetition_penalty };
        *l -= settings.frequency_penalty * generated as f32;
        if generated > 0 {
            *l -= settings.presence_penalty;
        }
    }
    for (scores, &word) in scores.chunks_mut(64).zip(allowed).filter(|(_, word)| **word != u64::MAX) {
        let refused = scores.iter_mut().enumerate().filter(|(i, _)| word >> i & 1 == 0);
        refused.for_each(|(_, score)| *score = f32::NEG_INFINITY);
    }
    let (groups, _) = scratch[..scratch_len(logits.len())].as_chunks_mut::<GROUP>();
    Ok(choose(isa, groups, logits.len(), settings))
}

dispatch! {
    /// The winner among processed logits, which come in groups padded with −∞.
    fn choose(groups: &mut [[f32; GROUP]], vocab: usize, settings: &Settings) -> u32 = choose_on_lanes;
}

#[inline(always)]
fn choose_on_lanes<L: Lanes>(l: L, groups: &mut [[f32; GROUP]], vocab: usize, settings: &Settings) -> u32 {
    let cold = settings.temperature < COLD;
    let temperature = l.splat(if cold { 1.0 } else { settings.temperature });
    for t in groups.as_flattened_mut()[..vocab].chunks_mut(LANES) {
        let divided = l.div(l.load_tail(t, 0.0), temperature);
        // + 0: the two zeros are equals, and everything after may compare bits.
        let finite = l.add(l.clamp(divided, f32::MIN, f32::MAX), l.splat(0.0));
        l.store_tail(finite, t);
    }
    let groups = &*groups;
    let (max, first) = greatest(l, groups.as_flattened());
    if cold {
        return first;
    }
    let kept = kept::prefix(l, groups.as_flattened(), max, settings);
    race(l, groups, settings, max, first, kept)
}

/// The greatest number and the first place where it stands.
#[inline(always)]
fn greatest<L: Lanes>(l: L, t: &[f32]) -> (f32, u32) {
    let (chunks, _) = t.as_chunks::<LANES>();
    let mut max = l.splat(f32::NEG_INFINITY);
    for chunk in chunks {
        max = l.max(l.load(chunk), max);
    }
    let max = l.max_lane(max);
    for (i, chunk) in chunks.iter().enumerate() {
        let found = l.mask_bits(l.eq(l.load(chunk), l.splat(max)));
        if found != 0 {
            return (max, (i * LANES) as u32 + found.trailing_zeros());
        }
    }
    (max, 0)
}

/// More than the greatest noise, which is −ln(2⁻³³) = 22.874.
const NOISE_BOUND: f32 = 22.9;

/// The best so far.
struct Best {
    score: f32,
    token: u32,
}

/// The kept token with the greatest t + noise. `first` is the token with t = `max`: its group goes first, so that the
/// bound on the noise excludes as many others as it can.
#[inline(always)]
fn race<L: Lanes>(
    l: L,
    groups: &[[f32; GROUP]],
    settings: &Settings,
    max: f32,
    first: u32,
    kept: Kept,
) -> u32 {
    let mut best = Best { score: f32::NEG_INFINITY, token: u32::MAX };
    let favourite = first as usize / GROUP;
    run_group(l, &groups[favourite], favourite, settings, max, &kept, &mut best);
    for (i, group) in groups.iter().enumerate() {
        run_group(l, group, i, settings, max, &kept, &mut best);
    }
    best.token
}

#[inline(always)]
fn run_group<L: Lanes>(
    l: L,
    group: &[f32; GROUP],
    index: usize,
    settings: &Settings,
    max: f32,
    kept: &Kept,
    best: &mut Best,
) {
    let (chunks, _) = group.as_chunks::<LANES>();
    let mut running = [0u16; 4];
    for (i, (chunk, running)) in chunks.iter().zip(&mut running).enumerate() {
        let t = l.load(chunk);
        let in_reach = l.le(l.splat(best.score), l.add(t, l.splat(NOISE_BOUND)));
        let first_id = (index * GROUP + i * LANES) as u32;
        *running = l.mask_bits(in_reach) & kept.lanes(l, t, first_id);
        if *running != 0 && settings.min_p > 0.0 {
            let weight = math::exp(l, l.sub(t, l.splat(max)));
            // The greatest has weight 1 and stays whatever min_p is.
            *running &= l.mask_bits(l.le(l.splat(settings.min_p.min(1.0)), weight));
        }
    }
    if running == [0; 4] {
        return;
    }
    let words = noise::words(l, settings, index as u32);
    if !noise::may_reach(l, &words, best.score, greatest_of(l, chunks)) {
        return;
    }
    let noise = noise::in_order(l, words);
    for (i, (chunk, running)) in chunks.iter().zip(running).enumerate() {
        let score = l.add(l.load(chunk), noise[i]);
        let mut ahead = running & l.mask_bits(l.le(l.splat(best.score), score));
        if ahead == 0 {
            continue;
        }
        let scores = l.to_array(score);
        while ahead != 0 {
            let lane = ahead.trailing_zeros();
            ahead &= ahead - 1;
            let (score, token) = (scores[lane as usize], (index * GROUP + i * LANES) as u32 + lane);
            if score > best.score || score == best.score && token < best.token {
                *best = Best { score, token };
            }
        }
    }
}

/// The greatest t of a group.
#[inline(always)]
fn greatest_of<L: Lanes>(l: L, chunks: &[[f32; LANES]]) -> f32 {
    let mut max = l.load(&chunks[0]);
    for chunk in &chunks[1..] {
        max = l.max(l.load(chunk), max);
    }
    l.max_lane(max)
}

#[cfg(test)]
mod tests;
