//! Places for saved recurrent state, each attached to the block of 64 tokens at whose end it stands.
//!
//! One budget for all conversations. When it is spent, inner checkpoints (with a deeper one in the same conversation)
//! go before the deepest ones, and among equals the one that was used longest ago.

use crate::prefix::{Block, NONE};
use motet_model::Checkpoint;

/// Which block each checkpoint belongs to.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    free: Vec<u32>,
    /// Block of each checkpoint, or `NONE`.
    of: Vec<u32>,
    /// When it was last saved or restored.
    used: Vec<u64>,
    /// Whether a deeper one exists; valid only while thinning.
    inner: Vec<bool>,
    now: u64,
}

impl Checkpoints {
    pub(crate) fn new(count: usize) -> Self {
        Self {
            free: (0..count as u32).rev().collect(),
            of: vec![NONE; count],
            used: vec![0; count],
            inner: vec![false; count],
            now: 0,
        }
    }

    /// Checkpoints that hold something.
    pub(crate) fn used(&self) -> usize {
        self.of.len() - self.free.len()
    }

    /// A place for the state at the end of `block`; another block may lose its own for it. `None` without a budget.
    pub(crate) fn attach(&mut self, block: u32, blocks: &mut [Block]) -> Option<Checkpoint> {
        if self.free.is_empty() {
            self.thin(blocks);
        }
        let place = self.free.pop()?;
        self.of[place as usize] = block;
        blocks[block as usize].checkpoint = place;
        self.touch(place);
        Some(Checkpoint(place))
    }

    /// Frees the checkpoint of a block, if it has one.
    pub(crate) fn detach(&mut self, block: u32, blocks: &mut [Block]) {
        let place = std::mem::replace(&mut blocks[block as usize].checkpoint, NONE);
        if place != NONE {
            self.of[place as usize] = NONE;
            self.free.push(place);
        }
    }

    /// The block whose state a checkpoint holds.
    pub(crate) fn block_of(&self, checkpoint: Checkpoint) -> Option<u32> {
        Some(self.of[checkpoint.0 as usize]).filter(|&b| b != NONE)
    }

    /// Whether blocks and checkpoints agree on who belongs to whom.
    pub(crate) fn is_consistent(&self, blocks: &[Block]) -> bool {
        let attached = self.of.iter().enumerate().filter(|&(_, &block)| block != NONE);
        attached.clone().all(|(c, &block)| blocks[block as usize].checkpoint == c as u32)
            && attached.count() == self.used()
            && blocks.iter().filter(|b| b.checkpoint != NONE).count() == self.used()
    }

    /// The checkpoint is of use to a session.
    pub(crate) fn touch(&mut self, place: u32) {
        self.now += 1;
        self.used[place as usize] = self.now;
    }

    /// Gives up the checkpoint that will be missed least.
    fn thin(&mut self, blocks: &mut [Block]) {
        self.inner.fill(false);
        for at in 0..self.of.len() {
            let mut block = self.of[at];
            while block != NONE {
                block = blocks[block as usize].parent;
                if block == NONE {
                    break;
                }
                let above = blocks[block as usize].checkpoint;
                if above != NONE && std::mem::replace(&mut self.inner[above as usize], true) {
                    break; // from here upwards another walk has been
                }
            }
        }
        let least = (0..self.of.len())
            .filter(|&c| self.of[c] != NONE)
            .min_by_key(|&c| (!self.inner[c], self.used[c]));
        if let Some(checkpoint) = least {
            self.detach(self.of[checkpoint], blocks);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::EMPTY_BLOCK;

    /// Blocks with these parents.
    fn blocks(parents: &[u32]) -> Vec<Block> {
        let block = |&parent| {
            let mut block = EMPTY_BLOCK;
            block.parent = parent;
            block
        };
        parents.iter().map(block).collect()
    }

    #[test]
    fn inner_ones_go_first_then_the_one_used_longest_ago() {
        // One conversation of blocks 0 – 1 – 2 – 3, another of block 4 alone.
        let blocks = &mut blocks(&[NONE, 0, 1, 2, NONE, NONE]);
        let mut checkpoints = Checkpoints::new(3);
        let deepest = checkpoints.attach(3, blocks).unwrap();
        let other = checkpoints.attach(4, blocks).unwrap();
        let inner = checkpoints.attach(1, blocks).unwrap();
        // Block 1's is the newest, but block 3's stands deeper in the same conversation.
        assert_eq!(checkpoints.attach(0, blocks), Some(inner));
        assert_eq!((blocks[1].checkpoint, blocks[0].checkpoint), (NONE, inner.0));
        assert_eq!(checkpoints.attach(5, blocks), Some(inner));
        // No inner one is left.
        checkpoints.touch(deepest.0);
        assert_eq!(checkpoints.attach(0, blocks), Some(other));
        assert!(checkpoints.is_consistent(blocks));
    }

    #[test]
    fn without_a_budget_nothing_is_saved() {
        assert_eq!(Checkpoints::new(0).attach(0, &mut blocks(&[NONE])), None);
    }
}
