//! Real models against llama.cpp, and the process against its plan.
//!
//! The models are those that `motet pull` fetches; `cargo xtask test` puts them where these tests look.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests, and what they measured")]

mod served;

use std::path::PathBuf;
use std::process::Command;
use std::thread;

use motet_cpu::{CpuDevice, CpuOptions};
use motet_engine::{Engine, Event, Machine, Options, Plan, Request};
use motet_gguf::{Format, ModelFile, Writer};
use motet_model::{Device, KvFormat, Network, Split};
use serde_json::{Value, json};

use served::Served;

const SMOLLM2: &str = "smollm2-135m.gguf";
const GEMMA3: &str = "gemma3-270m.gguf";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A real model's file.
fn real(name: &str) -> PathBuf {
    let folder = std::env::var_os("MOTET_MODELS").map_or_else(|| root().join(".cache/models"), PathBuf::from);
    let path = folder.join(name);
    assert!(path.exists(), "{} is not there: run `cargo xtask test`, which fetches it", path.display());
    path
}

/// An engine for 1,024 tokens of context with keys and values in F32.
fn engine(file: ModelFile) -> Engine {
    let options = Options { context: Some(1024), kv: KvFormat::F32, ..Options::default() };
    let network = Network::from_gguf(&file).unwrap();
    let device = CpuDevice::new(CpuOptions::from_env().unwrap());
    let plan = Plan::new(&network, &options, Machine::here(), &device).unwrap();
    let limits = plan.limits().clone();
    Engine::start(plan, move || device.prepare(&network, &file, &Split::whole(&network), &limits))
}

/// The same model with every weight as F32: its products round no activation.
fn exact(file: &ModelFile) -> ModelFile {
    let mut writer = Writer::new();
    writer.put_all(file.metadata()).unwrap();
    let floats: Vec<Vec<u8>> = file
        .tensors()
        .iter()
        .map(|t| {
            let mut floats = vec![0.0; t.elements() as usize];
            t.format.dequantize(file.bytes(t), &mut floats);
            floats.iter().flat_map(|x| x.to_le_bytes()).collect()
        })
        .collect();
    for (t, bytes) in file.tensors().iter().zip(&floats) {
        writer.tensor(&t.name, &t.shape, Format::F32, bytes).unwrap();
    }
    ModelFile::from_vec(writer.to_bytes()).unwrap()
}

/// What llama.cpp said of one position of its greedy answer: the ten most likely tokens.
struct Position {
    prompt: usize,
    tokens: Vec<u32>,
    at: usize,
    top: Vec<(u32, f32)>,
}

fn reference(values: &str) -> Vec<Position> {
    let path = root().join("tests/fixtures/expected").join(values);
    let reference: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids =
        |v: &Value| v.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect::<Vec<_>>();
    let pair = |t: &Value| (t[0].as_u64().unwrap() as u32, t[1].as_f64().unwrap() as f32);
    let mut positions = Vec::new();
    for (prompt, item) in reference["items"].as_array().unwrap().iter().enumerate() {
        let (before, answer) = (ids(&item["prompt_ids"]), ids(&item["tokens"]));
        for (i, expected) in item["top"].as_array().unwrap().iter().enumerate() {
            let top = expected["top10"].as_array().unwrap().iter().map(pair).collect();
            // A prompt's first token has no score.
            let at = before.len() + i - 1;
            positions.push(Position { prompt, tokens: [before.clone(), answer.clone()].concat(), at, top });
        }
    }
    positions
}

/// The engine's 20 most likely tokens at each of the positions.
fn tops(engine: &Engine, positions: &[Position]) -> Vec<Vec<(u32, f32)>> {
    let mut scored: Vec<Vec<Vec<(u32, f32)>>> = Vec::new();
    for position in positions {
        if position.prompt == scored.len() {
            let mut request = Request::new(position.tokens.clone());
            request.prompt_logprobs = Some(20);
            request.max_tokens = Some(1);
            let mut stream = engine.submit(request).unwrap();
            let mut rows = Vec::new();
            while let Some(event) = stream.blocking_next() {
                match event {
                    Event::Prompt(s) => rows.push(s.top),
                    Event::Failed(error) => panic!("{error}"),
                    _ => {}
                }
            }
            scored.push(rows);
        }
    }
    positions.iter().map(|p| scored[p.prompt][p.at].clone()).collect()
}

