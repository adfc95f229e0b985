//! As a library: the CPU's workspace comes with the first session, grows between steps to what the sessions need
//! together, and a growth that the system refuses harms nobody.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "tests")]

mod library;

use library::{Limited, MIB, Rig, heard, mapped};
use motet_engine::{Options, Turn, Workspace};
use motet_model::Device;

/// Rows of the largest batch.
const ROWS: usize = 1024;

fn engine(workspace: Workspace) -> Rig {
    let options = Options {
        sessions: 4,
        context: Some(1200),
        rows: ROWS,
        prefill_chunk: Some(ROWS),
        workspace,
        ..Options::default()
    };
    Rig::new("assets/motet-demo.gguf", &options)
}

/// Bytes of a workspace for batches of so many rows, as the device says.
fn workspace(rig: &Rig, rows: usize) -> u64 {
    let mut limits = rig.engine.plan().limits().clone();
    limits.batch.rows = rows;
    rig.device.footprint(&rig.network, rig.engine.plan().split(), &limits).unwrap()[0].workspace()
}

/// Growing to `rows` took what the device says of such a workspace beyond one of `before` rows.
fn assert_grown(rig: &Rig, (before, rows): (usize, usize), grown: u64) {
    let expected = workspace(rig, rows) - if before == 0 { 0 } else { workspace(rig, before) };
    let spare = MIB / 2;
    assert!(
        (expected - expected.min(spare)..=expected + spare).contains(&grown),
        "from {before} to {rows} rows: {grown} bytes more, {expected} expected"
    );
}

// One test: the process's memory is measured.
#[test]
fn the_workspace_comes_and_grows_with_sessions_and_a_refused_growth_does_no_harm() {
    let mut rig = engine(Workspace::WithSessions);
    assert!(workspace(&rig, ROWS) > 4 * MIB, "too little to measure: {}", workspace(&rig, ROWS));
    let at_rest = mapped();
    assert_eq!(rig.driver.turn(), Turn::Idle);
    assert_eq!(mapped(), at_rest, "nobody is there, and yet memory was taken");

    let short = rig.submit(20, 60);
    rig.turns(5);
    let first = mapped();
    assert_grown(&rig, (0, 32), first - at_rest);
    // Between two steps of the first conversation it grows to what both need.
    let long = rig.submit(1000, 5);
    rig.turns(1);
    assert_grown(&rig, (32, ROWS), mapped() - first);
    rig.rest();
    let together = [heard(short), heard(long)];
    drop(rig);

    // Now the system has no memory for the long one: it is read in the workspace that there is.
    let mut rig = engine(Workspace::WithSessions);
    let short = rig.submit(20, 60);
    rig.turns(5);
    let first = mapped();
    let long = rig.submit(1000, 5);
    let limited = Limited::to(workspace(&rig, ROWS) / 4);
    rig.turns(1);
    let grown = mapped() - first;
    assert!(grown < workspace(&rig, ROWS) / 4, "{grown} bytes were taken");
    rig.rest();
    drop(limited);
    assert!(rig.driver.at_rest());
    let refused = [heard(short), heard(long)];
    drop(rig);

    // Both say what they say alone, with room from the start.
    let mut roomy = engine(Workspace::AtStart);
    let alone = [(20, 60), (1000, 5)].map(|(prompt, answer)| {
        let stream = roomy.submit(prompt, answer);
        roomy.rest();
        heard(stream)
    });
    assert!(together == alone);
    assert!(refused == alone);
}
