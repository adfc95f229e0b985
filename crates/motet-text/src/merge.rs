//! The loop that both tokenizers share: join the best neighbours until none can be joined.
//!
//! Byte-level BPE joins by the rank of a rule, SentencePiece by the score of the result; the order of the joins is the
//! same in both: best priority first, among equals the leftmost. A heap keeps it O(n log n) for a word of any length.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::pieces::NONE;

/// A stretch of text that is one token so far, or no token at all (`id` = [`NONE`]).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symbol {
    pub(crate) start: u32,
    pub(crate) end: u32,
    pub(crate) id: u32,
    /// The nearest living symbols on both sides, [`NONE`] at the ends.
    previous: u32,
    next: u32,
    /// What joining this symbol with the next would give.
    join: Option<Join>,
}

impl Symbol {
    pub(crate) fn new(start: u32, end: u32, id: u32) -> Symbol {
        Symbol { start, end, id, previous: NONE, next: NONE, join: None }
    }
}

/// A possible join of two neighbours. The lowest priority goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Join {
    pub(crate) priority: u32,
    pub(crate) id: u32,
}

/// Scratch space of the loop, kept between words.
#[derive(Debug, Default)]
pub(crate) struct Merger {
    symbols: Vec<Symbol>,
    /// Priority above, index of the left symbol below. An entry whose symbol has another join by now is stale.
    queue: BinaryHeap<Reverse<u64>>,
}

impl Merger {
    /// Joins `symbols`, given in the order of the text, as far as `join` allows; `emit` gets what remains, in order.
    pub(crate) fn run(
        &mut self,
        symbols: impl Iterator<Item = Symbol>,
        join: impl Fn(&Symbol, &Symbol) -> Option<Join>,
        mut emit: impl FnMut(&Symbol),
    ) {
        self.symbols.clear();
        self.symbols.extend(symbols);
        let count = self.symbols.len() as u32;
        for (index, symbol) in (0..count).zip(&mut self.symbols) {
            symbol.previous = if index == 0 { NONE } else { index - 1 };
            symbol.next = if index + 1 == count { NONE } else { index + 1 };
        }
        // A heap built at once takes linear time.
        let mut queue = std::mem::take(&mut self.queue).into_vec();
        queue.clear();
        for left in 0..count {
            queue.extend(self.propose(left, &join));
        }
        self.queue = BinaryHeap::from(queue);

        while let Some(Reverse(entry)) = self.queue.pop() {
            let (priority, left) = ((entry >> 32) as u32, entry as u32);
            let Symbol { next: right, previous, join: planned, .. } = self.symbols[left as usize];
            let Some(planned) = planned.filter(|planned| planned.priority == priority) else { continue };
            let Symbol { end, next, .. } = self.symbols[right as usize];
            self.symbols[right as usize].join = None;
            let symbol = &mut self.symbols[left as usize];
            (symbol.end, symbol.id, symbol.next) = (end, planned.id, next);
            if next != NONE {
                self.symbols[next as usize].previous = left;
            }
            for index in [previous, left] {
                let proposal = self.propose(index, &join);
                self.queue.extend(proposal);
            }
        }

        let mut index = if count == 0 { NONE } else { 0 };
        while let Some(symbol) = self.symbols.get(index as usize) {
            emit(symbol);
            index = symbol.next;
        }
    }

    /// Looks up the join of the symbol at `left` with its next one and returns its entry for the queue.
    fn propose(
        &mut self,
        left: u32,
        join: impl Fn(&Symbol, &Symbol) -> Option<Join>,
    ) -> Option<Reverse<u64>> {
        let symbol = self.symbols.get(left as usize)?;
        let proposal = self.symbols.get(symbol.next as usize).and_then(|next| join(symbol, next));
        self.symbols[left as usize].join = proposal;
        proposal.map(|join| Reverse(u64::from(join.priority) << 32 | u64::from(left)))
    }
}