/// Both implementations round activations, each in its own way, so each is off from the exact network by about as
/// much, and from each other by more. motet's log-probabilities of llama.cpp's ten most likely tokens must lie nearer
/// to the exact network's than llama.cpp's do, and the most likely token must be the same wherever the exact network and
/// llama.cpp agree on one by more than 0.5.
fn compare_with_llama_cpp(model: &str, values: &str) {
    let file = ModelFile::open(&real(model)).unwrap();
    let positions = reference(values);
    let exact = tops(&engine(exact(&file)), &positions);
    let ours = tops(&engine(file), &positions);
    let of = |list: &[(u32, f32)], token: u32| list.iter().find(|(t, _)| *t == token).map(|(_, l)| *l);
    let (mut our_error, mut their_error, mut between, mut worst, mut count) = (0.0, 0.0, 0.0, 0.0f32, 0);
    for ((position, exact), ours) in positions.iter().zip(&exact).zip(&ours) {
        for &(token, theirs) in &position.top {
            let (Some(exact), Some(ours)) = (of(exact, token), of(ours, token)) else { continue };
            our_error += f64::from((ours - exact).abs());
            their_error += f64::from((theirs - exact).abs());
            between += f64::from((ours - theirs).abs());
            worst = worst.max((ours - theirs).abs());
            count += 1;
        }
        let sure = |list: &[(u32, f32)]| list[0].1 - list[1].1 > 0.5;
        if sure(&position.top) && sure(exact) && position.top[0].0 == exact[0].0 {
            assert_eq!(ours[0].0, exact[0].0, "{model}, prompt {}, token {}", position.prompt, position.at);
        }
    }
    let mean = |sum: f64| sum / f64::from(count);
    let (our_error, their_error) = (mean(our_error), mean(their_error));
    println!(
        "{model}: {count} log-probabilities; mean difference from the exact network {our_error:.3} (llama.cpp \
         {their_error:.3}), from each other {:.3}, at most {worst:.2}",
        mean(between)
    );
    assert!(
        count as usize > positions.len() * 9,
        "{model}: only {count} tokens are among the first 20 of all three"
    );
    assert!(our_error <= their_error, "{model}: {our_error} off in the mean, llama.cpp {their_error}");
}

#[test]
fn smollm2_is_nearer_to_its_exact_network_than_llama_cpp() {
    compare_with_llama_cpp(SMOLLM2, "smollm2_top10.json");
}

#[test]
fn gemma3_is_nearer_to_its_exact_network_than_llama_cpp() {
    compare_with_llama_cpp(GEMMA3, "gemma3_270m_top10.json");
}

const MIB: f64 = (1 << 20) as f64;

/// A served model, and the plan by which it is served: loading it took no more than the plan and 32 MiB.
#[cfg(target_os = "linux")]
fn loaded_within_the_plan(arguments: &[&str]) -> (Served, Value) {
    let planned =
        Command::new(env!("CARGO_BIN_EXE_motet")).arg("plan").args(arguments).arg("--json").output();
    let plan: Value = serde_json::from_slice(&planned.unwrap().stdout).unwrap();
    let total = plan["total"].as_f64().unwrap();
    let served = Served::start(arguments);
    let peak = served.memory("VmHWM:");
    let (peak_mib, total_mib) = (peak / MIB, total / MIB);
    println!("{}: the peak while loading is {peak_mib:.1} MiB, the plan {total_mib:.1} MiB", arguments[1]);
    assert!(
        peak <= total + 32.0 * MIB,
        "the peak while loading is {peak_mib:.1} MiB, the plan {total_mib:.1}"
    );
    (served, plan)
}

#[cfg(target_os = "linux")]
#[test]
fn gemma3_is_loaded_within_its_plan() {
    let model = real(GEMMA3);
    // As little state as there can be, so that what is taken while loading can't hide in it.
    loaded_within_the_plan(&["--model", model.to_str().unwrap(), "--sessions", "1", "--ctx", "64"]);
}

/// Resident memory with `sessions` conversations that fill 31 of their 32 pages, and the plan's state per session for so
/// much. No page is left half full: one that is goes to whoever comes later, and it would depend on chance how many.
#[cfg(target_os = "linux")]
fn resident(sessions: u32, stages: &str) -> (f64, f64) {
    let (model, count) = (real(SMOLLM2), sessions.to_string());
    let arguments =
        ["--model", model.to_str().unwrap(), "--sessions", &count, "--ctx", "2048", "--stages", stages];
    let (served, plan) = loaded_within_the_plan(&arguments);
    let total = plan["total"].as_f64().unwrap();
    thread::scope(|scope| {
        for session in 0..sessions {
            let served = &served;
            scope.spawn(move || {
                // The last token is told and never run.
                let prompt: Vec<u32> = (0..1400).map(|i| 100 + (i * 7 + session * 1301) % 40_000).collect();
                let body = json!({
                    "prompt": prompt, "max_tokens": 585, "temperature": 0, "ignore_eos": true,
                });
                let answer = served.request("POST", "/v1/completions", Some(&body));
                assert!(answer.contains("\"total_tokens\":1985"), "{answer}");
            });
        }
    });
    let rss = served.memory("VmRSS:");
    let bound = 0.02 * total + 8.0 * MIB;
    assert!(
        (rss - total).abs() <= bound,
        "{sessions} sessions, {stages} stages: {:.1} MiB resident, {:.1} planned, {:.1} allowed between them",
        rss / MIB,
        total / MIB,
        bound / MIB
    );
    (rss, plan["state_per_session"].as_f64().unwrap() * 31.0 / 32.0)
}

#[cfg(target_os = "linux")]
#[test]
fn resident_memory_is_the_plans_and_a_conversation_costs_its_state() {
    let (one, state) = resident(1, "1");
    let (eight, _) = resident(8, "1");
    let off = (eight - one) / (7.0 * state) - 1.0;
    let (more, planned) = ((eight - one) / MIB, 7.0 * state / MIB);
    assert!(off.abs() <= 0.02, "seven more conversations cost {more:.1} MiB, their state is {planned:.1}");

    // Each of two stages holds what it runs; together they hold what one does.
    let (two_stages, _) = resident(8, "2");
    let off = two_stages / eight - 1.0;
    assert!(off.abs() <= 0.02, "two stages: {:.1} MiB, one: {:.1}", two_stages / MIB, eight / MIB);
}
