//! Drafts that are switched on while conversations run, on the CPU: what that takes is what the device says, where the
//! workspace does it takes nothing, and a refusal harms nobody.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "tests")]

mod library;

use library::{Limited, MIB, Rig, heard, mapped};
use motet_engine::{Drafts, DraftsError, Options};
use motet_model::Device;

const MODEL: &str = "assets/motet-demo.gguf";

fn rig(model: &str, drafts: Drafts) -> Rig {
    let options = Options { sessions: 64, context: Some(256), drafts, ..Options::default() };
    Rig::new(model, &options)
}

/// What the device says of the record of verify rows with so many drafts to a step.
fn record(rig: &Rig, drafts: usize) -> u64 {
    let mut limits = rig.engine.plan().limits().clone();
    limits.batch.drafts = drafts;
    rig.device.footprint(&rig.network, rig.engine.plan().split(), &limits).unwrap()[0].rollback
}

// One test: the process's memory is measured.
#[test]
fn room_for_drafts_comes_between_steps_and_a_refusal_does_no_harm() {
    let alone = {
        let mut rig = rig(MODEL, Drafts::Off);
        let stream = rig.submit(60, 150);
        rig.rest();
        heard(stream)
    };

    let mut on = rig(MODEL, Drafts::Off);
    let stream = on.submit(60, 150);
    on.turns(10);
    let needed = record(&on, 16);
    assert!(needed > 4 * MIB, "too little to measure: {needed}");
    let before = mapped();
    let limited = Limited::to(needed / 2);
    let refused = on.driver.set_drafts(Drafts::Exactly(16), true).unwrap_err();
    drop(limited);
    assert!(matches!(refused, DraftsError::Device(_)), "{refused:?}");
    assert!(refused.to_string().contains(&format!("{needed} bytes")), "{refused}");
    assert!(mapped() - before < MIB, "what was refused was taken");
    on.turns(10);
    on.driver.set_drafts(Drafts::Exactly(16), true).unwrap();
    let grown = mapped() - before;
    assert!((needed - MIB / 2..needed + MIB).contains(&grown), "{grown} bytes more, {needed} expected");
    on.turns(10);
    assert!(on.engine.metrics().num_draft_tokens > 0);
    // Fewer and more again: there is room.
    on.driver.set_drafts(Drafts::Exactly(2), true).unwrap();
    on.turns(2);
    on.driver.set_drafts(Drafts::Exactly(16), true).unwrap();
    assert!(mapped() - before <= grown + MIB / 2);
    on.rest();
    assert!(heard(stream) == alone);
    drop(on);

    // The network's own head, loaded from the start: more drafts, none, and again.
    let mut head = rig(MODEL, Drafts::Exactly(1));
    let stream = head.submit(60, 150);
    head.turns(10);
    for drafts in [Drafts::Exactly(7), Drafts::Off, Drafts::Auto, Drafts::Exactly(3)] {
        head.driver.set_drafts(drafts, false).unwrap();
        head.turns(6);
    }
    head.rest();
    assert!(heard(stream) == alone);
    drop(head);

    // Nothing to record and nothing to copy: the workspace there is does.
    let mut plain = rig("tests/fixtures/tiny/tiny-llama-f32.gguf", Drafts::Off);
    let stream = plain.submit(60, 100);
    plain.turns(10);
    let before = mapped();
    plain.driver.set_drafts(Drafts::Exactly(16), false).unwrap();
    assert!(mapped() - before < MIB / 2, "{} bytes", mapped() - before);
    plain.rest();
    heard(stream);
    assert!(plain.engine.metrics().num_draft_tokens > 0);
}
