//! The plan against values computed by hand, on a device whose footprint is made up for it.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::scripted::Sketch;
use motet_engine::{Drafts, Line, Machine, Options, Plan, PlanError};
use motet_gguf::ModelFile;
use motet_model::device::DraftShare;
use motet_model::{Device, DeviceError, Footprint, Limits, Network, Split, Stage};
use proptest::prelude::*;

/// 1 GB of weights, a workspace of 10 kB a row, pages of 10 kB (full) and 20 kB (window), 500 kB of recurrent state.
struct Fixed;

impl Device for Fixed {
    fn name(&self) -> String {
        "fixed".into()
    }

    fn footprint(&self, n: &Network, split: &Split, limits: &Limits) -> Result<Vec<Footprint>, DeviceError> {
        let layout = n.state(limits.draft_head);
        let page = |window: Option<u32>| if window.is_none() { 10_000 } else { 20_000 };
        let stage = Footprint {
            weights: 1_000_000_000,
            workspace_parts: vec![
                ("rows".into(), 9_000 * limits.batch.rows as u64),
                ("logits".into(), 1_000 * limits.batch.rows as u64),
            ],
            page: layout.pools.iter().map(|p| page(p.window)).collect(),
            recurrent: if layout.recurrent_floats > 0 { 500_000 } else { 0 },
            rollback: (limits.batch.segments * limits.batch.drafts * 700) as u64,
            draft: match limits.draft_head {
                true => DraftShare { weights: 50_000_000, page: vec![1_000, 0], recurrent: 100_000 },
                false => DraftShare::default(),
            },
        };
        Ok(vec![stage; split.stages()])
    }

    fn prepare(
        &self,
        _: &Network,
        _: &ModelFile,
        _: &Split,
        _: &Limits,
    ) -> Result<Vec<Box<dyn Stage>>, DeviceError> {
        unreachable!("a plan loads nothing")
    }
}

fn plan(sketch: Sketch, options: &Options) -> Result<Plan, PlanError> {
    Plan::new(&sketch.network(), options, Machine { memory: Some(2_000_000_000) }, &Fixed)
}

fn line(plan: &Plan, name: &str) -> u64 {
    plan.lines.iter().find(|l| l.name.contains(name)).unwrap_or_else(|| panic!("no line {name}")).bytes
}

#[test]
fn full_attention_takes_sessions_times_context() {
    let plan = plan(SKETCHES[0], &options(3, 1000)).unwrap();
    assert_eq!(plan.pages, [48]); // 3 × ⌈1000 / 64⌉
    assert_eq!(line(&plan, "weights"), 1_000_000_000);
    assert_eq!(line(&plan, "workspace"), 512 * 10_000);
    assert_eq!(line(&plan, "keys and values"), 480_000);
    assert_eq!(line(&plan, "recurrent"), 0);
    assert_eq!(line(&plan, "the rest"), (8 << 20) + 40 * SKETCHES[0].vocab as u64);
    assert_eq!(plan.total, plan.lines.iter().map(|l| l.bytes).sum::<u64>());
    // Two more workspaces and two more batches in flight.
    assert_eq!(plan.separate_buffers, 2 * (5_120_000 + line(&plan, "batches in flight")));
    assert!(plan.fits);
}

