//! The commands that measure, run as a person would: `bench`, `perplexity`, `imatrix` on the built-in model.

#![allow(clippy::expect_used, missing_docs, reason = "a test stops where something is missing")]

use std::path::{Path, PathBuf};
use std::process::Command;

use motet_gguf::{Format, ModelFile};
use serde_json::Value;

/// What the program prints; it must succeed.
fn motet(arguments: &[&str]) -> String {
    let out = Command::new(env!("CARGO_BIN_EXE_motet")).args(arguments).output().expect("the program starts");
    assert!(out.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).expect("text")
}

/// A text of some hundred tokens.
fn text(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let lines = (1..60).map(|i| format!("Line {i} of {}: the fox ran over {} hills.\n", i * 7, i + 3));
    std::fs::write(&path, lines.collect::<String>()).expect("a file");
    path
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn bench_reports_every_measurement_that_was_asked_for() {
    let report = json(&motet(&[
        "bench",
        "--threads",
        "1",
        "--prefill",
        "16,70",
        "--decode",
        "4",
        "--context",
        "9",
        "--conversations",
        "1,3",
        "--repetitions",
        "2",
        "--kv",
        "f32",
        "--json",
    ]));
    assert_eq!(report["model"], "motet-demo");
    assert_eq!(report["threads"], 1);
    assert_eq!(report["kv"], "f32");
    assert!(report["isa"].is_string());
    assert!(report["load_seconds"].as_f64().expect("seconds") > 0.0);
    let keys = |of: &str, key: &str| -> Vec<u64> {
        let lines = report[of].as_array().expect("a list");
        assert!(lines.iter().all(|line| line["tokens_per_second"].as_f64().expect("a rate") > 0.0));
        lines.iter().map(|line| line[key].as_u64().expect("a number")).collect()
    };
    assert_eq!(keys("prefill", "tokens"), [16, 70]);
    assert_eq!(keys("decode", "conversations"), [1, 3]);
}

#[test]
fn perplexity_is_the_same_for_people_and_programs() {
    let file = text("perplexity.txt");
    let file = file.to_str().expect("a path");
    let arguments = ["perplexity", "-t", "1", "-f", file, "-c", "64", "--chunks", "3"];
    let people = motet(&arguments);
    let programs = json(&motet(&[&arguments[..], &["--json"]].concat()));
    assert_eq!(programs["chunks"], 3);
    // Of each chunk of 64 the tokens 33 … 63.
    assert_eq!(programs["scored_tokens"], 3 * 31);
    let (perplexity, error) = (&programs["perplexity"], &programs["standard_error"]);
    let (perplexity, error) = (perplexity.as_f64().expect("a number"), error.as_f64().expect("a number"));
    assert!(perplexity > 1.0 && error > 0.0);
    let last = people.lines().last().expect("a line");
    assert_eq!(last, format!("Final estimate: PPL = {perplexity:.4} +/- {error:.5}"));
}

#[test]
fn imatrix_holds_the_inputs_of_every_product_of_a_layer() {
    let file = text("imatrix.txt");
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("imatrix.gguf");
    let (file, path) = (file.to_str().expect("a path"), out.to_str().expect("a path"));
    motet(&["imatrix", "-t", "1", "-f", file, "-o", path, "-c", "80", "--chunks", "2"]);
    let imatrix = ModelFile::open(&out).expect("a GGUF file");
    assert_eq!(imatrix.metadata().required::<u64>("imatrix.chunk_count").expect("a key"), 2);
    let read = |name: &str| -> Vec<f32> {
        let tensor = imatrix.tensor(name).expect(name);
        assert_eq!(tensor.format, Format::F32);
        let floats = imatrix.bytes(tensor).chunks_exact(4);
        floats.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let model = ModelFile::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/motet-demo.gguf"));
    let model = model.expect("the built-in model");
    // Not products: the convolutions' taps, and the MTP layer (the fifth), which does not run yet.
    let runs =
        |name: &str| name.starts_with("blk.") && !name.starts_with("blk.4.") && !name.contains("conv1d");
    let products = model.tensors().iter().filter(|t| runs(&t.name) && t.shape.len() == 2);
    let products: Vec<_> = products.collect();
    assert!(!products.is_empty());
    assert_eq!(imatrix.tensors().len(), 2 * products.len());
    for weight in &products {
        assert_eq!(read(&format!("{}.counts", weight.name)), [160.0], "{}", weight.name);
        let squares = read(&format!("{}.in_sum2", weight.name));
        assert_eq!(squares.len() as u64, weight.shape[0]);
        assert!(squares.iter().all(|&s| s.is_finite() && s >= 0.0) && squares.iter().any(|&s| s > 0.0));
    }
    // What goes into attention is normed: x / √(mean x²) · gain. So Σ (x / gain)² over the columns is the width, for
    // each of the 160 rows.
    let gain = model.tensor("blk.3.attn_norm.weight").expect("a norm");
    let mut gains = vec![0.0; gain.row_len()];
    gain.format.dequantize(model.bytes(gain), &mut gains);
    let squares = read("blk.3.attn_q.weight.in_sum2");
    let per_row: f64 =
        squares.iter().zip(&gains).map(|(s, g)| f64::from(*s) / f64::from(g * g)).sum::<f64>() / 160.0;
    assert!((per_row / gains.len() as f64 - 1.0).abs() < 1e-3, "{per_row} for {} columns", gains.len());
    // Queries, keys and values have the same input.
    assert_eq!(squares, read("blk.3.attn_k.weight.in_sum2"));
    assert_eq!(squares, read("blk.3.attn_v.weight.in_sum2"));
}
