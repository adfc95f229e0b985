//! The prefix cache: finished pages by content, shared between all conversations that begin alike.
//!
//! A *block* is 64 consecutive tokens of a conversation with everything the network remembers of them: the page of the
//! full-attention pool (which has the block's own number), the pages of the sliding-window pools while they are kept,
//! and perhaps a checkpoint of recurrent state at its end. A full block is *sealed*: its content never changes, and it
//! is found again by its parent block and its 64 tokens. A hash only says where to look; parent and tokens are always
//! compared, so an answer can't come from another conversation.
//!
//! Sessions hold blocks from the first to the last of their conversation and release them last to first, so a block
//! never outlives its parent and what is idle longest is always a leaf.

use crate::checkpoints::Checkpoints;
use crate::pages::Pages;
use motet_model::batch::{MAX_POOLS, NO_PAGE, StateOp};
use motet_model::layout::StateLayout;
use motet_model::{Checkpoint, PAGE};

/// No block, no checkpoint.
pub(crate) const NONE: u32 = u32::MAX;

/// 64 tokens of a conversation.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) parent: u32,
    pub(crate) checkpoint: u32,
    hash: u64,
    tokens: [u32; PAGE],
    /// Pages in the sliding-window pools, `NO_PAGE` where they are not kept.
    windowed: [u32; MAX_POOLS],
    /// Next block in the same bucket.
    next: u32,
}

pub(crate) const EMPTY_BLOCK: Block = Block {
    parent: NONE,
    checkpoint: NONE,
    hash: 0,
    tokens: [0; PAGE],
    windowed: [NO_PAGE; MAX_POOLS],
    next: NONE,
};

/// A pool of sliding-window pages.
#[derive(Debug)]
struct WindowPool {
    /// Index in `StateLayout::pools`.
    pool: usize,
    window: usize,
    pages: Pages,
    /// The sealed block that each page belongs to.
    owner: Vec<u32>,
    /// Pages that each session is promised.
    promise: usize,
}

/// What a session holds: its page tables.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Blocks from position 0 on; also the page table of the full-attention pool.
    pub(crate) blocks: Vec<u32>,
    /// Page tables of the sliding-window pools, as long as `blocks`.
    pub(crate) windowed: [Vec<u32>; MAX_POOLS],
    /// How many of `blocks` are sealed.
    sealed: usize,
    /// Blocks promised in all, held ones included.
    promised: usize,
    /// Sliding-window pages held, by pool.
    windowed_held: [usize; MAX_POOLS],
}

impl Table {
    /// A table that can grow to `context` positions without allocating.
    pub(crate) fn with_capacity(context: usize) -> Self {
        let blocks = context.div_ceil(PAGE);
        Self {
            blocks: Vec::with_capacity(blocks),
            windowed: std::array::from_fn(|_| Vec::with_capacity(blocks)),
            ..Self::default()
        }
    }
}

/// Where a session that begins can take over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Hit {
    /// Blocks that need not be read again.
    pub(crate) blocks: usize,
    /// The recurrent state at their end, if the network has any.
    pub(crate) checkpoint: Option<Checkpoint>,
}

/// All pages, all checkpoints, and what is known of their content.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    blocks: Vec<Block>,
    /// First block of each bucket; a power of two of them.
    buckets: Vec<u32>,
    /// The blocks as pages: held, idle or free.
    pages: Pages,
    /// Whether blocks are pages of a pool of the network (number 0), or mere numbers.
    full_pool: bool,
    windows: Vec<WindowPool>,
    checkpoints: Checkpoints,
    recurrent: bool,
    /// The chain of the last look-up.
    chain: Vec<u32>,
}

impl PrefixCache {
    /// `pages` for each pool of the layout; `blocks`: the pages of the full-attention pool, or for a network
    /// without one as many blocks as the conversations can have; `context` in positions.
    pub(crate) fn new(
        layout: &StateLayout,
        blocks: usize,
        pages: &[usize],
        checkpoints: usize,
        context: usize,
    ) -> Self {
        let windows = layout.pools.iter().enumerate().filter_map(|(pool, p)| {
            let window = p.window? as usize;
            let (count, promise) = (pages[pool], window_promise(window, context));
            Some(WindowPool { pool, window, pages: Pages::new(count), owner: vec![NONE; count], promise })
        });
        Self {
            blocks: vec![EMPTY_BLOCK; blocks],
            buckets: vec![NONE; blocks.next_power_of_two()],
            pages: Pages::new(blocks),
            full_pool: layout.pools.first().is_some_and(|p| p.window.is_none()),
            windows: windows.collect(),
            checkpoints: Checkpoints::new(checkpoints),
            recurrent: layout.recurrent_floats > 0,
            chain: Vec::with_capacity(context / PAGE + 1),
        }
    }