#[test]
fn a_draft_head_and_its_rows_have_lines_of_their_own() {
    let sketch = Sketch { head: true, ..SKETCHES[2] };
    let with = |drafts, look_up| plan(sketch, &Options { drafts, look_up, ..options(3, 1000) }).unwrap();
    let (off, on) = (with(Drafts::Off, false), with(Drafts::Exactly(4), false));
    assert!(off.lines.iter().all(|l| !l.name.contains("draft")));
    assert_eq!(off.separate_draft_buffers, 0);
    assert_eq!((line(&on, "weights"), line(&on, "draft head")), (950_000_000, 50_000_000));
    assert_eq!(line(&on, "rows with drafts"), 3 * 4 * 700);
    assert_eq!(line(&on, "recurrent"), 3 * 400_000);
    assert_eq!(line(&on, "hidden rows"), 3 * 100_000);
    let kv = on.lines.iter().find(|l| l.name == "keys and values").unwrap();
    assert_eq!(kv.parts.iter().map(|p| p.bytes).collect::<Vec<_>>(), [48 * 9_000, 48 * 1_000]);
    assert_eq!(kv.bytes, 480_000);
    assert_eq!(line(&on, "workspace"), line(&off, "workspace"), "one workspace");
    assert_eq!(on.separate_draft_buffers, line(&on, "workspace") + line(&on, "batches in flight"));
    assert!(on.to_string().contains("Separate buffers for drafting would have added"));
    assert_eq!(on.total, on.lines.iter().map(|l| l.bytes).sum::<u64>());
    // Looked up, drafts need no head.
    let looked_up = with(Drafts::Exactly(4), true);
    assert!(!looked_up.limits().draft_head && looked_up.lines.iter().all(|l| l.name != "draft head"));
    // With the least memory it is planned; with a byte less that least is named.
    let tight = |memory| {
        plan(sketch, &Options { drafts: Drafts::Exactly(4), memory: Some(memory), ..options(3, 1000) })
    };
    let smallest = on.smallest_memory;
    assert_eq!(tight(smallest).unwrap().pages, [16]);
    let refused = tight(smallest - 1).unwrap_err();
    assert!(matches!(refused, PlanError::TooLittle { smallest: named, .. } if named == smallest));
    let too_many = plan(sketch, &Options { drafts: Drafts::Exactly(17), ..options(3, 1000) }).unwrap_err();
    assert!(matches!(too_many, PlanError::Option { option: "drafts", found: 17, most: 16 }));
}

#[test]
fn a_window_takes_what_its_sessions_see_and_one_batch() {
    // A row sees 100 positions: at most three pages for each session, and 512 rows of new ones.
    let plan = plan(SKETCHES[1], &options(4, 1024)).unwrap();
    assert_eq!(plan.pages, [64, 4 * 3 + 8]);
    assert_eq!(line(&plan, "keys and values"), 64 * 10_000 + 20 * 20_000);
}

#[test]
fn recurrent_state_takes_a_quarter_more_for_checkpoints() {
    let sketch = Sketch { context: 1 << 20, ..SKETCHES[2] };
    let mut options = options(2, 64_000);
    let by_default = plan(sketch, &options).unwrap();
    assert_eq!(line(&by_default, "recurrent"), 1_000_000);
    // A session's 1,000 pages are 10 MB and an index of some 0.4 MB: a quarter holds five states of 0.5 MB.
    assert_eq!((by_default.checkpoints, line(&by_default, "checkpoints")), (10, 5_000_000));
    options.checkpoint_memory = Some(1_700_000);
    assert_eq!(plan(sketch, &options).unwrap().checkpoints, 3);
}

#[test]
fn a_further_conversation_costs_its_own_state_and_nothing_else() {
    for sketch in SKETCHES {
        let one = plan(sketch, &options(1, 2048)).unwrap();
        let eight = plan(sketch, &options(8, 2048)).unwrap();
        let batches = line(&eight, "batches in flight") - line(&one, "batches in flight");
        let more = eight.total - one.total - batches;
        assert_eq!(more, 7 * one.state_per_session, "{sketch:?}");
        assert_eq!(one.state_per_session, eight.state_per_session, "{sketch:?}");
        // What the batch's lists need for more sessions is small beside a workspace.
        assert!(batches < 2_000_000, "{batches}");
    }
}

#[test]
fn memory_that_is_left_goes_to_the_pool() {
    let least = plan(SKETCHES[0], &options(8, 1024)).unwrap().smallest_memory;
    let with = |memory| plan(SKETCHES[0], &Options { memory: Some(memory), ..options(8, 1024) });
    assert_eq!(with(least).unwrap().pages, [16]);
    assert_eq!(with(least).unwrap().most, least);
    let more = with(least + 1_000_000).unwrap();
    assert!((90..=16 + 100).contains(&more.pages[0]), "{:?}", more.pages);
    let error = with(least - 1).unwrap_err();
    assert!(
        matches!(error, PlanError::TooLittle { asked, smallest } if asked == least - 1 && smallest == least)
    );
    // To the byte: a rounded figure might be too small.
    assert!(error.to_string().contains(&format!("the least that would do is {least} bytes (")), "{error}");
}

