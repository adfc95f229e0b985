//! Drafts change how many steps an answer takes, and nothing else.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::clock::Clock;
use motet_engine::scripted::{Script, Sketch};
use motet_engine::{Cut, Drafts, FinishReason, Options, Request, Stream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Says 1 2 3 4 5 1 2 …, whatever was said before, and the end token at position `end`.
fn round(end: usize) -> Script {
    Script::Answers(Arc::new(move |history, _| {
        let position = history.len();
        if position == end { END } else { (position % 5 + 1) as u32 }
    }))
}

fn rig(sketch: Sketch, script: Script, drafts: Drafts) -> Rig {
    Rig::new(sketch, script, &Options { drafts, ..options(4, 1024) })
}

/// A prompt of two rounds, so that every draft is right.
fn rounds(max_tokens: Option<usize>) -> Request {
    let prompt = (0..10).map(|at| at % 5 + 1).collect();
    Request { max_tokens, ..request(prompt, 1) }
}

#[test]
fn four_right_drafts_make_five_tokens_a_step() {
    let mut rig = rig(SKETCHES[0], round(usize::MAX), Drafts::Exactly(4));
    let expected = rig.expected(&rounds(Some(101)));
    let said = rig.answers(rounds(Some(101))).remove(0);
    assert_same(&said, &expected[0], "");
    assert_eq!(said.drafted, (80, 80));
    // The prompt's step chooses the first token, 20 steps five each.
    assert_eq!(rig.control.steps(), 21);
    let metrics = rig.engine.metrics();
    assert_eq!((metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens), (20, 80, 80));
    assert_eq!(metrics.accepted_per_position[..5], [20, 20, 20, 20, 0]);
    assert_eq!(metrics.generation_tokens, 101);
    // A reader waited 20 times for 12.5 ms each and got five tokens each time.
    assert_eq!(metrics.inter_token_latency.count(), 20);
    assert!((metrics.inter_token_latency.sum - 20.0 * 0.0125).abs() < 1e-9);
    assert!((metrics.time_per_output_token.sum - 0.0025).abs() < 1e-9);
}

#[test]
fn where_state_is_saved_a_step_ends_at_the_page() {
    let recurrent = sketch(true, None, true);
    let mut rig = rig(recurrent, round(usize::MAX), Drafts::Exactly(4));
    rig.answers(rounds(Some(101)));
    // Behind the prompt, rows 10..110, five at a time from 10 and again from 64.
    assert_eq!(rig.control.steps(), 1 + 11 + 10);
    // The next turn takes over behind the first page.
    let mut next = rounds(Some(1));
    next.prompt = (0..100).map(|at| at % 5 + 1).collect();
    assert_eq!(rig.answers(next)[0].cached, Some(64));
}

#[test]
fn an_answer_that_ends_within_its_drafts_leaves_nothing_behind_its_end() {
    struct AtThree(usize);
    impl Cut for AtThree {
        fn push(&mut self, _token: u32) -> bool {
            self.0 += 1;
            self.0 == 58
        }
    }
    let cut = || -> Option<motet_engine::CutMaker> { Some(Box::new(|| Box::new(AtThree(0)))) };
    for sketch in [SKETCHES[0], SKETCHES[1], SKETCHES[2], SKETCHES[3]] {
        // 10 tokens of the prompt and 58 of the answer, whatever ends it.
        let by_token = (round(68), rounds(None), FinishReason::EndToken(END));
        let by_cut = (round(usize::MAX), Request { cut: cut(), ..rounds(None) }, FinishReason::Cut);
        let by_length = (round(usize::MAX), rounds(Some(58)), FinishReason::Length);
        for (script, request, reason) in [by_token, by_cut, by_length] {
            let mut rig = rig(sketch, script, Drafts::Exactly(16));
            let expected = rig.expected(&request).remove(0);
            let said = rig.answers(request).remove(0);
            assert_same(&said, &expected, &format!("{sketch:?}, {reason:?}"));
            assert_eq!((said.tokens.len(), said.reason), (58, Some(reason)));
            assert!(rig.driver.at_rest());
            assert!(rig.control.steps() < 12, "{} steps", rig.control.steps());
            // What comes next shares what was said, and nothing that was only drafted.
            let mut next = rounds(Some(5));
            next.prompt = (0..68).map(|at| at % 5 + 1).chain([7; 40]).collect();
            let expected = rig.expected(&next).remove(0);
            let said = rig.answers(next).remove(0);
            assert_same(&said, &expected, &format!("after {sketch:?}, {reason:?}"));
            assert_eq!(said.cached, Some(64));
        }
    }
}

#[test]
fn every_row_is_that_of_the_run_without_drafts() {
    for sketch in SKETCHES {
        let sketch = Sketch { vocab: 4, ..sketch };
        let run = |drafts| {
            let mut rig = rig(sketch, random(1_000_000), drafts);
            let mut ask = Request { max_tokens: Some(300), digests: true, ..request(vec![1, 2, 3], 1) };
            ask.sampling.repetition_penalty = 1.2;
            (rig.answers(ask).remove(0), rig.engine.metrics().num_accepted_tokens)
        };
        let (without, none) = run(Drafts::Off);
        let (with, accepted) = run(Drafts::Exactly(5));
        assert_eq!(without, Answer { drafted: (0, 0), ..with.clone() });
        assert_eq!(with.rows.iter().map(|r| r.0).collect::<Vec<_>>(), (0..302).collect::<Vec<_>>());
        assert!(none == 0 && accepted > 50, "{accepted} accepted");
    }
}

/// With a head that is right twice and then wrong, three rows of five count.
#[test]
fn a_row_that_is_not_finite_counts_where_it_would_without_drafts() {
    for sketch in [SKETCHES[2], SKETCHES[3]] {
        let broken_from = |row| {
            let sketch = Sketch { head: true, ..sketch };
            let options = Options { drafts: Drafts::Exactly(4), ..options(4, 1024) };
            let agree = |_: &_, depth, _| depth < 2;
            let mut rig = Rig::with_head(sketch, random(1_000_000), &options, agree);
            let ask = || Request { max_tokens: Some(61), ..request(vec![1, 2, 3], 1) };
            let expected = rig.expected(&ask()).remove(0);
            let mut stream = rig.engine.submit(ask()).unwrap();
            rig.turns(6);
            for _ in 0..10 {
                rig.control.fault_next(0, row);
            }
            rig.run();
            assert!(rig.driver.at_rest());
            (answers(&mut stream).remove(0), expected)
        };
        for behind in [3, 4] {
            let (said, expected) = broken_from(behind);
            assert_same(&said, &expected, &format!("{sketch:?}, broken from row {behind}"));
        }
        for (counts, position) in [(0, 18), (1, 19), (2, 20)] {
            let (said, expected) = broken_from(counts);
            let error = format!("the network produced a value that is not finite at position {position}");
            assert_eq!(said.error, Some(error), "{sketch:?}, broken from row {counts}");
            // As without drafts: what was chosen before has been published.
            assert_eq!(said.tokens, expected.tokens[..position - 2]);
        }
    }
}

#[test]
fn a_row_that_is_not_finite_behind_an_end_token_is_nobodys() {
    let mut ends = 0;
    for seed in 0..40 {
        let sketch = Sketch { head: true, ..SKETCHES[2] };
        let options = Options { drafts: Drafts::Exactly(4), ..options(4, 1024) };
        let mut rig = Rig::with_head(sketch, random(4), &options, |_, _, _| true);
        let ask = || Request { max_tokens: Some(50), ..request(vec![1, 2, 3], seed) };
        let expected = rig.expected(&ask()).remove(0);
        let length = expected.tokens.len();
        if !(1..=4).contains(&length) {
            continue;
        }
        ends += 1;
        // The drafts are the rest of the answer and the end token, whose row is broken.
        for (row, sound) in [(length as u32, true), (length as u32 - 1, false)] {
            let mut stream = rig.engine.submit(ask()).unwrap();
            rig.turns(1);
            rig.control.fault_next(0, row);
            rig.run();
            let said = answers(&mut stream).remove(0);
            match sound {
                true => assert_same(&said, &expected, &format!("seed {seed}")),
                false => assert!(said.error.is_some() && said.tokens == expected.tokens, "seed {seed}"),
            }
        }
    }
    assert!(ends > 10, "{ends} answers of the right length");
}

#[test]
fn a_session_whose_state_is_lost_when_rows_are_kept_is_read_again() {
    for sketch in [SKETCHES[2], SKETCHES[3]] {
        // The 11 steps up to the page's end; the state there is not saved, for it is lost.
        for turns in [5, 11] {
            let mut rig = rig(sketch, round(usize::MAX), Drafts::Exactly(4));
            let expected = rig.expected(&rounds(Some(200)));
            let mut stream = rig.engine.submit(rounds(Some(200))).unwrap();
            rig.turns(turns);
            rig.control.fail_commit_next();
            rig.run();
            assert_same(&answers(&mut stream)[0], &expected[0], "");
            let metrics = rig.engine.metrics();
            assert_eq!((metrics.num_drafts, metrics.failed_steps), (turns, 1));
        }
    }
}

#[test]
fn a_head_is_asked_for_all_sessions_at_once_and_finds_what_it_needs() {
    let with_head = Sketch { head: true, ..SKETCHES[2] };
    let options = Options { drafts: Drafts::Exactly(3), ..options(4, 1024) };
    // Right twice, and then wrong.
    let mut rig = Rig::with_head(with_head, random(1_000_000), &options, |_, depth, _| depth < 2);
    let ask = |seed| Request { max_tokens: Some(40), ..request(vec![1, 2, 3], seed) };
    let expected: Vec<Answer> = (0..4).map(|seed| rig.expected(&ask(seed)).remove(0)).collect();
    let mut streams: Vec<Stream> = (0..4).map(|seed| rig.engine.submit(ask(seed)).unwrap()).collect();
    rig.run();
    for (stream, expected) in streams.iter_mut().zip(&expected) {
        let said = answers(stream).remove(0);
        assert_same(&said, expected, "");
        // 39 tokens behind the first, three a step; the last needs only two drafts.
        assert_eq!(said.drafted, (38, 26));
    }
    assert_eq!((rig.control.steps(), rig.control.wrong_drafts()), (1 + 13, 0));
    assert_eq!(rig.engine.metrics().accepted_per_position[..3], [52, 52, 0]);
}

/// While nobody drafts, the head is fed where a page ends and when so many positions are behind as are remembered, and
/// then for all sessions.
#[test]
fn a_head_that_drafts_for_nobody_is_seldom_fed() {
    let sketch = Sketch { head: true, ..SKETCHES[2] };
    let options = Options { drafts: Drafts::Exactly(16), ..options(4, 1024) };
    let mut rig = Rig::new(sketch, random(1_000_000), &options);
    let mut streams: Vec<Stream> = (0..4)
        .map(|seed| {
            let ask = Request { max_tokens: Some(200), drafts: false, ..request(vec![1; 4], seed) };
            rig.engine.submit(ask).unwrap()
        })
        .collect();
    rig.run();
    // The prompts are read up to position 4. At 64, 128 and 192 a page ends; at 35, 95, 126, 159 and 190 they are 31
    // positions behind.
    assert_eq!((rig.control.steps(), rig.control.feeds()), (200, 1 + 3 + 5));
    assert!(streams.iter_mut().all(|stream| answers(stream)[0].generated == 200));
}

/// Two conversations that are equal for exactly 64·n tokens: the second takes over the pages, and with them what the
/// head left there and the hidden row before its first own token.
#[test]
fn a_prefix_that_is_found_serves_the_head_as_well() {
    for sketch in &SKETCHES[..4] {
        let sketch = Sketch { head: true, ..*sketch };
        let options = Options { drafts: Drafts::Exactly(3), ..options(2, 1024) };
        let mut rig = Rig::new(sketch, random(1_000_000), &options);
        for border in [64, 128, 192] {
            let text = Rng(border).tokens(border as usize);
            let ask = |own: u64| {
                let prompt = text.iter().copied().chain(Rng(own).tokens(70)).collect();
                Request { max_tokens: Some(50), marks: vec![border as usize], ..request(prompt, own) }
            };
            rig.answers(ask(1000));
            let expected = rig.expected(&ask(2000)).remove(0);
            let said = rig.answers(ask(2000)).remove(0);
            assert_same(&said, &expected, &format!("{sketch:?}"));
            assert_eq!(said.cached, Some(border as usize), "{sketch:?}");
            assert!(said.drafted.1 > 10, "{sketch:?}");
        }
        assert_eq!(rig.control.wrong_drafts(), 0, "{sketch:?}");
    }
}

/// 10 ms a step, 0.5 ms a row and 2 ms a pass of the head: with drafts that are right nine times of ten an answer takes
/// about half the time; with drafts that are never right, hardly more.
#[test]
fn their_number_follows_what_they_bring() {
    let time = |drafts, right: u64| {
        let sketch = Sketch { head: true, ..SKETCHES[0] };
        let options = Options { drafts, ..options(4, 4096) };
        let mut rig =
            Rig::with_head(sketch, random(1_000_000), &options, move |_, _, random| random % 10 < right);
        let ask = |seed| Request { max_tokens: Some(1500), ..request(vec![1, 2, 3], seed) };
        let _streams: Vec<Stream> = (0..4).map(|seed| rig.engine.submit(ask(seed)).unwrap()).collect();
        rig.run();
        assert_eq!(rig.engine.metrics().generation_tokens, 6000);
        assert_eq!(rig.control.wrong_drafts(), 0);
        rig.clock.now().as_secs_f64()
    };
    let off = time(Drafts::Off, 0);
    let best = (1..=4).map(|k| time(Drafts::Exactly(k), 9)).fold(off, f64::min);
    let (useless, useful) = (time(Drafts::Auto, 0), time(Drafts::Auto, 9));
    assert!(useless <= off / 0.995, "{useless} s, {off} s without");
    assert!(useful <= best / 0.97 && useful < 0.6 * off, "{useful} s, {best} s at best, {off} s without");
}

#[test]
fn drafts_can_be_looked_up_where_there_is_a_head() {
    let with_head = Sketch { head: true, ..SKETCHES[0] };
    let options = Options { drafts: Drafts::Exactly(4), look_up: true, ..options(4, 1024) };
    let mut rig = Rig::with_head(with_head, round(usize::MAX), &options, |_, _, _| false);
    assert_eq!(rig.answers(rounds(Some(101)))[0].drafted, (80, 80));
}

/// The head is never right, and the text goes round: what is looked up saves two steps of three, and more, and hardly a
/// draft is wasted. (That the head drafts where nothing can be looked up: `their_number_follows_what_they_bring`.)
#[test]
fn where_both_can_draft_the_better_one_does() {
    let with_head = Sketch { head: true, ..SKETCHES[0] };
    let options = Options { drafts: Drafts::Auto, ..options(4, 4096) };
    let mut rig = Rig::with_head(with_head, round(usize::MAX), &options, |_, _, _| false);
    let said = rig.answers(rounds(Some(2000))).remove(0);
    assert!(said.drafted.1 > 1333 && said.drafted.0 < said.drafted.1 + 100, "{:?}", said.drafted);
}

/// Every token is allowed where it stands, whichever drafts were refused, and the answer is complete within a step's
/// drafts.
#[test]
fn an_answer_keeps_to_its_form_with_drafts() {
    for (drafts, head) in [(Drafts::Off, false), (Drafts::Exactly(5), false), (Drafts::Exactly(5), true)] {
        let sketch = Sketch { vocab: 5, head, ..SKETCHES[2] };
        let mut rig = rig(sketch, random(1_000_000), drafts);
        let form = || -> Option<motet_engine::ConstraintMaker> {
            Some(Box::new(|| Box::new(NoEcho { said: vec![], length: 203, vocab: 5 })))
        };
        let ask = || Request { constraint: form(), ..request(vec![1, 2, 3], 1) };
        let expected = rig.expected(&ask()).remove(0);
        let said = rig.answers(ask()).remove(0);
        assert_same(&said, &expected, "");
        assert_eq!((said.tokens.len(), said.reason), (203, Some(FinishReason::Cut)));
        assert!(said.tokens.windows(3).all(|w| w[0] != w[1] && w[0] != w[2] && w[1] != w[2]));
        assert_eq!(said.drafted.1 > 20, drafts != Drafts::Off, "{:?}", said.drafted);
        assert!(rig.driver.at_rest());
    }
}

#[test]
fn nobody_steps_back_for_drafts() {
    let pages_of = |drafts| {
        let mut options = Options { drafts, ..options(8, 1024) };
        options.memory = Some(Rig::new(SKETCHES[0], random(9), &options).engine.plan().smallest_memory);
        let mut rig = Rig::new(SKETCHES[0], round(usize::MAX), &options);
        assert_eq!(rig.engine.plan().pages, [16]);
        // Prompt and answer take 4 pages each: four fit.
        let _streams: Vec<Stream> = (0..8).map(|_| rig.engine.submit(rounds(Some(246))).unwrap()).collect();
        rig.run();
        assert_eq!(rig.engine.metrics().finished_length, 8);
        (rig.engine.metrics().num_preemptions, rig.control.steps())
    };
    let (off, slow) = pages_of(Drafts::Off);
    let (on, fast) = pages_of(Drafts::Exactly(7));
    assert_eq!((off, on), (0, 0));
    assert!(fast * 7 < slow, "{fast} steps, {slow} without drafts");
}

#[test]
fn a_prompt_is_read_beside_drafts() {
    let mut options = Options { drafts: Drafts::Exactly(16), ..options(2, 1024) };
    options.rows = 8;
    let mut rig = Rig::new(SKETCHES[0], round(usize::MAX), &options);
    let mut first = rig.engine.submit(rounds(Some(600))).unwrap();
    rig.turns(5);
    let mut second = rig.engine.submit(Request { max_tokens: Some(1), ..request(vec![9; 60], 1) }).unwrap();
    // One row a step at least is left for it.
    rig.turns(61);
    assert_eq!(answers(&mut second)[0].reason, Some(FinishReason::Length));
    assert_eq!(answers(&mut first)[0].reason, None);
}

/// A head that is right seven times of ten, then never, then again as at first.
#[test]
fn a_head_that_stops_agreeing_is_told_once() {
    let right = Arc::new(AtomicU64::new(7));
    let agrees = right.clone();
    let options = Options { drafts: Drafts::Exactly(2), ..options(4, 1024) };
    let sketch = Sketch { head: true, ..SKETCHES[0] };
    let agree = move |_: &_, _, random: u64| random % 10 < agrees.load(Ordering::Relaxed);
    let mut rig = Rig::with_head(sketch, random(1_000_000), &options, agree);
    let told = Arc::new(Mutex::new(Vec::new()));
    let teller = told.clone();
    rig.engine.on_fallen_out(move |fallen_out| teller.lock().unwrap().push(*fallen_out));
    let mut answers = 0;
    for (chance, rounds, expected) in [(7, 30, 0), (0, 15, 1), (7, 30, 1), (1, 15, 2)] {
        right.store(chance, Ordering::Relaxed);
        for _ in 0..rounds {
            let ask = |i| Request { max_tokens: Some(40), ..request(vec![1, 2, 3], answers + i) };
            let _streams: Vec<Stream> = (0..4).map(|i| rig.engine.submit(ask(i)).unwrap()).collect();
            rig.run();
            answers += 4;
        }
        assert_eq!(told.lock().unwrap().len(), expected, "after {answers} answers");
    }
    let first = told.lock().unwrap()[0];
    // What was compared may have begun before.
    assert!(
        (first.before - 0.7).abs() < 0.05 && first.now < first.before / 2.0 && first.answers >= 16,
        "{first:?}"
    );
    let metrics = rig.engine.metrics();
    assert_eq!((metrics.drafts_fallen_out, metrics.draft_acceptance.count()), (2, answers));
}

#[test]
fn the_acceptance_of_each_answer_is_counted() {
    let mut rig = rig(SKETCHES[0], round(usize::MAX), Drafts::Exactly(4));
    rig.answers(rounds(Some(101)));
    rig.answers(Request { max_tokens: Some(1), ..rounds(None) });
    let all = &rig.engine.metrics().draft_acceptance;
    assert_eq!((all.count(), all.sum, all.counts[10]), (1, 1.0, 1), "an answer without drafts has none");
}