    /// Bytes of bookkeeping per block: for the plan.
    pub(crate) const fn bytes_per_block() -> usize {
        size_of::<Block>() + 2 * size_of::<u32>() + 4 * size_of::<u32>() + 1
    }

    pub(crate) fn pages(&self) -> &Pages {
        &self.pages
    }

    pub(crate) fn checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// Whether sessions hold nothing and were promised nothing.
    pub(crate) fn at_rest(&self) -> bool {
        self.pages.at_rest() && self.windows.iter().all(|w| w.pages.at_rest()) && self.checkpoints.at_rest()
    }

    /// Whether everything known fits together: every known block's parent is known, and sliding-window pages and
    /// checkpoints belong to the blocks that name them.
    pub(crate) fn is_consistent(&self) -> bool {
        let owned = |(w, window): (usize, &WindowPool)| {
            let owners = window.owner.iter().enumerate().filter(|&(_, &block)| block != NONE);
            let kept = self.blocks.iter().filter(|b| b.windowed[w] != NO_PAGE).count();
            owners.clone().count() == kept
                && owners.clone().all(|(page, &block)| self.blocks[block as usize].windowed[w] == page as u32)
        };
        let known = |block: &u32| self.pages.is_kept(*block);
        let orphan =
            |block: u32| Some(self.blocks[block as usize].parent).is_some_and(|p| p != NONE && !known(&p));
        !(0..self.blocks.len() as u32).filter(known).any(orphan)
            && self.windows.iter().enumerate().all(owned)
            && self.checkpoints.is_consistent(&self.blocks)
    }

    /// The deepest border, at most `limit` tokens deep, from which a conversation that begins with `tokens` can go
    /// on: all blocks before it, the sliding-window pages that its next row sees, and a checkpoint at it.
    pub(crate) fn find(&mut self, tokens: &[u32], limit: usize) -> Hit {
        let mut hit = Hit::default();
        let mut unbroken = [0; MAX_POOLS]; // where the run of kept sliding-window pages begins
        let mut parent = NONE;
        self.chain.clear();
        for (i, content) in tokens[..limit.min(tokens.len())].chunks_exact(PAGE).enumerate() {
            let Some(found) = self.lookup(parent, content) else { break };
            self.chain.push(found);
            let block = &self.blocks[found as usize];
            let border = (i + 1) * PAGE;
            let windows_are_kept = self.windows.iter().enumerate().fold(true, |all, (w, window)| {
                if block.windowed[w] == NO_PAGE {
                    unbroken[w] = i + 1;
                }
                all && unbroken[w] <= first_seen(border, window.window) / PAGE
            });
            if windows_are_kept && (!self.recurrent || block.checkpoint != NONE) {
                let checkpoint = self.recurrent.then_some(Checkpoint(block.checkpoint));
                hit = Hit { blocks: i + 1, checkpoint };
            }
            parent = found;
        }
        hit
    }

    /// Gives a session the blocks of `hit`, which must be the last answer of [`PrefixCache::find`], and promises it
    /// pages for `positions` in all. `false`, and nothing changes, if there are not enough.
    pub(crate) fn admit(&mut self, hit: Hit, positions: usize, table: &mut Table) -> bool {
        let promised = positions.div_ceil(PAGE).max(hit.blocks);
        let shared = self.chain[..hit.blocks].iter().filter(|&&b| self.pages.is_held(b)).count();
        if self.pages.unpromised() < promised - shared {
            return false;
        }
        for window in &self.windows {
            let first = first_seen(hit.blocks * PAGE, window.window) / PAGE;
            let seen = &self.chain[first.min(hit.blocks)..hit.blocks];
            if window.pages.unpromised_unshared() < window.promise.max(seen.len()) {
                return false;
            }
        }
        for &block in &self.chain[..hit.blocks] {
            self.pages.hold(block);
            table.blocks.push(block);
        }
        self.pages.promise(promised - hit.blocks);
        (table.sealed, table.promised) = (hit.blocks, promised);
        for (w, window) in self.windows.iter_mut().enumerate() {
            let first = first_seen(hit.blocks * PAGE, window.window) / PAGE;
            for (i, &block) in self.chain[..hit.blocks].iter().enumerate() {
                let page = if i < first { NO_PAGE } else { self.blocks[block as usize].windowed[w] };
                table.windowed[w].push(page);
                if page != NO_PAGE {
                    window.pages.hold(page);
                    table.windowed_held[w] += 1;
                }
            }
            window.pages.promise(window.promise.saturating_sub(table.windowed_held[w]));
        }
        if let Some(checkpoint) = hit.checkpoint {
            self.checkpoints.touch(checkpoint.0);
        }
        true
    }

