//! Rows that carry drafts: their logits, and all that follows once some of them are kept, are the bits of a run that
//! never saw a draft.

mod common;

use common::{Bench, DRAFTS, Way, logits, tiny};
use motet_cpu::Isa;
use motet_gguf::{Format, ModelFile, Writer};
use motet_model::batch::{Commit, Fault, Sampling, Seen, Slot, Want};
use motet_model::{DeviceError, KvFormat};

const MODELS: [&str; 4] = ["llama", "gemma3", "qwen35", "qwen35moe"];
const SOLO: Way = Way { isa: Isa::Scalar, threads: 1, kv: KvFormat::F16, chunk: 512 };

/// A conversation long enough for a sliding window, a convolution and a border of pages.
fn conversation(session: usize, len: u32) -> Vec<u32> {
    let s = session as u32;
    (0..len).map(|i| (i * (7 + 2 * s) + 3 * s + i * i * 5) % 284).collect()
}

/// How many drafts a session brings in a step and how many rows it keeps: every pair comes up.
fn drafts_and_kept(session: usize, step: usize) -> (usize, usize) {
    let all: Vec<_> =
        (0..=DRAFTS).flat_map(|drafts| (1..=1 + drafts).map(move |kept| (drafts, kept))).collect();
    all[(step * (2 * session + 1) + 4 * session) % all.len()]
}

/// Three sessions decode with drafts, most of them wrong somewhere, while a fourth is read beside them.
fn with_drafts_as_without(name: &str, way: Way) {
    let file = tiny(name, Format::Q8_0);
    let truth: Vec<Vec<u32>> = (0..4).map(|s| conversation(s, 110 - 10 * s as u32)).collect();
    let want: Vec<_> = truth.iter().map(|ids| logits(&file, Way { kv: way.kv, ..SOLO }, ids)).collect();
    let mut bench = Bench::new(&file, way, truth.len(), 128);
    let mut at = [0; 4];
    let check = |session: usize, first: usize, rows: &[Vec<f32>]| {
        for (i, row) in rows.iter().enumerate() {
            let same = row.iter().zip(&want[session][first + i]).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{name} {way:?}: session {session}, position {}", first + i);
        }
    };
    let mut step = 0;
    while at[..3].iter().zip(&truth).any(|(&at, ids)| at < ids.len()) {
        // (session, first row kept, rows, kept)
        let mut added = Vec::new();
        for session in 0..4 {
            let (ids, from) = (&truth[session], at[session]);
            if from == ids.len() || step < 2 * session {
                continue;
            }
            if session == 3 || from == 0 {
                let rows = (5 + step % 9).min(ids.len() - from);
                bench.add(session, ids, from, from + rows);
                added.push((session, rows, rows, false));
                continue;
            }
            let (drafts, kept) = drafts_and_kept(session, step);
            let kept = kept.min(ids.len() - from);
            let mut tokens = ids[..from + kept].to_vec();
            tokens.extend((kept..=drafts).map(|i| (ids[from] + 100 + i as u32 * 7) % 284));
            let to = from + 1 + drafts;
            let commit = if drafts == 0 { Commit::All } else { Commit::Verify };
            bench.add_as(commit, session, &tokens, from, to.min(tokens.len()));
            added.push((session, 1 + drafts, kept, drafts > 0));
        }
        let rows = bench.step();
        let mut first = 0;
        let mut kept_rows = Vec::new();
        for (session, rows_added, kept, verified) in added {
            check(session, at[session], &rows[first..first + kept]);
            first += rows_added;
            at[session] += kept;
            if verified {
                kept_rows.push((Slot(session as u32), kept));
            }
        }
        bench.stage.commit(&kept_rows).expect("rows of this step");
        step += 1;
    }
    assert!(step > 30, "{step} steps are too few for all pairs");
}

#[test]
fn logits_and_all_that_follows_do_not_know_of_drafts() {
    for name in MODELS {
        for isa in Isa::available() {
            for threads in [1, 2] {
                with_drafts_as_without(name, Way { isa, threads, kv: KvFormat::F16, chunk: 16 });
            }
        }
        for kv in [KvFormat::F32, KvFormat::Q8_0] {
            with_drafts_as_without(name, Way { isa: Isa::best(), threads: 2, kv, chunk: 16 });
        }
    }
}

