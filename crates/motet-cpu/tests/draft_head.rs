//! The multi-token-prediction head: its logits, and that they depend on the conversation alone.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{Bench, DRAFTS, Drafted, GREEDY, Way, expected, limits, logits, prompt, tiny};
use motet_cpu::sampling::{Settings, pick, scratch_len};
use motet_cpu::{CpuDevice, CpuOptions, Isa};
use motet_gguf::{Format, ModelFile};
use motet_model::batch::{Checkpoint, Commit, Sampling, Seen, Slot, StateOp};
use motet_model::{Device, DeviceError, KvFormat, Network, Split};

/// Models with a head, and the prompts for which the file of expected values has its logits.
const MODELS: [(&str, &str); 3] = [("qwen35", "abc"), ("qwen35moe", "ab"), ("glm4moe", "ab")];
const SOLO: Way = Way { isa: Isa::Scalar, threads: 1, kv: KvFormat::F32, chunk: 512 };

fn worst(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
#[allow(clippy::print_stdout, reason = "the measured differences")]
fn logits_of_the_head_are_those_of_transformers_and_of_the_float64_reference() {
    for (name, prompts) in MODELS {
        let file = tiny(name, Format::F32);
        for p in prompts.chars().map(String::from) {
            // Row i: fed with the hidden row i and token i + 1.
            let (ids, want) = (prompt(&p), expected(&format!("tiny-{name}-f32.{p}.mtp_logits")));
            let way = Way { isa: Isa::best(), ..SOLO };
            let mut bench = Bench::with(true, &file, way, 1, ids.len() + DRAFTS);
            let mut off = 0f32;
            for (i, want) in want.iter().enumerate() {
                bench.add(0, &ids, i, i + 1);
                bench.step();
                bench.wish(0, &ids[..i + 2], 1, GREEDY);
                off = off.max(worst(&bench.draft()[0].logits[0], want));
            }
            // Behind the whole prompt it goes on with its own hidden rows and its own greatest tokens.
            let want = expected(&format!("tiny-{name}-f32.{p}.mtp_chain"));
            bench.wish(0, &ids, want.len(), GREEDY);
            for (got, want) in bench.draft()[0].logits.iter().zip(&want) {
                off = off.max(worst(got, want));
            }
            println!("{name} {p}: {off:.1e}");
            assert!(off <= 1e-4, "{name}, prompt {p}: {off:e}");
        }
    }
}

fn conversation(session: usize, len: u32) -> Vec<u32> {
    let s = session as u32;
    (0..len).map(|i| (i * (11 + 2 * s) + 3 * s + i * i * 5) % 284).collect()
}

fn same_bits(got: &Drafted, want: &Drafted, what: &str) {
    assert_eq!(got.tokens, want.tokens, "{what}");
    let bits = |d: &Drafted| d.logits.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(got), bits(want), "{what}");
}

/// What the head drafts behind `ids`, of which all but the last are read at once.
fn cold(file: &ModelFile, kv: KvFormat, ids: &[u32], sampling: &Sampling) -> Drafted {
    let mut bench = Bench::with(true, file, Way { kv, ..SOLO }, 1, ids.len() + DRAFTS);
    bench.add(0, ids, 0, ids.len() - 1);
    bench.step();
    bench.wish(0, ids, DRAFTS, sampling.clone());
    bench.draft().remove(0)
}

#[test]
fn a_loaded_head_changes_no_bit_of_the_trunk() {
    for (name, _) in MODELS {
        let (file, ids) = (tiny(name, Format::Q8_0), prompt("c"));
        for (chunk, threads) in [(512, 1), (7, 2), (1, 1)] {
            let way = Way { isa: Isa::best(), threads, kv: KvFormat::F16, chunk };
            let mut bench = Bench::with(true, &file, way, 1, ids.len() + DRAFTS);
            let mut got = Vec::new();
            for from in (0..ids.len()).step_by(chunk) {
                let to = (from + chunk).min(ids.len());
                bench.add(0, &ids, from, to);
                got.extend(bench.step());
                // Drafting in between leaves no trace either.
                bench.wish(0, &[&ids[..to], &[5]].concat(), DRAFTS, GREEDY);
                bench.draft();
            }
            let want = logits(&file, way, &ids);
            let bits = |rows: &[Vec<f32>]| rows.iter().flatten().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert!(bits(&got) == bits(&want), "{name} {way:?}");
        }
    }
}