    /// How many positions, up to `wanted`, the session can have pages for without anybody stepping back.
    pub(crate) fn reach(&self, table: &Table, wanted: usize) -> usize {
        let held = table.blocks.len();
        let mut blocks = held.max(table.promised) + self.pages.unpromised();
        for (w, window) in self.windows.iter().enumerate() {
            let promised = window.promise.saturating_sub(table.windowed_held[w]);
            blocks = blocks.min(held + promised + window.pages.unpromised_unshared());
        }
        wanted.min(blocks * PAGE)
    }

    /// Takes pages until the table covers `positions`, which must be within [`PrefixCache::reach`], and lists
    /// the pages to be zeroed in `before`.
    pub(crate) fn grow(&mut self, table: &mut Table, positions: usize, before: &mut Vec<StateOp>) {
        while table.blocks.len() * PAGE < positions {
            if table.blocks.len() < table.promised {
                self.pages.relieve(1);
            }
            let taken = self.pages.take().expect("a page within reach");
            if taken.evicted {
                self.forget(taken.page);
            }
            self.blocks[taken.page as usize] = EMPTY_BLOCK;
            table.blocks.push(taken.page);
            if self.full_pool {
                before.push(StateOp::ZeroPage { pool: 0, page: taken.page });
            }
            for (w, window) in self.windows.iter_mut().enumerate() {
                if table.windowed_held[w] < window.promise {
                    window.pages.relieve(1);
                }
                let taken = window.pages.take().expect("a sliding-window page within reach");
                if taken.evicted {
                    let owner = std::mem::replace(&mut window.owner[taken.page as usize], NONE);
                    self.blocks[owner as usize].windowed[w] = NO_PAGE;
                }
                table.windowed[w].push(taken.page);
                table.windowed_held[w] += 1;
                before.push(StateOp::ZeroPage { pool: window.pool as u32, page: taken.page });
            }
        }
    }

    /// The rows of positions `..tokens.len()` have been run: seals the blocks that are full, and lets go of the
    /// sliding-window pages that no row to come can see.
    pub(crate) fn advance(&mut self, table: &mut Table, tokens: &[u32]) {
        while (table.sealed + 1) * PAGE <= tokens.len() {
            let at = table.sealed;
            self.seal(table, at, &tokens[at * PAGE..(at + 1) * PAGE]);
            table.sealed += 1;
        }
        for (w, window) in self.windows.iter_mut().enumerate() {
            let first = first_seen(tokens.len(), window.window) / PAGE;
            // Pages leave from the front; those before the last that left are gone already.
            for page in table.windowed[w][..first].iter_mut().rev().take_while(|p| **p != NO_PAGE) {
                window.pages.release(*page);
                *page = NO_PAGE;
                table.windowed_held[w] -= 1;
                if table.windowed_held[w] < window.promise {
                    window.pages.promise(1);
                }
            }
        }
    }

    /// Makes the block at index `at` of a table known; if an equal one is known, the session shares that instead.
    fn seal(&mut self, table: &mut Table, at: usize, content: &[u32]) {
        let parent = if at == 0 { NONE } else { table.blocks[at - 1] };
        let own = table.blocks[at];
        let known = self.lookup(parent, content);
        let block = known.unwrap_or(own);
        if known.is_some() {
            self.pages.hold(block);
            self.pages.release(own);
            table.blocks[at] = block;
        } else {
            let hash = hash(parent, content);
            let bucket = hash as usize & (self.buckets.len() - 1);
            let next = std::mem::replace(&mut self.buckets[bucket], own);
            let mut tokens = [0; PAGE];
            tokens.copy_from_slice(content);
            self.blocks[own as usize] = Block { parent, hash, tokens, next, ..EMPTY_BLOCK };
            self.pages.keep(own);
        }
        for (w, window) in self.windows.iter_mut().enumerate() {
            let own = table.windowed[w][at];
            let kept = &mut self.blocks[block as usize].windowed[w];
            if *kept == NO_PAGE {
                *kept = own;
                window.owner[own as usize] = block;
                window.pages.keep(own);
            } else {
                window.pages.hold(*kept);
                window.pages.release(own);
                table.windowed[w][at] = *kept;
            }
        }
    }

