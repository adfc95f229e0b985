//! What stands for a network's arithmetic: digests of tokens, positions and what was remembered.

use motet_model::batch::{Batch, Commit, RECENT, Sampling, Seen, Segment};

/// What a row leaves at its position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) token: u32,
    pub(super) digest: u64,
    /// What the draft head's own layer left, once it was fed with the position.
    pub(super) head: u64,
}

pub(super) const ZERO: Cell = Cell { token: 0, digest: 0, head: 0 };
pub(super) const GARBAGE: Cell = Cell { token: 0, digest: 0xdead_beef_dead_beef, head: 0xdead_beef };
/// Behind the rows that were kept: to be overwritten before it is read.
pub(super) const DEAD: Cell = Cell { token: 0, digest: 0xdead_0000_dead_0000, head: 0xdead };

/// What a session remembers beside its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    /// Of its recurrent layers.
    pub(super) state: u64,
    /// The hidden rows of its last tokens, for the draft head: that of position p in place p mod `RECENT`.
    pub(super) recent: [u64; RECENT],
}

impl Memory {
    /// The hidden row of the position before; 0 before the first.
    pub(super) fn hidden_before(&self, position: usize) -> u64 {
        self.recent[(position + RECENT - 1) % RECENT]
    }
}

/// Before the first token.
pub(super) const CLEAR: Memory = Memory { state: 0x5eed, recent: [0; RECENT] };
/// What nobody may use.
pub(super) const LOST: Memory = Memory { state: 0xdead_beef_dead_beef, recent: [0xdead_beef; RECENT] };

/// What is said to be taken by the rows that wait to be kept or not.
pub(super) fn rollback_bytes(segments: usize, drafts: usize) -> u64 {
    (segments * (1 + drafts) * 16) as u64
}

pub(super) fn mix(a: u64, b: u64) -> u64 {
    let x = (a ^ b.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ x >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ x >> 32
}

/// The recurrent state after a token.
pub(super) fn next_state(state: u64, token: u32, position: usize) -> u64 {
    mix(mix(state, u64::from(token)), position as u64)
}

/// The hidden row of a token: what it wrote last, and its state.
pub(super) fn hidden(digest: u64, state: u64) -> u64 {
    mix(digest, state ^ 0x4d54)
}

/// What the draft head's layer writes at a position: from its token and the hidden row before it. Position 0 has
/// none.
pub(super) fn head_entry(token: u32, position: usize, hidden_before: u64) -> u64 {
    if position == 0 { 0 } else { mix(mix(hidden_before, u64::from(token)), position as u64) }
}

/// What a row writes, from its token, its state and what two of the cells it sees held: the one before it, and one
/// anywhere.
pub(super) fn written(token: u32, position: usize, state: u64, before: u64, anywhere: u64) -> u64 {
    let own = mix(mix(u64::from(token) + 1, position as u64), state);
    mix(mix(own, before), anywhere)
}

/// The first position that a row sees.
pub(super) fn first_seen(position: usize, window: Option<u32>) -> usize {
    window.map_or(0, |w| (position + 1).saturating_sub(w as usize))
}

/// Some earlier position that the row sees.
pub(super) fn somewhere(position: usize, window: Option<u32>) -> usize {
    let first = first_seen(position, window);
    first + (mix(position as u64, 7) % (position - first).max(1) as u64) as usize
}

/// The token that is chosen, from a digest of all that a row reads.
pub(super) fn random_token(
    read: u64,
    sampling: &Sampling,
    context: Context<'_>,
    end: Option<u32>,
    mean: u32,
) -> u32 {
    let mut digest = read;
    if sampling.temperature > 0.0 {
        digest = mix(mix(digest, sampling.seed), u64::from(sampling.choice));
    }
    for seen in context.seen {
        digest = mix(digest, u64::from(seen.token) << 32 | u64::from(seen.generated));
    }
    for &(token, bias) in context.bias {
        digest = mix(digest, u64::from(token) << 32 | u64::from(bias.to_bits()));
    }
    let token = match end {
        Some(end) if digest >> 32 & 0xffff_ffff < (1 << 32) / u64::from(mean) => end,
        Some(end) => (end + 1 + (digest % (context.vocab as u64 - 1)) as u32) % context.vocab as u32,
        None => (digest % context.vocab as u64) as u32,
    };
    allowed_from(token, context)
}

/// The token, or the next one in a circle that may be chosen.
fn allowed_from(token: u32, context: Context<'_>) -> u32 {
    let may = |t: u32| context.allowed.is_empty() || context.allowed[t as usize / 64] >> (t % 64) & 1 == 1;
    let vocab = context.vocab as u32;
    (0..vocab).map(|step| (token + step) % vocab).find(|&t| may(t)).unwrap_or(token)
}

/// What a choice takes into account besides what was read.
#[derive(Clone, Copy)]
pub(super) struct Context<'b> {
    pub(super) seen: &'b [Seen],
    pub(super) bias: &'b [(u32, f32)],
    pub(super) vocab: usize,
    /// As in the batch; empty: all.
    pub(super) allowed: &'b [u64],
}

/// What `row` must know of: what was seen before the batch and, if anything of that matters, the drafts up to the row.
pub(super) fn see(seen: &mut Vec<Seen>, batch: &Batch, segment: &Segment, row: u32, sampling: &Sampling) {
    seen.clear();
    seen.extend_from_slice(batch.seen(sampling));
    if segment.commit == Commit::Verify && !seen.is_empty() {
        let drafts = segment.rows.start as usize + 1..=row as usize;
        batch.tokens[drafts].iter().for_each(|&token| learn(seen, token));
    }
}

/// Counts a token as generated in a list by token.
pub(super) fn learn(seen: &mut Vec<Seen>, token: u32) {
    match seen.binary_search_by_key(&token, |s| s.token) {
        Ok(at) => seen[at].generated += 1,
        Err(at) => seen.insert(at, Seen { token, generated: 1 }),
    }
}

pub(super) fn logprob(read: u64, token: u32) -> f32 {
    -((mix(read, u64::from(token)) % 1000) as f32) / 100.0
}
