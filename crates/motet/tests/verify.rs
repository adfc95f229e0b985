//! `motet verify` on the built-in model.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

#[test]
fn the_built_in_model_passes() {
    let output = Command::new(env!("CARGO_BIN_EXE_motet"))
        .args(["verify", "--budget", "20", "--json"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["differing"], 0);
    let outcomes = report["outcomes"].as_array().unwrap();
    assert!(!outcomes.is_empty(), "{errors}");
    let rows: u64 = outcomes.iter().map(|o| o["rows"].as_u64().unwrap()).sum();
    assert!(rows > 0 && report["rows"] == rows, "{errors}");
    for outcome in outcomes {
        // Every run did what its way says, and found NaN in the way of whoever strays.
        assert_eq!(outcome["missed"].as_array().map(Vec::len), Some(0), "{outcome}");
        assert!(outcome["fresh_pages"].as_u64() > Some(0), "{outcome}");
        let is_back = outcome["way"]["reuse"] == "stepping_back";
        assert_eq!(outcome["steps_back"].as_u64() > Some(0), is_back, "{outcome}");
        // Every run compared at least the shortest answer of each of its conversations.
        let conversations = outcome["way"]["conversations"].as_u64().unwrap();
        assert!(outcome["rows"].as_u64() >= Some(16 * conversations), "{outcome}");
    }
    let left_out = report["pairs_left_out"].as_array().unwrap();
    assert_eq!(report["pairs"][0].as_u64().unwrap() + left_out.len() as u64, report["pairs"][1]);
}

#[test]
fn the_built_in_model_passes_with_drafts() {
    let output = Command::new(env!("CARGO_BIN_EXE_motet"))
        .args(["verify", "--drafts", "--budget", "40", "--json"])
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["differing"], 0);
    let outcomes = report["outcomes"].as_array().unwrap();
    let sum = |what: &str| outcomes.iter().map(|o| o[what].as_u64().unwrap()).sum::<u64>();
    // Tokens of the answers were drafted, and some came true: drafts were looked at, not only made.
    assert!(sum("accepted") > 0 && sum("accepted") < sum("drafted"), "{errors}");
    for outcome in outcomes {
        let off = outcome["way"]["drafts"][0] == "off";
        assert_eq!(outcome["drafted"] == 0, off, "{outcome}");
    }
}

/// Every kind of network: those that have a draft head use it, for the others drafts are looked up.
#[test]
fn every_kind_of_network_passes_with_drafts() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    for name in ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "glm4moe"] {
        let output = Command::new(env!("CARGO_BIN_EXE_motet"))
            .args(["verify", "--drafts", "--budget", "60", "--json", "--model"])
            .arg(root.join(format!("tests/fixtures/tiny/tiny-{name}-f32.gguf")))
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{name}: {errors}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["differing"], 0, "{name}: {errors}");
        let outcomes = report["outcomes"].as_array().unwrap();
        let sum = |what: &str| outcomes.iter().map(|o| o[what].as_u64().unwrap()).sum::<u64>();
        assert!(outcomes.len() > 20 && sum("accepted") > 0, "{name}: {errors}");
    }
}

/// Behind several stages, with several batches in flight, every row is that of the conversation alone on one stage.
#[test]
fn stages_change_no_bit() {
    for stages in [2, 3] {
        verify_in(stages, None, &["--drafts", "--budget", "40"]);
    }
    for name in ["llama", "qwen3moe", "gemma3", "qwen35", "glm4moe"] {
        verify_in(2, Some(name), &["--drafts", "--budget", "60"]);
    }
}

/// Neither do as many stages as a network has layers.
#[test]
fn a_stage_for_each_layer_changes_no_bit() {
    for (name, layers) in [
        ("llama", 4),
        ("qwen2", 3),
        ("qwen3", 2),
        ("qwen3moe", 3),
        ("gemma3", 4),
        ("qwen35", 4),
        ("qwen35moe", 3),
        ("glm4moe", 3),
    ] {
        verify_in(layers, Some(name), &["--budget", "60"]);
    }
    verify_in(4, Some("qwen35"), &["--drafts", "--budget", "60"]);
}

/// `motet verify` of the built-in or a tiny model in so many stages finds nothing.
fn verify_in(stages: usize, model: Option<&str>, more: &[&str]) {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new(env!("CARGO_BIN_EXE_motet"));
    command.args(["verify", "--json", "--stages", &stages.to_string()]).args(more);
    if let Some(name) = model {
        command.arg("--model").arg(root.join(format!("tests/fixtures/tiny/tiny-{name}-f32.gguf")));
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let what = format!("{model:?} in {stages} stages: {errors}");
    assert!(output.status.success(), "{what}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["differing"], 0, "{what}");
    let outcomes = report["outcomes"].as_array().unwrap();
    let sum = |what: &str| outcomes.iter().map(|o| o[what].as_u64().unwrap()).sum::<u64>();
    let drafts = more.contains(&"--drafts");
    assert!(outcomes.len() > 15 && sum("rows") > 5000 && (sum("accepted") > 0) == drafts, "{what}");
}

#[test]
fn no_time_is_no_success() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_motet")).args(["verify", "--budget", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("Left out for lack of time"));
}

/// Once conversations have run alone, the file's weights change under the command's hands: whatever runs afterwards is
/// no longer what it was alone.
#[test]
fn a_difference_fails_the_command() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("changing.gguf");
    std::fs::copy(root.join("assets/motet-demo.gguf"), &path).unwrap();
    let mut process = Command::new(env!("CARGO_BIN_EXE_motet"))
        .args(["verify", "--budget", "20", "--model"])
        .arg(&path)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut progress = BufReader::new(process.stderr.take().unwrap());
    let mut line = String::new();
    progress.read_line(&mut line).unwrap();
    assert!(line.contains(" 0 differ"), "{line}");
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    for at in (len / 4..len).step_by(997) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    }
    let mut rest = String::new();
    progress.read_to_string(&mut rest).unwrap();
    let output = process.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{rest}");
    assert!(rest.contains("conversations differ from what they are alone"), "{rest}");
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(report.contains("DIFFERENCE") && report.contains("conversation 0"), "{report}");
}