/// So few tokens come into question that they come again and again, and penalties decide.
const FAVOURED: [(u32, f32); 5] = [(3, 9.0), (4, 9.0), (5, 9.0), (60, 9.0), (61, 9.0)];

fn sampling(seed: u64, seen: std::ops::Range<u32>) -> Sampling {
    Sampling {
        seed,
        choice: 0,
        temperature: 0.7,
        top_k: 40,
        top_p: 0.95,
        min_p: 0.02,
        repetition_penalty: 1.3,
        frequency_penalty: 1.4,
        presence_penalty: 0.7,
        seen,
        bias: 0..FAVOURED.len() as u32,
        allowed: 0..0,
    }
}

/// The tokens seen, each once: those of the prompt, and how often each was generated.
fn seen(prompt: &[u32], generated: &[u32]) -> Vec<Seen> {
    let mut all: Vec<u32> = prompt.iter().chain(generated).copied().collect();
    all.sort_unstable();
    all.dedup();
    let times = |token| generated.iter().filter(|&&g| g == token).count() as u32;
    all.into_iter().map(|token| Seen { token, generated: times(token) }).collect()
}

/// The answers to `rows` new rows of `tokens`, each asked with the same list of tokens seen.
fn sample(bench: &mut Bench, commit: Commit, tokens: &[u32], rows: usize, seen: &[Seen]) -> Vec<u32> {
    bench.add_as(commit, 0, tokens, tokens.len() - rows, tokens.len());
    bench.work.batch.seen.extend_from_slice(seen);
    bench.work.batch.bias.extend_from_slice(&FAVOURED);
    for ask in &mut bench.work.batch.asks {
        ask.want = Want::Sample(sampling(77, 0..seen.len() as u32));
    }
    bench.stage.step(&mut bench.work).expect("a step");
    let tokens = bench.work.answers.iter().map(|a| a.token).collect();
    bench.work.clear();
    tokens
}

#[test]
fn rows_behind_drafts_are_sampled_as_if_the_drafts_had_been_generated() {
    let prompt = [3, 4, 5, 3, 4, 5, 3];
    for name in MODELS {
        let file = tiny(name, Format::Q8_0);
        let way = Way { isa: Isa::best(), threads: 2, kv: KvFormat::F16, chunk: 16 };
        let mut bench = Bench::new(&file, way, 1, 64);
        let mut tokens = prompt.to_vec();
        let first = sample(&mut bench, Commit::All, &tokens, prompt.len(), &seen(&prompt, &[]));
        tokens.extend(first.last());
        while tokens.len() < 40 {
            let seen = seen(&prompt, &tokens[prompt.len()..]);
            tokens.extend(sample(&mut bench, Commit::All, &tokens, 1, &seen));
        }
        // Again, with all drafts right: every row gives the token that came without drafts.
        let mut bench = Bench::new(&file, way, 1, 64);
        sample(&mut bench, Commit::All, &prompt, prompt.len(), &[]);
        for from in (prompt.len()..35).step_by(1 + DRAFTS) {
            let to = from + 1 + DRAFTS;
            let seen = seen(&prompt, &tokens[prompt.len()..=from]);
            let found = sample(&mut bench, Commit::Verify, &tokens[..to], 1 + DRAFTS, &seen);
            assert_eq!(found, tokens[from + 1..=to], "{name}, rows from {from}");
            bench.stage.commit(&[(Slot(0), 1 + DRAFTS)]).expect("rows of this step");
        }
    }
}

