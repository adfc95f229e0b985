//! A hash table of 32-bit numbers whose keys lie elsewhere.
//!
//! Vocabularies and merges look up several times per byte of text, mostly in vain. One byte of hash per slot, in a table
//! small enough for the cache, answers most of that; the numbers themselves and the keys are touched on a likely hit.

/// Open addressing with linear probing. It never shrinks, and must be made as large as it will get.
#[derive(Debug)]
pub(crate) struct Table {
    /// 0 for an empty slot, else a byte of the hash with its lowest bit set.
    tags: Vec<u8>,
    /// A power of two of them, at most two thirds in use.
    slots: Vec<u32>,
}

impl Table {
    /// For up to `entries` numbers.
    pub(crate) fn for_entries(entries: usize) -> Table {
        let slots = (entries + entries / 2 + 1).next_power_of_two();
        Table { tags: vec![0; slots], slots: vec![0; slots] }
    }

    /// The number with this hash for which `is_it` holds.
    pub(crate) fn find(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        self.probe(hash, is_it).ok()
    }

    /// Adds a number unless one for which `is_it` holds is there already.
    pub(crate) fn insert(&mut self, hash: u64, number: u32, is_it: impl Fn(u32) -> bool) {
        if let Err(slot) = self.probe(hash, is_it) {
            self.tags[slot] = tag(hash);
            self.slots[slot] = number;
        }
    }

    /// The number, or the slot where it would go.
    fn probe(&self, hash: u64, is_it: impl Fn(u32) -> bool) -> Result<u32, usize> {
        let mask = self.slots.len() - 1;
        let tag = tag(hash);
        let mut slot = (hash >> 32) as usize & mask;
        loop {
            match self.tags[slot] {
                0 => return Err(slot),
                found if found == tag && is_it(self.slots[slot]) => return Ok(self.slots[slot]),
                _ => slot = (slot + 1) & mask,
            }
        }
    }
}

fn tag(hash: u64) -> u8 {
    (hash >> 24) as u8 | 1
}

const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// Multiply and rotate over words of eight bytes: quick, and good enough for a table that no client can fill.
pub(crate) fn hash_bytes(bytes: &[u8]) -> u64 {
    let mut state = bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = mix(state, u64::from_le_bytes(word));
    }
    state ^ state >> 29
}

/// Of a pair of ids.
pub(crate) fn hash_pair(left: u32, right: u32) -> u64 {
    let state = mix(0, u64::from(left) << 32 | u64::from(right));
    state ^ state >> 29
}

fn mix(state: u64, word: u64) -> u64 {
    (state.rotate_left(23) ^ word).wrapping_mul(MULTIPLIER)
}
