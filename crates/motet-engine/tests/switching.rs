//! Drafts are switched while sessions run: nobody's tokens change, room is made before anything else, and where there is
//! none everything runs on.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::scripted::{Scripted, Sketch};
use motet_engine::{Drafts, DraftsError, Machine, Options, Plan, Request, Stream};
use motet_model::DeviceError;

/// Few tokens, so that what is looked up is often right.
fn small(head: bool) -> Sketch {
    Sketch { vocab: 5, head, ..SKETCHES[2] }
}

fn rig(sketch: Sketch, options: &Options) -> Rig {
    Rig::new(sketch, random(1_000_000), options)
}

fn ask(seed: u64) -> Request {
    let mut ask = Request { max_tokens: Some(400), ..request(Rng(seed).tokens_of(5, 90), seed) };
    ask.sampling.repetition_penalty = if seed.is_multiple_of(2) { 1.0 } else { 1.2 };
    ask
}

/// Drafts so far.
fn drafted(rig: &Rig) -> u64 {
    rig.engine.metrics().num_draft_tokens
}

/// Switches between steps, in turn; every session says what it must.
fn switched(sketch: Sketch, at_start: Drafts, switches: &[(Drafts, bool)]) -> Rig {
    let options = Options { drafts: at_start, ..options(4, 1024) };
    let mut rig = rig(sketch, &options);
    let mut streams: Vec<Stream> = (0..6).map(|seed| rig.engine.submit(ask(seed)).unwrap()).collect();
    rig.turns(20);
    for &(drafts, look_up) in switches {
        rig.driver.set_drafts(drafts, look_up).unwrap();
        let before = drafted(&rig);
        rig.turns(15);
        assert_eq!(drafted(&rig) > before, drafts != Drafts::Off, "{drafts}, looked up: {look_up}");
    }
    rig.run();
    for (seed, stream) in (0..).zip(&mut streams) {
        let expected = rig.expected(&ask(seed)).remove(0);
        assert_same(&answers(stream)[0], &expected, &format!("{sketch:?}, {switches:?}, seed {seed}"));
    }
    assert!(rig.driver.at_rest());
    assert_eq!(rig.control.wrong_drafts(), 0, "{switches:?}");
    rig
}

#[test]
fn drafts_that_are_looked_up_come_and_go() {
    for sketch in SKETCHES.map(|sketch| Sketch { vocab: 5, ..sketch }) {
        let (on, more) = ((Drafts::Exactly(2), false), (Drafts::Exactly(16), false));
        let rig =
            switched(sketch, Drafts::Off, &[on, more, (Drafts::Off, false), (Drafts::Exactly(1), true)]);
        assert_eq!(rig.engine.metrics().draft_limit, 16);
    }
}

#[test]
fn a_head_that_is_loaded_rests_and_finds_what_it_needs_when_it_is_asked_again() {
    let off = (Drafts::Off, false);
    let switches = [off, (Drafts::Exactly(7), false), (Drafts::Exactly(3), true), off, (Drafts::Auto, false)];
    switched(small(true), Drafts::Exactly(1), &switches);
    // Out of use for as long as whole conversations take, and prefixes of those are found.
    let options = Options { drafts: Drafts::Exactly(3), ..options(2, 1024) };
    let mut rig = rig(small(true), &options);
    rig.driver.set_drafts(Drafts::Off, false).unwrap();
    assert_eq!(rig.answers(ask(1))[0].drafted, (0, 0));
    rig.driver.set_drafts(Drafts::Exactly(3), false).unwrap();
    let said = rig.answers(ask(1)).remove(0);
    assert_same(&said, &rig.expected(&ask(1))[0], "");
    assert!(said.cached > Some(0) && said.drafted.1 > 50, "{said:?}");
    assert_eq!(rig.control.wrong_drafts(), 0);
}

#[test]
fn a_head_that_is_not_loaded_is_refused_and_a_look_up_is_not() {
    let mut rig = rig(small(true), &options(4, 1024));
    let refused = rig.driver.set_drafts(Drafts::Exactly(2), false).unwrap_err();
    assert!(matches!(refused, DraftsError::HeadNotLoaded));
    assert!(refused.to_string().contains("start with drafts (--drafts auto)"), "{refused}");
    assert_eq!(rig.answers(ask(1))[0].drafted, (0, 0));
    rig.driver.set_drafts(Drafts::Exactly(2), true).unwrap();
    assert!(rig.answers(ask(1))[0].drafted.1 > 0);
    let refused = rig.driver.set_drafts(Drafts::Exactly(17), true).unwrap_err();
    assert!(matches!(refused, DraftsError::TooMany(17)));
}

