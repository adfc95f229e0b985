//! What was heard of a conversation, and where it differs from the conversation alone.

use std::collections::BTreeMap;

use motet_engine::Event;
use serde::Serialize;

/// One position: its token, and the digest of the logits that it was chosen from or scored by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Row {
    pub(super) token: u32,
    pub(super) digest: u64,
}

/// A conversation as it was heard.
#[derive(Debug, Clone, Default)]
pub(super) struct Transcript {
    /// By the position of the token, from 1.
    pub(super) rows: BTreeMap<usize, Row>,
    /// Tokens of the prompt.
    prompt: usize,
    /// Tokens of the prompt whose rows were published.
    scored: usize,
    /// Tokens of the answer.
    pub(super) generated: usize,
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
    /// Positions that were compared.
    pub(super) rows: usize,
    /// Positions that differ.
    pub(super) differing: usize,
    /// The first of them.
    pub(super) first: Option<Difference>,
}

impl Transcript {
    /// Nothing heard yet of a conversation with a prompt of that many tokens.
    pub(super) fn new(prompt: usize) -> Self {
        Self { prompt, ..Self::default() }
    }

    pub(super) fn hear(&mut self, event: Event) {
        match event {
            Event::Started { cached_tokens, .. } => self.cached = cached_tokens,
            Event::Prompt(scored) => {
                self.scored += 1;
                self.rows.insert(self.scored, Row { token: scored.token, digest: scored.digest });
            }
            Event::Token { scored, .. } => {
                let position = self.prompt + self.generated;
                self.rows.insert(position, Row { token: scored.token, digest: scored.digest });
                self.generated += 1;
            }
            Event::Finished { .. } => self.is_over = true,
            Event::Failed(error) => {
                self.failure = Some(error.to_string());
                self.is_over = true;
            }
        }
    }

    /// Compares with the same conversation alone, row by row; without rows of the prompt only the answers. A row that
    /// only one of them has differs, and so does one without a digest.
    pub(super) fn compare(&self, alone: &Self, with_prompt: bool) -> Comparison {
        let from = if with_prompt { 0 } else { self.prompt };
        let mut positions: Vec<usize> =
            alone.rows.keys().chain(self.rows.keys()).copied().filter(|&p| p >= from).collect();
        positions.sort_unstable();
        positions.dedup();
        let mut comparison = Comparison { rows: positions.len(), ..Comparison::default() };
        for position in positions {
            let (expected, found) = (alone.rows.get(&position).copied(), self.rows.get(&position).copied());
            if expected == found && expected.is_some_and(|row| row.digest != 0) {
                continue;
            }
            comparison.differing += 1;
            comparison.first.get_or_insert(Difference { position, alone: expected, found });
        }
        comparison
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use motet_engine::{FinishReason, Scored, StreamError, Usage};

    fn scored(token: u32, digest: u64) -> Scored {
        Scored { token, logprob: None, top: Vec::new(), digest }
    }

    /// A prompt of three tokens, 7 8 9, and the answer 10 11.
    fn heard() -> Transcript {
        let mut transcript = Transcript::new(3);
        transcript.hear(Event::Started { choice: 0, cached_tokens: 0, seed: 1 });
        transcript.hear(Event::Prompt(scored(8, 0x80)));
        transcript.hear(Event::Prompt(scored(9, 0x90)));
        transcript.hear(Event::Token { choice: 0, scored: scored(10, 0xa0) });
        transcript.hear(Event::Token { choice: 0, scored: scored(11, 0xb0) });
        let (reason, usage) = (FinishReason::Length, Usage::default());
        transcript.hear(Event::Finished { choice: 0, reason, usage });
        transcript
    }

    #[test]
    fn rows_stand_at_the_positions_of_their_tokens() {
        let transcript = heard();
        let tokens: Vec<(usize, u32)> = transcript.rows.iter().map(|(&p, row)| (p, row.token)).collect();
        assert_eq!(tokens, [(1, 8), (2, 9), (3, 10), (4, 11)]);
        assert!(transcript.is_over && transcript.failure.is_none());
        assert_eq!(transcript.compare(&heard(), true), Comparison { rows: 4, ..Comparison::default() });
        assert_eq!(transcript.compare(&heard(), false), Comparison { rows: 2, ..Comparison::default() });
    }

    #[test]
    fn one_bit_of_a_digest_is_a_difference() {
        for position in 1..=4 {
            let mut tampered = heard();
            tampered.rows.get_mut(&position).unwrap().digest ^= 1;
            let comparison = tampered.compare(&heard(), true);
            assert_eq!((comparison.rows, comparison.differing), (4, 1));
            assert_eq!(comparison.first.unwrap().position, position);
        }
    }

    #[test]
    fn another_token_a_missing_row_a_further_row_and_no_digest_are_differences() {
        let differing = |change: fn(&mut Transcript)| {
            let mut changed = heard();
            change(&mut changed);
            changed.compare(&heard(), true).differing
        };
        assert_eq!(differing(|t| t.rows.get_mut(&3).unwrap().token = 5), 1);
        assert_eq!(differing(|t| t.rows.retain(|&at, _| at != 4)), 1);
        assert_eq!(differing(|t| t.rows.clear()), 4);
        assert_eq!(differing(|t| t.rows.extend([(5, Row { token: 1, digest: 2 })])), 1);
        let mut blank = heard();
        blank.rows.values_mut().for_each(|row| row.digest = 0);
        assert_eq!(blank.compare(&blank, true).differing, 4);
    }

    #[test]
    fn a_failure_is_kept() {
        let mut transcript = Transcript::new(3);
        transcript.hear(Event::Failed(StreamError::NonFinite { position: 2 }));
        assert!(transcript.is_over);
        assert!(transcript.failure.unwrap().contains("position 2"));
    }
}
