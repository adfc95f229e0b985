//! A conversation's logits are the same bits alone and among others, however cut, on any instruction set and threads.
//!
//! Free pages hold NaN, pages lie scattered, conversations of other lengths share the steps.

mod common;

use common::{Bench, Way, logits, prompt, tiny};
use motet_cpu::Isa;
use motet_gguf::Format;
use motet_model::KvFormat;

const MODELS: [&str; 8] = ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "glm4moe"];
const SOLO: Way = Way { isa: Isa::Scalar, threads: 1, kv: KvFormat::F16, chunk: 512 };

fn same(got: &[Vec<f32>], want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}: rows");
    for (row, (a, b)) in got.iter().zip(want).enumerate() {
        let differs = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differs, None, "{what}: row {row} differs");
    }
}

#[test]
fn chunks_threads_and_instruction_sets_change_no_bit() {
    for name in MODELS {
        for format in [Format::F32, Format::F16, Format::Q8_0] {
            let (file, ids) = (tiny(name, format), prompt("c"));
            let want = logits(&file, SOLO, &ids);
            for isa in Isa::available() {
                for (threads, chunk) in [(1, 1), (2, 7), (3, 32), (2, 512)] {
                    let way = Way { isa, threads, chunk, ..SOLO };
                    same(&logits(&file, way, &ids), &want, &format!("{name} {format:?} {way:?}"));
                }
            }
        }
    }
}

#[test]
fn kv_formats_are_exact_too() {
    for name in ["llama", "gemma3", "qwen35"] {
        for kv in [KvFormat::F32, KvFormat::Q8_0] {
            let (file, ids) = (tiny(name, Format::Q8_0), prompt("c"));
            let want = logits(&file, Way { kv, ..SOLO }, &ids);
            let way = Way { isa: Isa::best(), threads: 2, kv, chunk: 13 };
            same(&logits(&file, way, &ids), &want, &format!("{name} {way:?}"));
        }
    }
}

#[test]
fn conversations_in_one_batch_have_the_logits_of_each_alone() {
    for name in MODELS {
        let file = tiny(name, Format::Q8_0);
        let prompts: Vec<Vec<u32>> = (0..4)
            .map(|s| (0..150 - 40 * s).map(|i: u32| (i * (7 + 2 * s) + 3 * s + i * i * 5) % 284).collect())
            .collect();
        let way = Way { isa: Isa::best(), threads: 2, kv: KvFormat::F16, chunk: 64 };
        let alone: Vec<_> = prompts.iter().map(|p| logits(&file, SOLO, p)).collect();
        let mut bench = Bench::new(&file, way, prompts.len(), 150);
        let mut together = vec![Vec::new(); prompts.len()];
        // Sessions arrive one after the other and take chunks of different sizes.
        for step in 0.. {
            let mut added = Vec::new();
            for (s, ids) in prompts.iter().enumerate().rev() {
                let at = together[s].len();
                let take = [64, 1, 13, 5][(s + step) % 4].min(ids.len() - at);
                if step >= s && take > 0 {
                    bench.add(s, ids, at, at + take);
                    added.push((s, take));
                }
            }
            if added.is_empty() {
                break;
            }
            let mut rows = bench.step().into_iter();
            for (s, take) in added {
                together[s].extend(rows.by_ref().take(take));
            }
        }
        for (s, want) in alone.iter().enumerate() {
            same(&together[s], want, &format!("{name}, conversation {s}"));
        }
    }
}
