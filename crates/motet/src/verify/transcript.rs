//! What was heard of a conversation, and where it differs from the conversation alone.

use std::collections::BTreeMap;

use motet_engine::Event;
use serde::Serialize;

/// One row that was run: the digest of its logits, and the token that was chosen from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Row {
    pub(super) digest: u64,
    /// Nothing is chosen from the rows of the prompt but the last, nor from rows that are run again.
    pub(super) token: Option<u32>,
}

/// A conversation as it was heard.
#[derive(Debug, Clone, Default)]
pub(super) struct Transcript {
    /// Every row that was run, with its position; a row that was run twice stands here twice.
    rows: Vec<(usize, Row)>,
    /// Tokens of the prompt that were found in the prefix cache.
    pub(super) cached: usize,
    /// Nothing follows.
    pub(super) is_over: bool,
    /// It failed.
    pub(super) failure: Option<String>,
}

/// Where a conversation first differs from the conversation alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Difference {
    /// Position in the conversation, the prompt's first token being 0.
    pub(super) position: usize,
    /// What it is alone.
    pub(super) alone: Option<Row>,
    /// What it was here.
    pub(super) found: Option<Row>,
}

/// A conversation held against the conversation alone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Comparison {
    /// Rows that were compared.
    pub(super) rows: usize,
    /// Rows that differ.
    pub(super) differing: usize,
    /// The first of them.
    pub(super) first: Option<Difference>,
}

impl Transcript {
    pub(super) fn hear(&mut self, event: Event) {
        match event {
            Event::Started { cached_tokens, .. } => self.cached = cached_tokens,
            Event::Row { position, digest, .. } => self.rows.push((position, Row { digest, token: None })),
            Event::Token { scored, .. } => {
                if let Some((_, row)) = self.rows.last_mut() {
                    row.token = Some(scored.token);
                }
            }
            Event::Prompt(_) => {}
            Event::Finished { .. } => self.is_over = true,
            Event::Failed(error) => {
                self.failure = Some(error.to_string());
                self.is_over = true;
            }
        }
    }

    /// Tokens of the answer so far.
    pub(super) fn answered(&self) -> usize {
        self.rows.iter().filter(|(_, row)| row.token.is_some()).count()
    }

    /// Compares every row that was run with the same row of the conversation alone. Rows behind the cached prefix that
    /// were never run differ, and so do rows that the other does not have, or whose digest is 0.
    pub(super) fn compare(&self, alone: &Self) -> Comparison {
        let expected: BTreeMap<usize, Row> = alone.rows.iter().copied().collect();
        let mut missing = expected.clone();
        missing.retain(|&position, _| position >= self.cached);
        let mut comparison = Comparison::default();
        for &(position, found) in &self.rows {
            let expected = expected.get(&position).copied();
            let first_time = missing.remove(&position).is_some();
            let is_equal = expected.is_some_and(|row| {
                row.digest == found.digest
                    && row.digest != 0
                    && found.token == row.token.filter(|_| first_time)
            });
            comparison.add(is_equal, Difference { position, alone: expected, found: Some(found) });
        }
        for (position, row) in missing {
            comparison.add(false, Difference { position, alone: Some(row), found: None });
        }
        comparison
    }
}

impl Comparison {
    fn add(&mut self, is_equal: bool, difference: Difference) {
        self.rows += 1;
        if !is_equal {
            self.differing += 1;
            self.first.get_or_insert(difference);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use motet_engine::{FinishReason, Scored, StreamError, Usage};

    fn row(position: usize, digest: u64) -> Event {
        Event::Row { choice: 0, position, digest }
    }

    fn token(token: u32) -> Event {
        Event::Token { choice: 0, scored: Scored { token, logprob: None, top: Vec::new() } }
    }

    fn heard(events: impl IntoIterator<Item = Event>) -> Transcript {
        let mut transcript = Transcript::default();
        events.into_iter().for_each(|event| transcript.hear(event));
        transcript
    }

    fn started(cached_tokens: usize) -> Event {
        Event::Started { choice: 0, cached_tokens, seed: 1 }
    }

    /// A prompt of three tokens and an answer of two: rows 0 to 3 are run.
    fn events() -> Vec<Event> {
        let finished = Event::Finished { choice: 0, reason: FinishReason::Length, usage: Usage::default() };
        vec![started(0), row(0, 5), row(1, 6), row(2, 7), token(10), row(3, 8), token(11), finished]
    }

    fn differing(events: Vec<Event>) -> (usize, usize) {
        let comparison = heard(events).compare(&heard(self::events()));
        (comparison.rows, comparison.differing)
    }

    #[test]
    fn the_same_rows_are_the_same() {
        let transcript = heard(events());
        assert!(transcript.is_over && transcript.failure.is_none());
        assert_eq!(transcript.answered(), 2);
        assert_eq!(differing(events()), (4, 0));
    }

    #[test]
    fn rows_behind_a_cached_prefix_are_compared() {
        let warm = |digest| vec![started(1), row(1, digest), row(2, 7), token(10), row(3, 8), token(11)];
        assert_eq!(differing(warm(6)), (3, 0));
        assert_eq!(differing(warm(5)), (3, 1));
    }

    #[test]
    fn rows_that_are_run_again_are_compared_again() {
        let again = |digest| {
            let mut again = events();
            again.splice(5..5, [row(0, 5), row(1, digest), row(2, 7)]);
            again
        };
        assert_eq!(differing(again(6)), (7, 0));
        assert_eq!(differing(again(9)), (7, 1));
    }

    #[test]
    fn one_bit_of_a_digest_is_a_difference() {
        for at in [1, 2, 3, 5] {
            let mut tampered = events();
            let Event::Row { position, digest, .. } = &mut tampered[at] else { unreachable!() };
            *digest ^= 1;
            let position = *position;
            let comparison = heard(tampered).compare(&heard(events()));
            assert_eq!((comparison.rows, comparison.differing), (4, 1));
            assert_eq!(comparison.first.unwrap().position, position);
        }
    }

    #[test]
    fn other_missing_and_further_tokens_and_rows_and_no_digest_are_differences() {
        let changed = |change: fn(&mut Vec<Event>)| {
            let mut events = events();
            change(&mut events);
            differing(events).1
        };
        assert_eq!(changed(|e| e[4] = token(12)), 1);
        assert_eq!(changed(|e| drop(e.remove(4))), 1, "a missing token");
        assert_eq!(changed(|e| drop(e.drain(5..7))), 1, "a missing row");
        assert_eq!(changed(|e| e.clear()), 4);
        assert_eq!(changed(|e| e.extend([row(4, 9), token(1)])), 1);
        assert_eq!(changed(|e| e.insert(2, token(3))), 1, "a token in the prompt");
        let blank = || heard([started(0), row(0, 0)]);
        assert_eq!(blank().compare(&blank()).differing, 1);
    }

    #[test]
    fn a_failure_is_kept() {
        let transcript = heard([Event::Failed(StreamError::NonFinite { position: 2 })]);
        assert!(transcript.is_over);
        assert!(transcript.failure.unwrap().contains("position 2"));
    }
}
