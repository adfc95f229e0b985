//! After warm-up a step allocates nothing: not in the scheduler, not in the streams, not in the stage.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::scripted::Sketch;
use motet_engine::{Drafts, Options, Request, SamplingOptions, Stream, Turn};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// The system's allocator, which counts what this thread asks for.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counter is a plain cell of this thread.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn steps_allocate_nothing() {
    let head = |sketch: &&Sketch| sketch.full;
    let with_heads = SKETCHES.iter().filter(head).map(|&s| (Sketch { head: true, ..s }, Drafts::Auto));
    let without = SKETCHES.iter().flat_map(|&s| [(s, Drafts::Off), (s, Drafts::Exactly(3))]);
    for (sketch, drafts) in without.chain(with_heads) {
        // Of few tokens, some drafts are right.
        let sketch = Sketch { vocab: if drafts == Drafts::Off { 1000 } else { 8 }, ..sketch };
        let mut rig = Rig::new(sketch, random(1_000_000), &Options { drafts, ..options(4, 4096) });
        // Penalties, biases, log-probabilities: everything that is laid into a batch or a stream.
        let ask = |rng: &mut Rng, prompt, tokens| Request {
            sampling: SamplingOptions {
                seed: Some(1),
                repetition_penalty: 1.1,
                logit_bias: vec![(5, 1.0), (7, -1.0)],
                ..SamplingOptions::default()
            },
            max_tokens: Some(tokens),
            logprobs: Some(5),
            digests: true,
            ..Request::new(rng.tokens_of(sketch.vocab, prompt))
        };
        let rng = &mut Rng(1);
        let _short: Vec<Stream> = (0..3).map(|_| rig.engine.submit(ask(rng, 30, 700)).unwrap()).collect();
        (0..10).for_each(|_| assert_eq!(rig.driver.turn(), Turn::Ran));
        let _long = rig.engine.submit(ask(rng, 3000, 500)).unwrap();
        assert_eq!(rig.driver.turn(), Turn::Ran); // it is admitted here
        let before = ALLOCATIONS.get();
        assert!(before > 0, "the counter does not count");
        let mut steps = 0;
        while rig.driver.turn() == Turn::Ran {
            steps += 1;
            assert_eq!(ALLOCATIONS.get(), before, "{sketch:?}: step {steps} allocated");
        }
        let accepted = rig.engine.metrics().num_accepted_tokens;
        assert!(if drafts == Drafts::Off { steps > 500 } else { accepted > 100 }, "{steps} steps");
    }
}
