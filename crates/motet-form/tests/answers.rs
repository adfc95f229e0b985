//! Answers keep to their form from the token on where it begins, and whatever is taken back was never there.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::*;
use motet_engine::{Advance, Constraint};
use motet_text::{Begins, Grammar, Marker, Special, Tokenizer};
use serde_json::{Value, json};

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 12 },
            "age": { "type": "integer", "minimum": 0, "maximum": 130 },
            "tags": { "type": "array", "items": { "enum": ["a", "b", "ü"] }, "maxItems": 3 },
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    })
}

#[test]
fn whatever_is_chosen_is_a_document_of_the_schema() {
    for name in ["smollm2", "gemma3"] {
        let tokenizer = tokenizer(name);
        let make = forms(&tokenizer).compile(&json(&person())).unwrap();
        let mut complete = 0;
        for seed in 1..40 {
            let (said, whole) = walk(&mut *make(), &tokenizer, &mut Rng(seed), 400);
            if whole {
                complete += 1;
                let document: Value = serde_json::from_str(&text(&tokenizer, &said)).unwrap();
                assert!(document["name"].as_str().unwrap().chars().count() <= 12, "{document}");
                assert!(document["age"].as_u64().unwrap() <= 130, "{document}");
                let tags = document["tags"].as_array().map_or(&[][..], Vec::as_slice);
                assert!(
                    tags.len() <= 3
                        && tags.iter().all(|tag| ["a", "b", "ü"].contains(&tag.as_str().unwrap()))
                );
            }
        }
        assert!(complete >= 30, "{name}: {complete} whole documents");
    }
}

/// Says a text; the masks allow each of its tokens.
fn say(form: &mut dyn Constraint, tokenizer: &Tokenizer, text: &str, special: Special) -> Advance {
    let mut last = Advance::GoesOn;
    for token in tokenizer.encode(text, special) {
        assert!(form.asleep() || may(&mask(form, tokenizer.vocab_len()), token), "{text:?}");
        last = form.advance(token);
        assert_ne!(last, Advance::Refused, "{text:?}");
    }
    last
}

fn only_ends(form: &mut dyn Constraint, tokenizer: &Tokenizer) -> bool {
    tokens(&mask(form, tokenizer.vocab_len())).iter().all(|&token| tokenizer.is_end(token))
}

#[test]
fn an_answer_ends_where_nothing_may_follow() {
    let tokenizer = tokenizer("smollm2");
    let forms = forms(&tokenizer);
    let make = forms.compile(&json(&person())).unwrap();
    let mut form = make();
    assert!(!form.asleep());
    assert_eq!(say(&mut *form, &tokenizer, "{\"name\":\"Ann\",\"age\":7", Special::AsText), Advance::GoesOn);
    assert_eq!(form.advance(tokenizer.eos().unwrap()), Advance::Refused, "it is not complete");
    assert_eq!(say(&mut *form, &tokenizer, "}", Special::AsText), Advance::Ends);
    // As a draft, the last token may not come after all.
    form.roll_back(1);
    assert_eq!(say(&mut *form, &tokenizer, "8", Special::AsText), Advance::GoesOn);

    let number = Grammar { lark: "start: /[0-9]{2,3}/".into(), begins: Begins::AtOnce };
    let mut form = forms.compile(&number).unwrap()();
    say(&mut *form, &tokenizer, "12", Special::AsText);
    assert!(may(&mask(&mut *form, tokenizer.vocab_len()), tokenizer.eos().unwrap()));
    assert_eq!(form.advance(tokenizer.eos().unwrap()), Advance::Ends);
    form.roll_back(1);
    say(&mut *form, &tokenizer, "3", Special::AsText);
    assert!(only_ends(&mut *form, &tokenizer));
}

fn marker(text: &str) -> Marker {
    Marker { text: text.to_owned(), token: None }
}

#[test]
fn behind_a_marker_the_grammar_counts_until_it_is_complete() {
    let tokenizer = tokenizer("smollm2");
    let lark = format!("start: \"\\n\" call \"\\n</tool_call>\"\ncall: %json {}", person());
    let grammar = Grammar { lark, begins: Begins::Behind(vec![marker("<tool_call>")]) };
    let mut form = forms(&tokenizer).compile(&grammar).unwrap()();
    for _ in 0..2 {
        assert!(form.asleep());
        say(&mut *form, &tokenizer, "Let me look. {\"name\": 3} <tool_ca", Special::AsText);
        assert!(form.asleep());
        say(&mut *form, &tokenizer, "ll>", Special::AsText);
        assert!(!form.asleep());
        let colon = tokenizer.encode(":", Special::AsText)[0];
        assert!(!may(&mask(&mut *form, tokenizer.vocab_len()), colon));
        say(&mut *form, &tokenizer, "\n{\"name\":\"Ann\",\"age\":7}\n</tool_call", Special::AsText);
        assert!(!form.asleep());
        assert_eq!(say(&mut *form, &tokenizer, ">", Special::AsText), Advance::GoesOn);
    }
    assert!(form.asleep());
}

