//! Places for saved recurrent state, each attached to the block of 64 tokens at whose end it stands.
//!
//! One budget for all conversations. When it is spent, inner checkpoints (with a deeper one in the same conversation)
//! go before the deepest ones, and among equals the one that was used longest ago. A place may be reserved before there
//! is a block for it: then nobody else gets it, and nobody finds it.

use crate::prefix::{Block, NONE};
use motet_model::Checkpoint;

/// Instead of a block's number: the place waits for its block.
const RESERVED: u32 = NONE - 1;

/// Which block each checkpoint belongs to.
#[derive(Debug)]
pub(crate) struct Checkpoints {
    free: Vec<u32>,
    /// Block of each checkpoint, `RESERVED`, or `NONE` for those that are free.
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

    /// Checkpoints that hold something, or will.
    pub(crate) fn used(&self) -> usize {
        self.of.len() - self.free.len()
    }

    /// Whether no place waits for a block.
    pub(crate) fn at_rest(&self) -> bool {
        !self.of.contains(&RESERVED)
    }

    /// A place for a state; a block may lose its own for it. `None` without a budget, or where all places are reserved.
    pub(crate) fn reserve(&mut self, blocks: &mut [Block]) -> Option<Checkpoint> {
        if self.free.is_empty() {
            self.thin(blocks);
        }
        let place = self.free.pop()?;
        self.of[place as usize] = RESERVED;
        Some(Checkpoint(place))
    }

    /// Gives a reserved place to `block`, which has none: the state at its end is saved there.
    pub(crate) fn attach(&mut self, reserved: Checkpoint, block: u32, blocks: &mut [Block]) {
        let (place, before) = (reserved.0, std::mem::replace(&mut self.of[reserved.0 as usize], block));
        assert!(before == RESERVED && blocks[block as usize].checkpoint == NONE, "place {place}: {before}");
        blocks[block as usize].checkpoint = place;
        self.touch(place);
    }

    /// Frees a reserved place.
    pub(crate) fn free(&mut self, reserved: Checkpoint) {
        let before = std::mem::replace(&mut self.of[reserved.0 as usize], NONE);
        assert_eq!(before, RESERVED, "place {}", reserved.0);
        self.free.push(reserved.0);
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
        Some(self.of[checkpoint.0 as usize]).filter(|&b| b < RESERVED)
    }

    /// Whether every place is free, reserved or a block's, and blocks and checkpoints agree on who belongs to whom.
    pub(crate) fn is_consistent(&self, blocks: &[Block]) -> bool {
        let attached = self.of.iter().enumerate().filter(|&(_, &block)| block < RESERVED);
        let reserved = self.of.iter().filter(|&&block| block == RESERVED).count();
        attached.clone().all(|(c, &block)| blocks[block as usize].checkpoint == c as u32)
            && attached.clone().count() + reserved == self.used()
            && self.free.iter().all(|&place| self.of[place as usize] == NONE)
            && blocks.iter().filter(|b| b.checkpoint != NONE).count() == attached.count()
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
            let mut block = self.block_of(Checkpoint(at as u32)).unwrap_or(NONE);
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
            .filter(|&c| self.of[c] < RESERVED)
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

    /// A new checkpoint of a block.
    fn save(checkpoints: &mut Checkpoints, block: u32, blocks: &mut [Block]) -> Checkpoint {
        let place = checkpoints.reserve(blocks).unwrap();
        checkpoints.attach(place, block, blocks);
        place
    }

    #[test]
    fn inner_ones_go_first_then_the_one_used_longest_ago() {
        // One conversation of blocks 0 – 1 – 2 – 3, another of block 4 alone.
        let blocks = &mut blocks(&[NONE, 0, 1, 2, NONE, NONE]);
        let mut checkpoints = Checkpoints::new(3);
        let deepest = save(&mut checkpoints, 3, blocks);
        let other = save(&mut checkpoints, 4, blocks);
        let inner = save(&mut checkpoints, 1, blocks);
        // Block 1's is the newest, but block 3's stands deeper in the same conversation.
        assert_eq!(save(&mut checkpoints, 0, blocks), inner);
        assert_eq!((blocks[1].checkpoint, blocks[0].checkpoint), (NONE, inner.0));
        assert_eq!(save(&mut checkpoints, 5, blocks), inner);
        // No inner one is left.
        checkpoints.touch(deepest.0);
        assert_eq!(save(&mut checkpoints, 0, blocks), other);
        assert!(checkpoints.is_consistent(blocks) && checkpoints.at_rest());
    }

    #[test]
    fn a_reserved_place_is_nobodys_until_it_is_attached_or_freed() {
        let blocks = &mut blocks(&[NONE, 0]);
        let mut checkpoints = Checkpoints::new(2);
        let attached = save(&mut checkpoints, 0, blocks);
        let reserved = checkpoints.reserve(blocks).unwrap();
        assert_eq!((checkpoints.block_of(reserved), checkpoints.used()), (None, 2));
        // Whoever wants a place gets the other one, and then none.
        assert_eq!(checkpoints.reserve(blocks), Some(attached));
        assert_eq!((blocks[0].checkpoint, checkpoints.reserve(blocks)), (NONE, None));
        assert!(checkpoints.is_consistent(blocks) && !checkpoints.at_rest());
        checkpoints.free(attached);
        checkpoints.attach(reserved, 1, blocks);
        assert_eq!((checkpoints.block_of(reserved), blocks[1].checkpoint), (Some(1), reserved.0));
        assert!(checkpoints.is_consistent(blocks) && checkpoints.at_rest() && checkpoints.used() == 1);
    }

    #[test]
    fn without_a_budget_nothing_is_saved() {
        assert_eq!(Checkpoints::new(0).reserve(&mut blocks(&[NONE])), None);
    }
}
