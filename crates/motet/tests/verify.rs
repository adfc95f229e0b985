//! `motet verify` on the built-in model.

use std::process::Command;

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
    // Every run compared at least the shortest answer of each of its conversations.
    for outcome in outcomes {
        assert!(outcome["rows"].as_u64() >= outcome["conversations"].as_u64().map(|n| 16 * n), "{outcome}");
    }
}

#[test]
fn no_time_is_no_success() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_motet")).args(["verify", "--budget", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("Left out for lack of time"));
}
