//! What a single reader would try: one conversation, several, a next turn, several choices, limits.

mod common;

use common::*;
use motet_engine::Request;

#[test]
fn one_conversation_answers_what_its_tokens_alone_say() {
    for sketch in SKETCHES {
        let mut rig = Rig::new(sketch, random(150), &options(1, 2048));
        for length in [1, 63, 64, 65, 700] {
            let request = request(Rng(length).tokens(length as usize), 5);
            let expected = rig.expected(&request);
            let answer = rig.answers(request).remove(0);
            assert_eq!((answer.tokens, answer.reason.unwrap()), expected[0], "{sketch:?}, {length} tokens");
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
        assert_eq!((second.tokens, second.reason.unwrap()), expected[0], "{sketch:?}");
    }
}
