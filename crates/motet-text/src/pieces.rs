//! The bytes of every token, and the way back from bytes to token.
//!
//! One blob, one list of ends and one open hash table of ids: a vocabulary of 262,144 tokens takes some 5 MB. There
//! must never be an allocation per token here.

/// Marks an empty slot of the table, and a text that is no token.
pub(crate) const NONE: u32 = u32::MAX;

#[derive(Debug, Default)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// Where each piece ends in `bytes`; it begins where the one before it ends.
    ends: Vec<u32>,
    /// Open addressing, linear probing, a power of two of slots, at most two thirds of them used.
    slots: Vec<u32>,
    /// Bytes of the longest piece that can be found.
    longest: usize,
}

impl Pieces {
    /// For `tokens` pieces of `bytes` bytes in all.
    pub(crate) fn with_capacity(tokens: usize, bytes: usize) -> Pieces {
        let slots = (tokens + tokens / 2 + 1).next_power_of_two();
        Pieces {
            bytes: Vec::with_capacity(bytes),
            ends: Vec::with_capacity(tokens),
            slots: vec![NONE; slots],
            longest: 0,
        }
    }

    /// Adds the next piece, which cannot be found before it is [indexed](Self::index).
    pub(crate) fn push(&mut self, piece: impl IntoIterator<Item = u8>) {
        self.bytes.extend(piece);
        self.ends.push(self.bytes.len() as u32);
    }

    /// Lets `id` be found by its bytes; of two equal pieces the one indexed first is found.
    pub(crate) fn index(&mut self, id: u32) {
        let piece = self.get(id);
        let length = piece.len();
        let slot = match self.probe(piece) {
            Ok(_) => return,
            Err(slot) => slot,
        };
        self.slots[slot] = id;
        self.longest = self.longest.max(length);
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token; none for an id outside the vocabulary.
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// The token with exactly these bytes.
    pub(crate) fn find(&self, piece: &[u8]) -> Option<u32> {
        if piece.is_empty() || piece.len() > self.longest {
            return None;
        }
        self.probe(piece).ok()
    }

    /// The token in the table, or the slot where it would go.
    fn probe(&self, piece: &[u8]) -> Result<u32, usize> {
        let mask = self.slots.len() - 1;
        let mut slot = hash(piece) as usize & mask;
        loop {
            match self.slots[slot] {
                NONE => return Err(slot),
                id if self.get(id) == piece => return Ok(id),
                _ => slot = (slot + 1) & mask,
            }
        }
    }
}

/// Multiply and rotate over words of eight bytes: quick, and good enough for a table that no client can fill.
fn hash(bytes: &[u8]) -> u32 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut state = bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        state = (state.rotate_left(23) ^ u64::from_le_bytes(word)).wrapping_mul(MULTIPLIER);
    }
    (state >> 32) as u32
}

/// The slot at which a pair of ids starts its search in a table of pairs.
pub(crate) fn hash_pair(left: u32, right: u32) -> u32 {
    hash(&(u64::from(left) << 32 | u64::from(right)).to_le_bytes())
}
