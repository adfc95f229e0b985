//! Stop strings and reasoning: the outcome does not depend on how the text arrives.

use motet_text::{ReasoningSplit, Stops};
use proptest::prelude::*;

/// Cuts a text into pieces of these sizes, over and over.
fn pieces(text: &str, sizes: &[usize]) -> Vec<String> {
    let mut chars = text.chars();
    let mut pieces = Vec::new();
    for &size in sizes.iter().cycle() {
        if chars.as_str().is_empty() {
            break;
        }
        pieces.push(chars.by_ref().take(size).collect());
    }
    pieces
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(0..=4usize, 1..8)
        .prop_filter("some progress", |sizes| sizes.iter().sum::<usize>() > 0)
}

/// What comes through, and the stop string that was hit.
fn stopped(stops: &[&str], pieces: &[String]) -> (String, Option<String>) {
    let mut watch = Stops::new(stops.iter().map(|stop| stop.to_string()));
    let mut through = String::new();
    for piece in pieces {
        let until = watch.push(piece);
        through.push_str(until.text);
        if let Some(hit) = until.hit {
            return (through, Some(hit.to_owned()));
        }
    }
    through.push_str(watch.finish());
    (through, None)
}

/// By definition: the first place where the text so far ends with a stop string, the longest of those.
fn stopped_by_definition(stops: &[&str], text: &str) -> (String, Option<String>) {
    for end in (0..=text.len()).filter(|&end| text.is_char_boundary(end)) {
        let hit = stops.iter().filter(|stop| !stop.is_empty() && text[..end].ends_with(**stop));
        if let Some(hit) = hit.max_by_key(|stop| stop.len()) {
            return (text[..end - hit.len()].to_owned(), Some(hit.to_string()));
        }
    }
    (text.to_owned(), None)
}

proptest! {
    #[test]
    fn stops_cut_where_they_are_first_complete(text in "[abcé]{0,30}", stops in proptest::collection::vec("[abcé]{0,5}", 0..4), sizes in sizes()) {
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        prop_assert_eq!(stopped(&stops, &pieces(&text, &sizes)), stopped_by_definition(&stops, &text));
    }
}

#[test]
fn text_is_held_back_only_while_it_may_become_a_stop() {
    let mut stops = Stops::new(["</s>".to_owned(), "END".to_owned()]);
    assert_eq!(stops.push("one <").text, "one ");
    assert_eq!(stops.push("/").text, "");
    assert_eq!(stops.push("b>").text, "</b>");
    assert_eq!(stops.push("EN").text, "");
    assert_eq!(stops.push("EN").text, "EN");
    let until = stops.push("D of it");
    assert_eq!((until.text, until.hit), ("", Some("END")));
}

/// (reasoning, content)
fn split(mut split: ReasoningSplit, pieces: &[String]) -> (String, String) {
    let (mut reasoning, mut content) = (String::new(), String::new());
    for piece in pieces {
        let parts = split.push(piece);
        reasoning.push_str(&parts.reasoning);
        content.push_str(&parts.content);
    }
    let parts = split.finish();
    reasoning.push_str(&parts.reasoning);
    content.push_str(&parts.content);
    (reasoning, content)
}

/// By definition, on the whole text.
fn split_by_definition(prompt: &str, text: &str) -> (String, String) {
    let prompt = prompt.trim_end();
    let thought = match text.trim_start().strip_prefix("<think>") {
        _ if prompt.ends_with("</think>") => return (String::new(), text.trim_start().to_owned()),
        _ if prompt.ends_with("<think>") => text,
        Some(thought) => thought,
        None => return (String::new(), text.to_owned()),
    };
    let (reasoning, content) = thought.split_once("</think>").unwrap_or((thought, ""));
    (reasoning.trim().to_owned(), content.trim_start().to_owned())
}

proptest! {
    #[test]
    fn reasoning_is_what_stands_between_the_tags(
        words in proptest::collection::vec(prop_oneof!["<think>", "</think>", "[a-z]{1,3}", "[ \n]{1,2}", "<", "</th", "é"], 0..10),
        prompt in prop_oneof![Just("user: hi\n"), Just("<think>\n"), Just("<think>\n\n</think>\n\n")],
        sizes in sizes(),
    ) {
        let text = words.concat();
        let found = split(ReasoningSplit::after_prompt(prompt), &pieces(&text, &sizes));
        prop_assert_eq!(found, split_by_definition(prompt, &text));
        let off = split(ReasoningSplit::off(), &pieces(&text, &sizes));
        prop_assert_eq!(off, (String::new(), text));
    }
}

#[test]
fn reasoning_flows_before_it_ends() {
    let mut split = ReasoningSplit::after_prompt("<|im_start|>assistant\n");
    assert_eq!(split.push("<thi").content, "");
    assert_eq!(split.push("nk>\nLet me see").reasoning, "Let me see");
    assert_eq!(split.push(". <").reasoning, ".");
    assert_eq!(split.push("b").reasoning, " <b");
    assert_eq!(split.push("\n</think>\n\nIt is 4").content, "It is 4");
    assert_eq!(split.push(".\n").content, ".\n");
}