#[test]
fn drafts_do_not_know_how_the_conversation_was_read() {
    for (name, _) in MODELS {
        for (format, kv) in
            [(Format::F32, KvFormat::F32), (Format::Q8_0, KvFormat::F16), (Format::Q8_0, KvFormat::Q8_0)]
        {
            let (file, ids) = (tiny(name, format), conversation(0, 90));
            let want = cold(&file, kv, &ids, &GREEDY);
            for isa in Isa::available() {
                for (threads, chunk) in [(1, 1), (2, 13), (2, 64)] {
                    let way = Way { isa, threads, kv, chunk };
                    let mut bench = Bench::with(true, &file, way, 1, 128);
                    for from in (0..89).step_by(chunk) {
                        bench.add(0, &ids, from, (from + chunk).min(89));
                        bench.step();
                    }
                    for _ in 0..2 {
                        bench.wish(0, &ids, DRAFTS, GREEDY);
                        same_bits(&bench.draft()[0], &want, &format!("{name} {format:?} {way:?}"));
                    }
                }
            }
        }
    }
}

#[test]
fn drafts_do_not_know_of_rows_that_were_not_kept_nor_of_others() {
    for (name, _) in MODELS {
        let (file, kv) = (tiny(name, Format::Q8_0), KvFormat::F16);
        let truth: Vec<Vec<u32>> = (0..3).map(|s| conversation(s, 90)).collect();
        // Fed in every step or only where they must, and asked in every step or seldom.
        for (eager, every) in [(true, 1), (false, 1), (false, 5)] {
            let mut bench =
                Bench::with(true, &file, Way { isa: Isa::best(), threads: 2, kv, chunk: 40 }, 3, 128);
            bench.eager = eager;
            let mut at = [0; 3];
            for step in 0.. {
                let reading: Vec<usize> = (0..3).filter(|&s| at[s] < 80 && step >= 3 * s).collect();
                if reading.is_empty() {
                    break;
                }
                let mut kept = Vec::new();
                for &s in &reading {
                    if at[s] == 0 {
                        bench.add(s, &truth[s], 0, 9);
                        at[s] = 9;
                        continue;
                    }
                    // The drafts behind those that are kept are wrong.
                    let (drafts, keep) =
                        (1 + (step + s) % DRAFTS, 1 + (step * 3 + s) % (2 + (step + s) % DRAFTS));
                    let mut tokens = truth[s][..at[s] + keep].to_vec();
                    tokens.resize(at[s] + 1 + drafts, 283);
                    bench.add_as(Commit::Verify, s, &tokens, at[s], at[s] + 1 + drafts);
                    kept.push((Slot(s as u32), keep));
                    at[s] += keep;
                }
                bench.step();
                bench.stage.commit(&kept).unwrap();
                if step % every > 0 {
                    continue;
                }
                // All that stand somewhere are given drafts, most first, as many as they like.
                let mut wishes: Vec<(usize, usize)> =
                    (0..3).filter(|&s| at[s] > 0).map(|s| (1 + (step + s) % DRAFTS, s)).collect();
                wishes.sort_unstable_by_key(|&(drafts, s)| (std::cmp::Reverse(drafts), s));
                for &(drafts, s) in &wishes {
                    bench.wish(s, &truth[s][..=at[s]], drafts, GREEDY);
                }
                for ((drafts, s), got) in wishes.into_iter().zip(bench.draft()) {
                    let mut want = cold(&file, kv, &truth[s][..=at[s]], &GREEDY);
                    want.tokens.truncate(drafts);
                    want.logits.truncate(drafts);
                    same_bits(&got, &want, &format!("{name}: session {s} at {}", at[s]));
                }
            }
        }
    }
}

/// A session decodes for 1 to 40 steps in which nobody drafts, beside one that is read; then the head catches up: what it
/// drafts is what it drafts for one that was fed in every step.
#[test]
fn drafts_do_not_know_of_pauses() {
    for (name, _) in MODELS {
        let (file, kv) = (tiny(name, Format::Q8_0), KvFormat::F16);
        let way = Way { isa: Isa::best(), threads: 2, kv, chunk: 64 };
        let (ids, other) = (conversation(0, 100), conversation(1, 100));
        let fed = |eager| {
            let mut bench = Bench::with(true, &file, way, 2, 128);
            bench.eager = eager;
            bench
        };
        let (mut always, mut late) = (fed(true), fed(false));
        for pause in 1..=40 {
            // Some pauses reach a page's end.
            let read = 9 + pause * 7 % 31;
            for bench in [&mut always, &mut late] {
                bench.add(0, &ids, 0, read);
                bench.step();
                for at in read..read + pause {
                    bench.add(0, &ids, at, at + 1);
                    let (from, to) = (2 * (at - read), 2 * (at - read + 1));
                    bench.add(1, &other, from, to);
                    bench.step();
                }
            }
            let drafted = [&mut always, &mut late].map(|bench| {
                bench.wish(0, &ids[..=read + pause], DRAFTS, GREEDY);
                bench.wish(1, &other[..=2 * pause], DRAFTS - 1, GREEDY);
                bench.draft()
            });
            let what = format!("{name}, a pause of {pause} steps");
            let [want, got] = drafted;
            got.iter().zip(&want).for_each(|(got, want)| same_bits(got, want, &what));
            same_bits(&got[0], &cold(&file, kv, &ids[..=read + pause], &GREEDY), &what);
        }
    }
}

