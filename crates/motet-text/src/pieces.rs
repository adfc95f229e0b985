//! The bytes of every token, and the way back from bytes to token.
//!
//! One blob, one list of ends and one table of ids: a vocabulary of 262,144 tokens takes some 5 MB. There must never be
//! an allocation per token here.

use crate::table::{Table, hash_bytes};

/// Stands for a text that is no token.
pub(crate) const NONE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Pieces {
    bytes: Vec<u8>,
    /// Where each piece ends in `bytes`; it begins where the one before it ends.
    ends: Vec<u32>,
    by_bytes: Table,
    /// Bytes of the longest piece that can be found.
    longest: usize,
}

impl Pieces {
    /// For `tokens` pieces of `bytes` bytes in all.
    pub(crate) fn with_capacity(tokens: usize, bytes: usize) -> Pieces {
        Pieces {
            bytes: Vec::with_capacity(bytes),
            ends: Vec::with_capacity(tokens),
            by_bytes: Table::for_entries(tokens),
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
        let Pieces { bytes, ends, by_bytes, longest } = self;
        let piece = slice(bytes, ends, id);
        *longest = piece.len().max(*longest);
        by_bytes.insert(hash_bytes(piece), id, |other| slice(bytes, ends, other) == piece);
    }

    /// Bytes of the longest piece that can be found.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of a token; none for an id outside the vocabulary.
    pub(crate) fn get(&self, id: u32) -> &[u8] {
        slice(&self.bytes, &self.ends, id)
    }

    /// The token with exactly these bytes.
    pub(crate) fn find(&self, piece: &[u8]) -> Option<u32> {
        if piece.is_empty() || piece.len() > self.longest {
            return None;
        }
        self.by_bytes.find(hash_bytes(piece), |id| self.get(id) == piece)
    }
}

fn slice<'a>(bytes: &'a [u8], ends: &[u32], id: u32) -> &'a [u8] {
    let id = id as usize;
    let Some(&end) = ends.get(id) else { return &[] };
    let start = if id == 0 { 0 } else { ends[id - 1] };
    &bytes[start as usize..end as usize]
}