#[test]
fn what_clients_may_add_has_lines_of_its_own() {
    let front_end = vec![Line { name: "connections".into(), bytes: 7_000_000, parts: Vec::new() }];
    let options = Options { queue: 10, front_end, ..options(2, 1000) };
    let with = plan(SKETCHES[0], &options).unwrap();
    let names: Vec<_> = with.clients.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names, ["10 prompts that wait", "connections"]);
    // Four bytes a token, and something around each prompt.
    assert!((40_000..50_000).contains(&with.clients[0].bytes), "{}", with.clients[0].bytes);
    assert_eq!(with.most, with.total + with.clients[0].bytes + 7_000_000);
    let without = plan(SKETCHES[0], &Options { front_end: Vec::new(), ..options }).unwrap();
    assert_eq!((without.total, without.smallest_memory + 7_000_000), (with.total, with.smallest_memory));
    assert!(with.to_string().contains("in all, at most"), "{with}");
}

#[test]
fn with_the_least_memory_every_session_has_the_pages_of_its_windows() {
    let options = options(8, 1024);
    let smallest = plan(sketch(true, Some(512), false), &options).unwrap().smallest_memory;
    let options = Options { memory: Some(smallest), ..options };
    let plan = plan(sketch(true, Some(512), false), &options).unwrap();
    // The pool of one context is shared by all, but a window of 512 may touch 9 pages wherever it stands.
    assert_eq!(plan.pages, [16, 8 * 9]);
    assert!(plan.total <= smallest);
}

#[test]
fn a_plan_that_does_not_fit_says_what_would() {
    let machine = Machine { memory: Some(900_000_000) };
    let plan = Plan::new(&SKETCHES[0].network(), &options(1, 64), machine, &Fixed).unwrap();
    assert!(!plan.fits);
    let text = plan.to_string();
    assert!(text.contains("It does not fit: this machine has 858.31 MiB"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
    assert_eq!(json["fits"], false);
    assert_eq!(json["lines"][0]["bytes"], 1_000_000_000);
    assert_eq!(json["lines"][1]["parts"][0]["name"], "rows");
}

#[test]
fn options_out_of_range_are_named() {
    for (wrong, name) in [
        (options(0, 64), "sessions"),
        (options(1, 9000), "ctx"),
        (options(1, 0), "ctx"),
        (Options { rows: 0, ..options(1, 64) }, "rows"),
        (Options { prefill_chunk: Some(0), ..options(1, 64) }, "prefill-chunk"),
    ] {
        match plan(SKETCHES[0], &wrong) {
            Err(PlanError::Option { option, .. }) => assert_eq!(option, name),
            other => panic!("{name}: {other:?}"),
        }
    }
}

proptest! {
    #[test]
    fn a_plan_never_takes_more_than_it_may(
        sketch in proptest::sample::select(SKETCHES.to_vec()),
        sessions in 1..40_usize,
        context in 1..8192_usize,
        rows in 1..2000_usize,
        more in 0..1_u64 << 32,
    ) {
        let options = Options { rows, ..options(sessions, context) };
        let least = plan(sketch, &options).unwrap().smallest_memory;
        let memory = least + more;
        let plan = plan(sketch, &Options { memory: Some(memory), ..options }).unwrap();
        prop_assert!(plan.most <= memory, "{} of {}", plan.most, memory);
        prop_assert_eq!(plan.total, plan.lines.iter().map(|l| l.bytes).sum::<u64>());
        // One whole conversation always fits.
        if sketch.full {
            prop_assert!(plan.pages[0] >= context.div_ceil(64));
        }
    }
}
