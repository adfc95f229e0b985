//! Steps with rows to verify, their commits and drafting allocate nothing.

mod common;
mod counting;

use std::time::Duration;

use common::{Bench, DRAFTS, GREEDY, Way, tiny};
use counting::allocations;
use motet_cpu::Isa;
use motet_gguf::Format;
use motet_model::KvFormat;
use motet_model::batch::{Commit, Slot};

#[test]
fn verify_rows_commits_and_drafts_allocate_nothing() {
    let ids: Vec<u32> = (0..60).map(|i| i * 7 % 284).collect();
    for name in ["llama", "gemma3", "qwen35"] {
        let file = tiny(name, Format::Q8_0);
        let way = Way { isa: Isa::best(), threads: 2, kv: KvFormat::F16, chunk: 8 };
        let mut bench = Bench::with(name == "qwen35", &file, way, 3, 64);
        bench.stage.observe(None);
        bench.stage.reserve(24).expect("memory for all rows");
        let mut counted = 0;
        let mut at = [0; 3];
        for step in 0..8 {
            bench.eager = step % 2 == 0;
            for (session, at) in at.iter_mut().enumerate() {
                let rows = 1 + (session + step) % (1 + DRAFTS);
                let commit = if session < 2 && *at > 0 { Commit::Verify } else { Commit::All };
                bench.add_as(commit, session, &ids, *at, *at + rows);
                *at += if commit == Commit::Verify { 1 } else { rows };
            }
            let before = allocations();
            bench.stage.step(&mut bench.work).expect("a step");
            if step > 0 {
                bench.stage.commit(&[(Slot(0), 1), (Slot(1), 1)]).expect("a commit");
            }
            let mut allocated = allocations() - before;
            bench.work.clear();
            if name == "qwen35" {
                for (drafts, session) in [(DRAFTS, 2), (DRAFTS, 0), (1, 1)] {
                    bench.wish(session, &ids[..=at[session]], drafts, GREEDY);
                }
                let before = allocations();
                bench.stage.draft(&mut bench.work).expect("drafts");
                allocated += allocations() - before;
                bench.work.clear();
            }
            match step {
                // Threads go to sleep and are woken once: the standard library keeps something for each.
                0..3 => std::thread::sleep(Duration::from_millis(5)),
                _ => counted += allocated,
            }
        }
        assert_eq!(counted, 0, "{name}");
    }
}
