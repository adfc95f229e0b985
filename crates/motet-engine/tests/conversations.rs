//! What a single reader would try: one conversation, several, a next turn, several choices, limits.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::*;
use motet_engine::scripted::{Script, Solo};
use motet_engine::{Event, FinishReason, Request, SamplingOptions, SubmitError};
use std::sync::Arc;

#[test]
fn one_conversation_answers_what_its_tokens_alone_say() {
    for sketch in SKETCHES {
        let mut rig = Rig::new(sketch, random(150), &options(1, 2048));
        for length in [1, 63, 64, 65, 700] {
            let request = request(Rng(length).tokens(length as usize), 5);
            let expected = rig.expected(&request);
            let answer = rig.answers(request).remove(0);
            assert_same(&answer, &expected[0], &format!("{sketch:?}, {length} tokens"));
            assert!(rig.driver.at_rest());
        }
    }
}

#[test]
fn the_next_turn_reads_only_what_is_new() {
    for sketch in SKETCHES {
        let mut rig = Rig::new(sketch, random(1_000_000), &options(2, 2048));
        let mut prompt = Rng(1).tokens(400);
        let first = rig.answers(Request { max_tokens: Some(150), ..request(prompt.clone(), 1) }).remove(0);
        prompt.extend(&first.tokens);
        prompt.extend(Rng(2).tokens(30));
        let next = Request { max_tokens: Some(20), ..request(prompt, 2) };
        let expected = rig.expected(&next);
        let second = rig.answers(next).remove(0);
        // 549 rows were run (the last token of an answer never is): eight pages and a bit.
        assert_eq!(second.cached, Some(512), "{sketch:?}");
        assert_same(&second, &expected[0], &format!("{sketch:?}"));
    }
}

#[test]
fn choices_share_the_prompt_and_differ_by_their_noise() {
    for sketch in SKETCHES {
        let mut rig = Rig::new(sketch, random(1_000_000), &options(4, 2048));
        let ask = Request { choices: 3, max_tokens: Some(70), ..request(Rng(1).tokens(1000), 7) };
        let expected = rig.expected(&ask);
        let said = rig.answers(ask);
        for (said, expected) in said.iter().zip(&expected) {
            assert_same(said, expected, &format!("{sketch:?}"));
        }
        assert_ne!(said[0].tokens, said[1].tokens);
        // Fifteen whole pages of the prompt; the rest is read by each.
        let cached: Vec<_> = said.iter().map(|a| a.cached.unwrap()).collect();
        assert_eq!(cached, [0, 960, 960], "{sketch:?}");
        let metrics = rig.engine.metrics();
        assert_eq!(metrics.prompt_tokens_computed, 1000 + 2 * 40);
        assert!(rig.driver.at_rest());
    }
}

#[test]
fn state_is_saved_where_messages_end() {
    let mut rig = Rig::new(SKETCHES[2], random(1_000_000), &options(2, 2048));
    let prompt = Rng(1).tokens(500);
    rig.answers(Request { marks: vec![200], max_tokens: Some(1), ..request(prompt.clone(), 1) });
    // Another conversation with the same first message: its state was saved at 192.
    let mut other = prompt[..200].to_vec();
    other.extend(Rng(2).tokens(300));
    let ask = Request { max_tokens: Some(9), ..request(other, 1) };
    let expected = rig.expected(&ask);
    let said = rig.answers(ask).remove(0);
    assert_eq!(said.cached, Some(192));
    assert_same(&said, &expected[0], "the other conversation");
}

#[test]
fn a_prompt_is_never_taken_from_the_cache_as_a_whole() {
    let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options(2, 2048));
    let ask = || Request { max_tokens: Some(5), ..request(Rng(1).tokens(128), 1) };
    assert_eq!(rig.answers(ask())[0].cached, Some(0));
    assert_eq!(rig.answers(ask())[0].cached, Some(64));
}

#[test]
fn a_prompt_can_be_scored_without_an_answer() {
    let mut rig = Rig::new(SKETCHES[1], random(50), &options(1, 512));
    for _ in 0..2 {
        let ask = Request { max_tokens: Some(0), prompt_logprobs: Some(2), ..request(Rng(1).tokens(512), 1) };
        let expected = rig.expected(&ask);
        let said = rig.answers(ask).remove(0);
        assert_eq!((said.scores.len(), said.tokens.len(), said.cached), (511, 0, Some(0)));
        assert_same(&said, &expected[0], "scores");
    }
}

