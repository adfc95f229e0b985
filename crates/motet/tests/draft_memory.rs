//! Memory with drafts: a served process against its plan, on every network that has a draft head.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests, and what they measured")]

mod served;

use std::path::PathBuf;
use std::process::Command;
use std::thread;

use serde_json::{Value, json};
use served::Served;

const MIB: f64 = (1 << 20) as f64;

/// The models with a draft head (nothing: the built-in one), their contexts, and so many conversations that there is
/// something to measure.
const MODELS: [(Option<&str>, usize, usize); 3] =
    [(None, 2048, 24), (Some("qwen35"), 512, 64), (Some("glm4moe"), 512, 64)];

fn model(name: Option<&str>) -> Vec<String> {
    let tiny = |name| {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        root.join(format!("tests/fixtures/tiny/tiny-{name}-f32.gguf")).to_str().unwrap().to_owned()
    };
    name.map_or(Vec::new(), |name| vec!["--model".to_owned(), tiny(name)])
}

fn with(arguments: &[String], more: &[&str]) -> Vec<String> {
    arguments.iter().cloned().chain(more.iter().map(|&a| a.to_owned())).collect()
}

fn plan(arguments: &[String]) -> Value {
    let planned =
        Command::new(env!("CARGO_BIN_EXE_motet")).arg("plan").args(arguments).arg("--json").output().unwrap();
    serde_json::from_slice(&planned.stdout).unwrap_or_else(|_| panic!("{arguments:?}: {planned:?}"))
}

fn start(arguments: &[String]) -> Served {
    Served::start(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Resident memory once all conversations have been as long as they can be, and what was planned.
fn resident(arguments: &[String], context: usize, sessions: usize) -> (f64, f64) {
    let total = plan(arguments)["total"].as_f64().unwrap();
    let served = start(arguments);
    thread::scope(|scope| {
        for session in 0..sessions {
            let served = &served;
            scope.spawn(move || {
                // The answers are so long that the last one begins before the first one ends: all are full at once.
                let prompt: Vec<usize> =
                    (0..context / 2).map(|i| 5 + (i * i * 7 + i * 31 + session * 101) % 250).collect();
                let most = context - prompt.len();
                let body = json!({ "prompt": prompt, "max_tokens": most, "temperature": 1, "seed": session,
                    "ignore_eos": true });
                let answer = served.request("POST", "/v1/completions", Some(&body));
                assert!(answer.contains(&format!("\"total_tokens\":{context}")), "{answer}");
            });
        }
    });
    (served.memory("VmRSS:"), total)
}

#[test]
fn resident_memory_with_drafts_is_the_plans() {
    for (name, context, sessions) in MODELS {
        let count = sessions.to_string();
        let base = with(&model(name), &["--sessions", &count, "--kv", "f32", "--checkpoint-memory", "0"]);
        let (off, off_planned) = resident(&with(&base, &["--drafts", "off"]), context, sessions);
        let (on, on_planned) = resident(&with(&base, &["--drafts", "3"]), context, sessions);
        println!(
            "{name:?}: {:.2} MiB resident, {:.2} planned; without drafts {:.2} and {:.2}",
            on / MIB,
            on_planned / MIB,
            off / MIB,
            off_planned / MIB
        );
        let bound = 0.02 * on_planned + 8.0 * MIB;
        assert!((on - on_planned).abs() <= bound, "{name:?}: {on} resident, {on_planned} planned");
        // What no line can know (the program itself, its libraries) is the same in both.
        let (more, planned) = (on - off, on_planned - off_planned);
        assert!(planned > 8.0 * MIB, "{name:?}: too little to measure: {planned}");
        let bound = 0.05 * planned + MIB;
        assert!((more - planned).abs() <= bound, "{name:?}: drafts take {more} bytes, planned are {planned}");
    }
}

#[test]
fn the_smallest_memory_with_drafts_does_and_a_byte_less_does_not() {
    for (name, context, _) in MODELS {
        for look_up in [false, true] {
            let mut base = with(&model(name), &["--sessions", "2", "--drafts", "3"]);
            base.extend(look_up.then(|| "--look-up".to_owned()));
            let smallest = plan(&base)["smallest_memory"].as_u64().unwrap();
            let memory = |bytes: u64| with(&base, &["--memory", &bytes.to_string()]);

            let served = start(&memory(smallest));
            let body = json!({ "prompt": [5, 6, 7, 5, 6, 7], "max_tokens": context - 6, "ignore_eos": true });
            let answer = served.request("POST", "/v1/completions", Some(&body));
            assert!(answer.contains(&format!("\"total_tokens\":{context}")), "{answer}");
            assert!(served.memory("VmHWM:") <= smallest as f64, "{name:?}");

            let refused = Command::new(env!("CARGO_BIN_EXE_motet"))
                .args(["serve", "--port", "0"])
                .args(memory(smallest - 1))
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&refused.stderr);
            assert_eq!(refused.status.code(), Some(1), "{name:?}: {said}");
            assert!(
                said.contains(&format!("the least that would do is {smallest} bytes")),
                "{name:?}: {said}"
            );
            // It was refused before the server listened, let alone loaded.
            assert_eq!(said.lines().count(), 1, "{name:?}: {said}");
        }
    }
}

/// The lines of a plan but those that the pools make up.
fn but_pools(plan: &Value) -> Vec<Value> {
    let pools = ["keys and values", "checkpoints", "prefix index"];
    let lines = plan["lines"].as_array().unwrap().iter();
    lines
        .filter(|line| pools.iter().all(|pool| !line["name"].as_str().unwrap().ends_with(pool)))
        .cloned()
        .collect()
}

#[test]
fn between_the_smallest_memory_and_the_full_plan_only_the_pools_shrink() {
    for (name, _, sessions) in MODELS {
        let count = sessions.to_string();
        let base = with(&model(name), &["--sessions", &count, "--drafts", "3"]);
        let full = plan(&base);
        let (least, most) = (full["smallest_memory"].as_u64().unwrap(), full["most"].as_u64().unwrap());
        assert!(but_pools(&full).iter().any(|line| line["name"] == "draft head"), "{full}");
        let mut pages = Vec::new();
        for step in 0..=5 {
            let memory = least + (most - least) * step / 5;
            let plan = plan(&with(&base, &["--memory", &memory.to_string()]));
            assert_eq!(but_pools(&plan), but_pools(&full), "{name:?}, {memory} bytes");
            assert!(plan["most"].as_u64().unwrap() <= memory, "{name:?}, {memory} bytes: {plan}");
            pages.push(plan["pages"][0].as_u64().unwrap());
        }
        assert!(pages.is_sorted_by(|a, b| a < b), "{name:?}: {pages:?} pages");
    }
}
