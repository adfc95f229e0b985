//! The rows of one run: those of a batch, of a pass of drafting, which takes one row a session further, or those that
//! the draft head is fed with.

use motet_model::batch::{Batch, Segment};

use crate::isa::Isa;
use crate::kv;
use crate::rows::rope::Rope;

/// Whose rows they are, where they stand, and their tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lines<'a> {
    batch: &'a Batch,
    pub(super) segments: &'a [Segment],
    /// `[rows]`
    pub(super) tokens: &'a [u32],
    /// Positions beyond those of the segments.
    ahead: u32,
}

impl<'a> Lines<'a> {
    /// All rows of a batch.
    pub(super) fn of(batch: &'a Batch) -> Self {
        Self { batch, segments: &batch.segments, tokens: &batch.tokens, ahead: 0 }
    }

    /// Other rows of the sessions of a batch.
    pub(super) fn other(batch: &'a Batch, segments: &'a [Segment], tokens: &'a [u32]) -> Self {
        Self { batch, segments, tokens, ahead: 0 }
    }

    /// One row for each of the first `tokens.len()` segments, `ahead` positions beyond the segment's own.
    pub(super) fn ahead(batch: &'a Batch, tokens: &'a [u32], ahead: u32) -> Self {
        Self { batch, segments: &batch.segments[..tokens.len()], tokens, ahead }
    }

    /// The segments with their pages of one pool, as attention takes them.
    pub(super) fn with_pages(self, pool: usize) -> impl Iterator<Item = kv::Segment<'a>> {
        self.segments.iter().map(move |s| kv::Segment {
            first_position: (s.first_position + self.ahead) as usize,
            first_row: s.rows.start as usize,
            rows: s.rows.len(),
            pages: self.batch.table(s, pool),
        })
    }

    /// The cosines and sines of all rows, encoding by encoding: `[rows, table]` each.
    pub(super) fn fill_rotations(self, isa: Isa, ropes: &[Rope], out: &mut [f32]) {
        let mut rest = out;
        for rope in ropes {
            let len = rope.table_len();
            let (table, behind) = rest.split_at_mut(self.tokens.len() * len);
            rest = behind;
            let first = |s: &Segment| s.first_position + self.ahead;
            let positions = self.segments.iter().flat_map(|s| first(s)..first(s) + s.rows.len() as u32);
            for (row, position) in table.chunks_exact_mut(len).zip(positions) {
                rope.fill(isa, position, row);
            }
        }
    }
}