    /// The session leaves: everything it holds is released, last block first, and stays known while there is room.
    pub(crate) fn release(&mut self, table: &mut Table) {
        self.pages.relieve(table.promised.saturating_sub(table.blocks.len()));
        for (w, window) in self.windows.iter_mut().enumerate() {
            window.pages.relieve(window.promise.saturating_sub(table.windowed_held[w]));
            for page in table.windowed[w].drain(..).rev().filter(|&p| p != NO_PAGE) {
                window.pages.release(page);
            }
        }
        for block in table.blocks.drain(..).rev() {
            self.pages.release(block);
        }
        (table.sealed, table.promised, table.windowed_held) = (0, 0, [0; MAX_POOLS]);
    }

    /// Gives the session's last sealed block a checkpoint: the reserved place, if its state is saved there already, or
    /// another. `None` if the block has one, the reserved place is free again then; or if there is none to be had.
    pub(crate) fn checkpoint(&mut self, table: &Table, reserved: Option<Checkpoint>) -> Option<Checkpoint> {
        let block = table.blocks[table.sealed - 1];
        let known = self.blocks[block as usize].checkpoint;
        if known != NONE {
            self.checkpoints.touch(known);
            reserved.into_iter().for_each(|place| self.checkpoints.free(place));
            return None;
        }
        let place = reserved.or_else(|| self.reserve_checkpoint())?;
        self.checkpoints.attach(place, block, &mut self.blocks);
        Some(place)
    }

    /// A place for recurrent state whose block is not sealed yet: for [`PrefixCache::checkpoint`] or
    /// [`PrefixCache::free_checkpoint`].
    pub(crate) fn reserve_checkpoint(&mut self) -> Option<Checkpoint> {
        self.checkpoints.reserve(&mut self.blocks)
    }

    /// A reserved place was not needed.
    pub(crate) fn free_checkpoint(&mut self, reserved: Checkpoint) {
        self.checkpoints.free(reserved);
    }

    /// The free pages that were not poisoned since they became free, with their pools.
    pub(crate) fn take_unpoisoned(&mut self, mut poison: impl FnMut(usize, u32)) {
        let free = self.pages.take_unpoisoned();
        if self.full_pool {
            free.iter().for_each(|&page| poison(0, page));
        }
        for window in &mut self.windows {
            window.pages.take_unpoisoned().iter().for_each(|&page| poison(window.pool, page));
        }
    }

    /// The session's page table in a pool of the network.
    pub(crate) fn table<'t>(&self, table: &'t Table, pool: usize) -> &'t [u32] {
        match self.windows.iter().position(|w| w.pool == pool) {
            Some(w) => &table.windowed[w],
            None => &table.blocks,
        }
    }

    /// The checkpoint's content is lost or no longer wanted.
    pub(crate) fn drop_checkpoint(&mut self, checkpoint: Checkpoint) {
        if let Some(block) = self.checkpoints.block_of(checkpoint) {
            self.checkpoints.detach(block, &mut self.blocks);
        }
    }

    fn lookup(&self, parent: u32, content: &[u32]) -> Option<u32> {
        let hash = hash(parent, content);
        let mut at = self.buckets[hash as usize & (self.buckets.len() - 1)];
        while at != NONE {
            let block = &self.blocks[at as usize];
            if block.hash == hash && block.parent == parent && block.tokens == content {
                return Some(at);
            }
            at = block.next;
        }
        None
    }

    /// The page of this block has a new owner: nothing of the block may be found any more.
    fn forget(&mut self, block: u32) {
        let bucket = self.blocks[block as usize].hash as usize & (self.buckets.len() - 1);
        let next = self.blocks[block as usize].next;
        if self.buckets[bucket] == block {
            self.buckets[bucket] = next;
        } else {
            let mut at = self.buckets[bucket];
            while self.blocks[at as usize].next != block {
                at = self.blocks[at as usize].next;
            }
            self.blocks[at as usize].next = next;
        }
        self.checkpoints.detach(block, &mut self.blocks);
        for (w, window) in self.windows.iter_mut().enumerate() {
            let page = self.blocks[block as usize].windowed[w];
            if page != NO_PAGE {
                window.owner[page as usize] = NONE;
                window.pages.forget(page);
            }
        }
    }
}