/// Two conversations are equal for exactly 64 tokens; the second takes over the first one's page and a checkpoint.
#[test]
fn drafts_behind_a_prefix_that_was_taken_over_are_those_of_a_cold_start() {
    for (name, _) in MODELS {
        let (file, kv) = (tiny(name, Format::Q8_0), KvFormat::F16);
        let first = conversation(0, 90);
        let mut second = conversation(1, 90);
        second[..64].copy_from_slice(&first[..64]);
        assert_ne!(first[64], second[64]);
        for eager in [true, false] {
            let mut bench =
                Bench::with(true, &file, Way { isa: Isa::best(), threads: 1, kv, chunk: 64 }, 2, 128);
            bench.eager = eager;
            bench.add(0, &first, 0, 50);
            bench.step();
            bench.add(0, &first, 50, 64);
            bench.step();
            bench.add(0, &first, 64, 80);
            bench.work.batch.before.push(StateOp::Save { slot: Slot(0), into: Checkpoint(0) });
            bench.step();
            bench.take_over(1, 0, 64);
            bench.work.batch.before.push(StateOp::Restore { from: Checkpoint(0), slot: Slot(1) });
            // At once, before any row of its own: the head's hidden row comes from the checkpoint.
            bench.wish(1, &second[..65], DRAFTS, GREEDY);
            same_bits(&bench.draft()[0], &cold(&file, kv, &second[..65], &GREEDY), name);
            bench.add(1, &second, 64, 70);
            bench.step();
            bench.wish(1, &second[..71], DRAFTS, GREEDY);
            bench.wish(0, &first[..81], 1, GREEDY);
            let got = bench.draft();
            same_bits(&got[0], &cold(&file, kv, &second[..71], &GREEDY), name);
            assert_eq!(got[1].tokens[..], cold(&file, kv, &first[..81], &GREEDY).tokens[..1]);
        }
    }
}

#[test]
fn drafts_are_chosen_with_the_noise_and_the_penalties_of_the_tokens_position() {
    let sampling = Sampling {
        seed: 4242,
        choice: 1,
        temperature: 0.9,
        top_k: 50,
        top_p: 0.9,
        min_p: 0.01,
        repetition_penalty: 1.4,
        frequency_penalty: 1.1,
        presence_penalty: 0.5,
        seen: 0..3,
        bias: 0..2,
        allowed: 0..0,
    };
    let seen =
        [Seen { token: 7, generated: 2 }, Seen { token: 8, generated: 0 }, Seen { token: 9, generated: 1 }];
    let bias = [(7, 9.0), (8, 9.5)];
    for (name, _) in MODELS {
        let (file, ids) = (tiny(name, Format::Q8_0), conversation(2, 40));
        let way = Way { isa: Isa::best(), threads: 2, kv: KvFormat::F16, chunk: 64 };
        let mut bench = Bench::with(true, &file, way, 1, 64);
        bench.add(0, &ids, 0, 39);
        bench.step();
        bench.work.batch.seen.extend(seen);
        bench.work.batch.bias.extend(bias);
        bench.wish(0, &ids, DRAFTS, sampling.clone());
        let drafted = bench.draft().remove(0);
        let mut counts: Vec<(u32, u32)> = seen.iter().map(|s| (s.token, s.generated)).collect();
        for (depth, (logits, &token)) in drafted.logits.iter().zip(&drafted.tokens).enumerate() {
            let settings = Settings {
                seed: 4242,
                choice: 1,
                // The token at position 39 is certain: the first draft is the token at 40.
                position: 40 + depth as u32,
                temperature: 0.9,
                top_k: 50,
                top_p: 0.9,
                min_p: 0.01,
                repetition_penalty: 1.4,
                frequency_penalty: 1.1,
                presence_penalty: 0.5,
            };
            let mut scratch = vec![0.0; scratch_len(logits.len())];
            let want =
                pick(Isa::Scalar, logits, &settings, counts.clone(), &bias, &[], &mut scratch).unwrap();
            assert_eq!(token, want, "{name}, draft {depth}");
            match counts.iter_mut().find(|(t, _)| *t == token) {
                Some((_, generated)) => *generated += 1,
                None => counts.push((token, 1)),
            }
        }
    }
}