#[test]
fn log_probabilities_come_as_asked_for() {
    let mut rig = Rig::new(SKETCHES[0], random(1_000_000), &options(1, 512));
    let ask = Request { max_tokens: Some(3), logprobs: Some(2), ..request(vec![1, 2, 3], 1) };
    let mut stream = rig.engine.submit(ask).unwrap();
    rig.run();
    let scored: Vec<_> = std::iter::from_fn(|| stream.try_next())
        .filter_map(|event| if let Event::Token { scored, .. } = event { Some(scored) } else { None })
        .collect();
    assert_eq!(scored.len(), 3);
    assert!(scored.iter().all(|s| s.logprob.is_some() && s.top.len() == 2));
}

#[test]
fn scripts_answer_what_they_are_told_from_what_was_read_back() {
    // Counts on from the last token, and ends behind 9.
    let count = |history: &[u32]| match history.last() {
        Some(9) => END,
        last => last.map_or(1, |t| t + 1),
    };
    let script = Script::Answers(Arc::new(move |history, _| count(history)));
    let mut rig = Rig::new(SKETCHES[0], script, &options(1, 512));
    let answer = rig.answers(request(vec![8, 3, 4], 1)).remove(0);
    assert_eq!(answer.tokens, [5, 6, 7, 8, 9]);
    assert_eq!(answer.reason, Some(FinishReason::EndToken(END)));
    assert_eq!(answer.generated, 6);
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    let rig = Rig::new(SKETCHES[0], random(50), &options(1, 128));
    let field = |request: Request| match rig.engine.submit(request).map(drop) {
        Err(SubmitError::Invalid { field, .. }) => field,
        other => panic!("{other:?}"),
    };
    let ask = || request(vec![1, 2, 3], 1);
    assert_eq!(field(Request { prompt: vec![], ..ask() }), "prompt");
    assert_eq!(field(Request { prompt: vec![1000], ..ask() }), "prompt");
    assert_eq!(field(Request { choices: 0, ..ask() }), "n");
    assert_eq!(field(Request { choices: 129, ..ask() }), "n");
    assert_eq!(field(Request { logprobs: Some(21), ..ask() }), "top_logprobs");
    let sampling = |s: SamplingOptions| field(Request { sampling: s, ..ask() });
    let default = SamplingOptions::default;
    assert_eq!(sampling(SamplingOptions { temperature: -1.0, ..default() }), "temperature");
    assert_eq!(sampling(SamplingOptions { temperature: f32::NAN, ..default() }), "temperature");
    assert_eq!(sampling(SamplingOptions { top_p: 1.5, ..default() }), "top_p");
    assert_eq!(sampling(SamplingOptions { logit_bias: vec![(1000, 1.0)], ..default() }), "logit_bias");
    let long = |tokens, max_tokens| {
        rig.engine.submit(Request { max_tokens, ..request(vec![1; tokens], 1) }).map(drop)
    };
    assert_eq!(long(128, None), Err(SubmitError::TooLong { prompt: 128, context: 128 }));
    assert_eq!(long(128, Some(0)), Ok(()));
    assert_eq!(long(127, None), Ok(()));
    assert_eq!(rig.engine.metrics().rejected_invalid, 9);
    assert_eq!(rig.engine.metrics().rejected_too_long, 1);
}

#[test]
fn requests_without_a_seed_get_different_ones_and_are_told() {
    let mut rig = Rig::new(SKETCHES[0], random(50), &options(2, 128));
    let mut seed = || {
        let ask = Request { sampling: SamplingOptions::default(), ..request(vec![1], 0) };
        let mut stream = rig.engine.submit(ask).unwrap();
        rig.run();
        match stream.try_next() {
            Some(Event::Started { seed, .. }) => seed,
            other => panic!("{other:?}"),
        }
    };
    assert_ne!(seed(), seed());
}

#[test]
fn every_row_that_is_run_is_told_with_its_digest() {
    for sketch in SKETCHES {
        let mut rig = Rig::new(sketch, random(1_000_000), &options(2, 2048));
        let ask = |prompt: Vec<u32>| Request { max_tokens: Some(9), digests: true, ..request(prompt, 1) };
        let mut solo = Solo::new(sketch, random(1_000_000));
        let mut prompt = Rng(1).tokens(200);
        let first = rig.answers(ask(prompt.clone())).remove(0);
        prompt.extend(&first.tokens);
        let next = rig.answers(ask(prompt.clone())).remove(0);
        prompt.extend(&next.tokens);
        let digests: Vec<(usize, u64)> = prompt
            .iter()
            .map(|&token| {
                solo.push(token);
                solo.digest()
            })
            .enumerate()
            .collect();
        // The last token's row is never run; what was cached need not be.
        assert_eq!(first.rows, digests[..208], "{sketch:?}");
        assert_eq!(next.cached, Some(192));
        assert_eq!(next.rows, digests[192..217], "{sketch:?}");
    }
}