#[test]
fn a_marker_within_a_token_hands_the_rest_on() {
    let tokenizer = tokenizer("smollm2");
    // "()" is a token of its own.
    let [token] = tokenizer.encode("()", Special::AsText)[..] else { panic!("two tokens") };
    let forms = forms(&tokenizer);
    for (lark, wakes) in [("start: \")\" /[a-c]+/ \"!\"", true), ("start: /[a-c]+/ \"!\"", false)] {
        let grammar = Grammar { lark: lark.into(), begins: Begins::Behind(vec![marker("(")]) };
        let mut form = forms.compile(&grammar).unwrap()();
        assert_eq!(form.advance(token), Advance::GoesOn);
        assert_eq!(!form.asleep(), wakes, "{lark}");
        form.roll_back(1);
        assert!(form.asleep());
        form.advance(tokenizer.encode("(", Special::AsText)[0]);
        assert!(!form.asleep());
    }
}

#[test]
fn a_marker_that_is_a_token_is_not_its_characters() {
    let tokenizer = tokenizer("smollm2");
    let [token] = tokenizer.encode("<|im_start|>", Special::Parse)[..] else { panic!("a token") };
    let markers = vec![Marker { text: "<|im_start|>".into(), token: Some(token) }];
    let grammar = Grammar { lark: "start: \"yes\" | \"no\"".into(), begins: Begins::Behind(markers) };
    let mut form = forms(&tokenizer).compile(&grammar).unwrap()();
    say(&mut *form, &tokenizer, "<|im_start|>", Special::AsText);
    assert!(form.asleep());
    say(&mut *form, &tokenizer, "<|im_start|>", Special::Parse);
    assert!(!form.asleep());
}

#[test]
fn thinking_is_free_and_the_answer_is_not() {
    let tokenizer = tokenizer("smollm2");
    let forms = forms(&tokenizer);
    let grammar = |opened| {
        let begins = Begins::AfterThinking { open: marker("<think>"), close: marker("</think>"), opened };
        Grammar { lark: "start: /\\n{0,2}/ (\"yes\" | \"no\")".into(), begins }
    };
    // The prompt opened it.
    let mut form = forms.compile(&grammar(true)).unwrap()();
    assert!(form.asleep());
    say(&mut *form, &tokenizer, "no, <think>hm</think>\n\nye", Special::AsText);
    assert_eq!(say(&mut *form, &tokenizer, "s", Special::AsText), Advance::Ends);
    // The answer opens it, or doesn't.
    let mut form = forms.compile(&grammar(false)).unwrap()();
    say(&mut *form, &tokenizer, "<think>", Special::AsText);
    assert!(form.asleep());
    say(&mut *form, &tokenizer, "well</think>no", Special::AsText);
    let mut form = forms.compile(&grammar(false)).unwrap()();
    let letter = |letter: &str| tokenizer.encode(letter, Special::AsText)[0];
    let first = mask(&mut *form, tokenizer.vocab_len());
    assert!(may(&first, letter("y")) && may(&first, letter("<")) && !may(&first, letter("a")));
    assert_eq!(say(&mut *form, &tokenizer, "yes", Special::AsText), Advance::Ends);
    // What only begins like it is neither.
    let mut form = forms.compile(&grammar(false)).unwrap()();
    say(&mut *form, &tokenizer, "<", Special::AsText);
    let second = mask(&mut *form, tokenizer.vocab_len());
    assert!(may(&second, letter("t")) && !may(&second, letter("y")));
}

#[test]
fn what_is_wrong_with_a_grammar_is_said() {
    let tokenizer = tokenizer("smollm2");
    let forms = forms(&tokenizer);
    for lark in ["start: unknown_rule", "start: \"a", "", "start: /(/", "start: %json {\"type\": \"strung\"}"]
    {
        let grammar = Grammar { lark: lark.into(), begins: Begins::AtOnce };
        let error = forms.compile(&grammar).err().unwrap().to_string();
        assert!(
            error.starts_with("the grammar can't be used: ") && !error.contains('\n'),
            "{lark:?}: {error}"
        );
    }
}