#[test]
fn what_cannot_be_drafted_is_refused_and_does_no_harm() {
    let (file, ids) = (tiny("qwen35", Format::F32), conversation(0, 40));
    let mut without = Bench::new(&file, Way { chunk: 64, ..SOLO }, 1, 64);
    without.add(0, &ids, 0, 39);
    without.step();
    without.wish(0, &ids, 1, GREEDY);
    assert!(matches!(without.stage.draft(&mut without.work), Err(DeviceError::Unsupported { .. })));

    let mut bench = Bench::with(true, &file, Way { chunk: 64, ..SOLO }, 2, 128);
    bench.add(0, &ids, 0, 39);
    bench.add(1, &ids, 0, 20);
    bench.step();
    let mut refused = |what: &str, change: &dyn Fn(&mut motet_model::InFlight)| {
        bench.wish(0, &ids, 2, GREEDY);
        bench.wish(1, &ids[..21], 2, GREEDY);
        change(&mut bench.work);
        let result = bench.stage.draft(&mut bench.work);
        assert!(matches!(result, Err(DeviceError::Batch(_))), "{what}: {result:?}");
        bench.work.clear();
    };
    refused("ascending", &|w| w.batch.drafts[1] = 3);
    refused("none", &|w| w.batch.drafts[1] = 0);
    refused("too many", &|w| w.batch.drafts[0] = 1 + DRAFTS as u32);
    refused("a count missing", &|w| w.batch.drafts.truncate(1));
    refused("an ask missing", &|w| w.batch.asks.truncate(1));
    refused("no page", &|w| w.batch.segments[0].first_position = 63);
    refused("before the first entry", &|w| w.batch.segments[0].first_position = 0);
    refused("a token that does not exist", &|w| w.batch.tokens[0] = 288);
    refused("a token behind that does not exist", &|w| w.batch.behind.push(288));
    refused("fed with tokens that are not there", &|w| w.batch.segments[0].feed = Some(0..1));
    refused("fed with more than is remembered", &|w| {
        w.batch.behind.resize(32, 5);
        w.batch.segments[0].feed = Some(0..32);
    });
    refused("fed with positions before the first", &|w| {
        w.batch.behind.resize(21, 5);
        w.batch.segments[1].feed = Some(0..21);
    });
    bench.wish(0, &ids, DRAFTS, GREEDY);
    same_bits(&bench.draft()[0], &cold(&file, KvFormat::F32, &ids, &GREEDY), "after all that");
}

#[test]
fn a_footprint_names_the_heads_share_and_the_record_of_verify_rows() {
    let file = tiny("qwen35", Format::F32);
    let network = Network::from_gguf(&file).unwrap();
    let device = CpuDevice::new(CpuOptions { threads: 1, isa: Isa::best() });
    let way = Way { kv: KvFormat::F16, ..SOLO };
    let footprint = |draft_head| {
        let limits = limits(&network, draft_head, way, 3, 64);
        device.footprint(&network, &Split::whole(&network), &limits).unwrap().remove(0)
    };
    let (with, without) = (footprint(true), footprint(false));
    // Tensors of F32 whose rows are whole panels of 16 take their own size; `blk.4` is the head's layer.
    let of_head = file.tensors().iter().filter(|t| t.name.starts_with("blk.4."));
    assert_eq!(with.draft.weights, of_head.map(|t| 4 * t.elements()).sum::<u64>());
    assert_eq!(with.weights, without.weights + with.draft.weights);
    // Keys and values of 2 heads of 32, F16, 64 positions.
    assert_eq!(with.draft.page, [2 * 2 * 32 * 2 * 64]);
    assert_eq!(with.page[0], without.page[0] + with.draft.page[0]);
    // The last 32 hidden rows of 64 floats.
    assert_eq!((with.draft.recurrent, with.recurrent), (32 * 4 * 64, without.recurrent + 32 * 4 * 64));
    // Three gated delta layers: 128 inputs of the convolution, 2 keys and 4 values of 16, 4 decays and step sizes.
    let row = 3 * (128 + 2 * 16 + 4 * 16 + 2 * 4);
    assert_eq!(without.rollback, 4 * row * 3 * DRAFTS as u64);
    assert_eq!(with.rollback, without.rollback, "nothing of the head is rolled back");
    assert_eq!(without.draft, motet_model::device::DraftShare::default());
    let plain = Network::from_gguf(&tiny("llama", Format::F32)).unwrap();
    let refused = device.footprint(&plain, &Split::whole(&plain), &limits(&plain, true, way, 1, 64));
    assert!(matches!(refused, Err(DeviceError::Unsupported { .. })));
}