/// Sliding-window pages that a session needs to advance by at least one row at any position.
pub(crate) fn window_promise(window: usize, context: usize) -> usize {
    ((window - 1).div_ceil(PAGE) + 1).min(context.div_ceil(PAGE))
}

/// The first position that the row at `position` sees.
fn first_seen(position: usize, window: usize) -> usize {
    (position + 1).saturating_sub(window)
}

/// FNV-1a over words, with a final mix. Only a hint: contents are compared.
fn hash(parent: u32, content: &[u32]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325 ^ u64::from(parent);
    let h = content.iter().fold(start, |h, &t| (h ^ u64::from(t)).wrapping_mul(0x0100_0000_01b3));
    (h ^ h >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ h >> 29
}

#[cfg(test)]
mod tests {
    use super::*;
    use motet_model::layout;

    fn cache(blocks: usize) -> PrefixCache {
        let pools = vec![layout::Pool { window: None, states: vec![0] }];
        PrefixCache::new(&StateLayout { pools, recurrent_floats: 0 }, blocks, &[blocks], 0, 64 * blocks)
    }

    /// A conversation of these tokens comes, is read and leaves; returns how many of its blocks were known.
    fn visit(cache: &mut PrefixCache, tokens: &[u32]) -> usize {
        let mut table = Table::with_capacity(tokens.len());
        let hit = cache.find(tokens, tokens.len());
        assert!(cache.admit(hit, tokens.len(), &mut table));
        cache.grow(&mut table, tokens.len(), &mut Vec::new());
        cache.advance(&mut table, tokens);
        cache.release(&mut table);
        assert!(cache.at_rest() && cache.is_consistent());
        hit.blocks
    }

    fn text(blocks: &[u32]) -> Vec<u32> {
        blocks.iter().flat_map(|&b| [b; PAGE]).collect()
    }

    #[test]
    fn equal_tokens_behind_different_ones_are_different_blocks() {
        let mut cache = cache(8);
        assert_eq!(visit(&mut cache, &text(&[1, 2, 3])), 0);
        assert_eq!(visit(&mut cache, &text(&[1, 2, 4])), 2);
        assert_eq!(visit(&mut cache, &text(&[9, 2, 3])), 0);
        assert_eq!(visit(&mut cache, &text(&[1, 2, 3])), 3);
    }

    #[test]
    fn nothing_is_evicted_while_something_is_free_and_then_the_oldest_leaf() {
        let mut cache = cache(6);
        visit(&mut cache, &text(&[1, 2, 3]));
        visit(&mut cache, &text(&[5, 6, 7]));
        assert_eq!(visit(&mut cache, &text(&[1, 2, 3])), 3); // all six pages are known, and this one is newer
        visit(&mut cache, &text(&[8]));
        assert_eq!(cache.find(&text(&[5, 6, 7]), 192).blocks, 2, "its leaf had to go");
        assert_eq!(cache.find(&text(&[1, 2, 3]), 192).blocks, 3);
    }

    #[test]
    fn a_hash_is_only_a_hint() {
        let mut cache = cache(4);
        visit(&mut cache, &text(&[1]));
        let block = (0..4).find(|&b| cache.blocks[b].tokens[0] == 1).unwrap();
        // As if another content had the same hash.
        cache.blocks[block].tokens[63] = 2;
        assert_eq!(cache.find(&text(&[1]), 64).blocks, 0);
    }

    #[test]
    fn two_that_read_the_same_at_once_end_up_with_one_copy() {
        let mut cache = cache(4);
        let tokens = text(&[1, 2]);
        let mut tables = [(); 2].map(|()| Table::with_capacity(128));
        for table in &mut tables {
            let hit = cache.find(&tokens, 128);
            assert!(cache.admit(hit, 128, table));
            cache.grow(table, 128, &mut Vec::new());
        }
        assert_eq!(cache.pages().held(), 4);
        tables.iter_mut().for_each(|table| cache.advance(table, &tokens));
        assert_eq!(cache.pages().held(), 2);
        assert_eq!(tables[0].blocks, tables[1].blocks);
    }

    #[test]
    fn a_row_can_always_advance_with_the_promised_pages_of_a_window() {
        for window in 1..400 {
            for position in 0..2000 {
                let pages = position / PAGE - first_seen(position, window) / PAGE + 1;
                assert!(pages <= window_promise(window, 2000), "window {window}, position {position}");
            }
        }
    }
}
