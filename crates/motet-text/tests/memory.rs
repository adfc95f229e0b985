//! A tokenizer is compact: a vocabulary's bytes, and a few words per token.
#![allow(clippy::unwrap_used, reason = "tests, and functions of theirs")]

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use motet_text::Tokenizer;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static BLOCKS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged; the counters are atomic.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Relaxed);
        BLOCKS.fetch_add(1, Relaxed);
        // SAFETY: the caller keeps the allocator's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        BLOCKS.fetch_sub(1, Relaxed);
        // SAFETY: the caller keeps the allocator's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_vocabulary_takes_few_bytes_and_few_blocks() {
    for (name, limit) in [("smollm2", 3 << 20), ("gemma3", 9 << 20)] {
        let model = common::model(name);
        let before = (LIVE.load(Relaxed), BLOCKS.load(Relaxed));
        let tokenizer = Tokenizer::from_gguf(model.metadata()).unwrap();
        let bytes = LIVE.load(Relaxed) - before.0;
        let blocks = BLOCKS.load(Relaxed) - before.1;
        println!("{name}: {bytes} bytes in {blocks} blocks");
        assert!(bytes < limit, "{name}: {bytes} bytes");
        assert!(blocks < 100, "{name}: {blocks} blocks");
        drop(tokenizer);
    }
}