#[test]
fn commits_of_rows_that_are_not_there_are_refused_and_change_nothing() {
    let file = tiny("qwen35", Format::F32);
    let ids = conversation(0, 12);
    let want = logits(&file, SOLO, &ids);
    let mut bench = Bench::new(&file, Way { chunk: 8, ..SOLO }, 2, 64);
    bench.add(0, &ids, 0, 6);
    bench.step();
    let refused = |r: Result<(), DeviceError>| matches!(r, Err(DeviceError::Batch(_)));
    assert!(refused(bench.stage.commit(&[(Slot(0), 1)])), "rows that were kept at once");
    bench.add_as(Commit::Verify, 0, &ids, 6, 9);
    bench.step();
    for wrong in
        [vec![(Slot(0), 4)], vec![(Slot(0), 0)], vec![(Slot(1), 1)], vec![(Slot(0), 1), (Slot(0), 2)]]
    {
        assert!(refused(bench.stage.commit(&wrong)), "{wrong:?}");
    }
    bench.stage.commit(&[(Slot(0), 2)]).expect("the first two rows");
    assert!(refused(bench.stage.commit(&[(Slot(0), 1)])), "rows that were committed before");
    bench.add(0, &ids, 8, 12);
    for (row, want) in bench.step().iter().zip(&want[8..]) {
        assert!(row.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
    // More rows than the record was made for.
    bench.add_as(Commit::Verify, 1, &ids, 0, 2 + DRAFTS);
    assert!(matches!(bench.stage.step(&mut bench.work), Err(DeviceError::Batch(_))));
}

/// A tiny model in which the embedding of one token is NaN.
fn with_a_broken_token(name: &str, token: usize) -> ModelFile {
    let file = tiny(name, Format::F32);
    let embedding = file.tensor("token_embd.weight").expect("an embedding");
    let (mut table, row) = (file.bytes(embedding).to_vec(), 4 * embedding.shape[0] as usize);
    table[token * row..(token + 1) * row].copy_from_slice(&f32::NAN.to_le_bytes().repeat(row / 4));
    let mut writer = Writer::new();
    for (key, value) in file.metadata().iter() {
        writer.put(key, value).expect("a key that was read");
    }
    for t in file.tensors() {
        let bytes = if t.name == "token_embd.weight" { table.as_slice() } else { file.bytes(t) };
        writer.tensor(&t.name, &t.shape, t.format, bytes).expect("a tensor that was read");
    }
    ModelFile::from_vec(writer.to_bytes()).expect("a model file")
}

#[test]
fn a_wrong_draft_that_overflows_says_which_row_and_harms_no_other() {
    const BROKEN: u32 = 283;
    for name in ["llama", "qwen35"] {
        let file = with_a_broken_token(name, BROKEN as usize);
        let ids: Vec<u32> = conversation(0, 20).into_iter().map(|id| id % 280).collect();
        let want = logits(&file, SOLO, &ids);
        let mut bench = Bench::new(&file, Way { chunk: 16, ..SOLO }, 1, 64);
        bench.add(0, &ids, 0, 10);
        bench.step();
        let mut tokens = ids[..11].to_vec();
        tokens.extend([BROKEN, 7, 8]);
        bench.add_as(Commit::Verify, 0, &tokens, 10, 14);
        for ask in &mut bench.work.batch.asks {
            ask.want = Want::Sample(common::GREEDY);
        }
        bench.stage.step(&mut bench.work).expect("a step");
        assert_eq!(bench.work.faults, [Fault { segment: 0, row: 1 }], "{name}");
        assert_eq!(bench.work.answers[0].row, 0, "{name}");
        assert_ne!(bench.work.answers[0].token, BROKEN);
        bench.work.clear();
        bench.stage.commit(&[(Slot(0), 1)]).expect("the certain row");
        bench.add(0, &ids, 11, 20);
        for (row, want) in bench.step()[4..].iter().zip(&want[11..]) {
            assert!(row.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}");
        }

        // The certain token itself, at the end of the rows of a prompt and with a draft behind.
        let tokens = [&ids[..10], &[BROKEN, 7]].concat();
        let mut bench = Bench::new(&file, Way { chunk: 16, ..SOLO }, 1, 64);
        bench.add(0, &ids, 0, 10);
        bench.step();
        bench.add_as(Commit::Verify, 0, &tokens, 10, 12);
        bench.stage.step(&mut bench.work).expect("a step");
        assert_eq!(bench.work.faults, [Fault { segment: 0, row: 0 }], "{name}");
    }
}