/// What a plan has for batches and for rows with drafts.
fn planned(options: &Options) -> (Plan, u64) {
    let device = Scripted::new(random(9));
    let plan = Plan::new(&small(false).network(), options, Machine { memory: None }, &device).unwrap();
    let of = |name: &str| plan.lines.iter().filter(|l| l.name == name).map(|l| l.bytes).sum::<u64>();
    let bytes = of("batches in flight") + of("rows with drafts until they are kept");
    (plan, bytes)
}

#[test]
fn what_the_plan_has_no_room_for_is_refused_with_what_is_missing() {
    let mut options = Options { drafts: Drafts::Exactly(1), checkpoint_memory: Some(0), ..options(4, 1024) };
    let (full, small_batch) = planned(&options);
    let needed =
        |drafts| planned(&Options { drafts: Drafts::Exactly(drafts), ..options.clone() }).1 - small_batch;
    let (four, ten) = (needed(4), needed(10));
    // Pools as if it were all used, and so much to spare that it does for four drafts and not for ten.
    let page = full.lines.iter().find(|l| l.name == "keys and values").unwrap().bytes / full.pages[0] as u64;
    assert!(four < ten - 1 && ten < page, "{four}, {ten}, a page {page}");
    options.memory = Some(full.smallest_memory + ten - 1);
    let mut rig = rig(small(false), &options);
    let spare = options.memory.unwrap() - rig.engine.plan().most;
    assert_eq!(spare, ten - 1);
    let mut stream = rig.engine.submit(ask(1)).unwrap();
    rig.turns(20);
    let refused = rig.driver.set_drafts(Drafts::Exactly(10), false).unwrap_err();
    let DraftsError::Memory { drafts: 10, needed, missing: 1 } = refused else { panic!("{refused:?}") };
    assert_eq!(needed, ten);
    assert!(refused.to_string().ends_with(" drafts to a step, 1 more than the plan leaves"), "{refused}");
    rig.turns(5);
    rig.driver.set_drafts(Drafts::Exactly(4), false).unwrap();
    // What was taken is not to spare any more.
    let refused = rig.driver.set_drafts(Drafts::Exactly(10), false).unwrap_err();
    assert!(matches!(refused, DraftsError::Memory { missing: 1, .. }), "{refused:?}");
    rig.run();
    assert_same(&answers(&mut stream)[0], &rig.expected(&ask(1))[0], "");
}

#[test]
fn where_the_system_has_no_memory_everything_runs_on() {
    let options = Options { drafts: Drafts::Exactly(2), ..options(4, 1024) };
    let mut rig = rig(small(false), &options);
    let mut stream = rig.engine.submit(ask(1)).unwrap();
    rig.turns(20);
    rig.control.refuse_growth(true);
    let refused = rig.driver.set_drafts(Drafts::Exactly(5), false).unwrap_err();
    // Four segments of three more drafts.
    assert!(matches!(refused, DraftsError::Device(DeviceError::Memory { bytes: 192, .. })), "{refused:?}");
    assert!(refused.to_string().starts_with("192 bytes for "), "{refused}");
    let before = drafted(&rig);
    rig.turns(5);
    assert_eq!(drafted(&rig) - before, 10, "two a step, as before");
    // Fewer, and none, need no memory.
    for drafts in [Drafts::Exactly(1), Drafts::Off, Drafts::Exactly(2)] {
        rig.driver.set_drafts(drafts, false).unwrap();
    }
    rig.control.refuse_growth(false);
    rig.driver.set_drafts(Drafts::Exactly(5), false).unwrap();
    rig.run();
    assert_same(&answers(&mut stream)[0], &rig.expected(&ask(1))[0], "");
}

#[test]
fn a_handle_switches_while_the_engines_thread_runs_or_sleeps() {
    let device = Scripted::new(random(1_000_000));
    let engine = device.start(&small(false), &options(4, 1024)).unwrap();
    let said = |engine: &motet_engine::Engine| {
        let (mut stream, mut said) = (engine.submit(ask(2)).unwrap(), Vec::new());
        while let Some(event) = stream.blocking_next() {
            add(&mut said, event);
        }
        said.remove(0)
    };
    let without = said(&engine);
    engine.set_drafts(Drafts::Exactly(3), false).unwrap();
    let with = said(&engine);
    assert!(without.drafted == (0, 0) && with.drafted.1 > 0);
    assert_eq!(Answer { drafted: (0, 0), cached: without.cached, ..with }, without);
    let mut running = engine.submit(ask(3)).unwrap();
    engine.set_drafts(Drafts::Off, false).unwrap();
    while running.blocking_next().is_some() {}
    engine.close();
    assert!(matches!(engine.set_drafts(Drafts::Auto, false), Err(DraftsError::Closed)));
}
