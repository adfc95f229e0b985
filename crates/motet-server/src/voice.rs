//! One choice of an answer, heard: what it says, and the log-probabilities of the tokens that say it.

use std::collections::VecDeque;

use crate::hearing::Hearing;
use crate::reader::Said;

/// A token with what the model thought of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Score {
    pub(crate) token: u32,
    /// `None` for the first token of a prompt.
    pub(crate) logprob: Option<f32>,
    /// The likeliest tokens in its place, best first.
    pub(crate) top: Vec<(u32, f32)>,
    /// Characters of the choice's text before this token.
    pub(crate) offset: usize,
}

/// What a choice says next.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Piece {
    pub(crate) said: Vec<Said>,
    pub(crate) scores: Vec<Score>,
}

impl Piece {
    /// Whether there is nothing in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.said.is_empty() && self.scores.is_empty()
    }
}

/// The text side of one choice.
#[derive(Debug)]
pub(crate) struct Voice {
    hearing: Hearing,
    /// Scores of tokens whose text is held back: it may be the beginning of a stop string. With the byte each starts at.
    held: VecDeque<(usize, Score)>,
    thinking: Thinking,
}

/// Counts the tokens before the answer proper.
#[derive(Debug, Clone, Copy, Default)]
struct Thinking {
    tokens: usize,
    thought: bool,
    answered: bool,
}

impl Voice {
    /// A voice that nothing has been heard of.
    pub(crate) fn new(hearing: Hearing) -> Voice {
        Voice { hearing, held: VecDeque::new(), thinking: Thinking::default() }
    }

    /// Takes a token; `score` if log-probabilities were asked for (its `offset` is set here).
    pub(crate) fn push(&mut self, token: u32, score: Option<Score>) -> Piece {
        let mut piece = Piece::default();
        if self.hearing.hit().is_some() {
            return piece;
        }
        if let Some(score) = score {
            self.held.push_back((self.hearing.bytes(), Score { offset: self.hearing.chars(), ..score }));
        }
        self.hearing.push(token, &mut piece.said);
        let passed = self.hearing.passed();
        self.release(|start| start < passed, &mut piece);
        self.note(&piece);
        self.thinking.tokens += usize::from(!self.thinking.answered);
        piece
    }

    /// What was held back at the end of the answer.
    pub(crate) fn finish(&mut self) -> Piece {
        let mut piece = Piece::default();
        self.hearing.finish(&mut piece.said);
        let (passed, cut) = (self.hearing.passed(), self.hearing.hit().is_some());
        self.release(|start| start < passed || !cut, &mut piece);
        self.note(&piece);
        piece
    }

    /// Tokens of the answer that were thinking.
    pub(crate) fn reasoning_tokens(&self) -> usize {
        if self.thinking.thought { self.thinking.tokens } else { 0 }
    }

    /// The stop string that ended the answer.
    pub(crate) fn hit(&self) -> Option<&str> {
        self.hearing.hit()
    }

    /// How many calls have begun.
    pub(crate) fn calls(&self) -> u32 {
        self.hearing.calls()
    }

    /// Hands out the scores of the tokens that `may` be shown, by the byte of the text they start at: those of a stop
    /// string never are, and those of a character's first bytes not before it is known to be none.
    fn release(&mut self, may: impl Fn(usize) -> bool, piece: &mut Piece) {
        while let Some((_, score)) = self.held.pop_front_if(|(start, _)| may(*start)) {
            piece.scores.push(score);
        }
    }

    fn note(&mut self, piece: &Piece) {
        for said in &piece.said {
            match said {
                Said::Reasoning(_) => self.thinking.thought = true,
                _ => self.thinking.answered = true,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use motet_text::{ReasoningSplit, Stops};

    use super::*;
    use crate::reader::AnswerReader;
    use crate::vocabulary::{self, END};

    fn voice(stops: &[&str]) -> Voice {
        let stops = Stops::new(stops.iter().map(|stop| stop.to_string()));
        Voice::new(Hearing::new(&vocabulary::bytes(), AnswerReader::plain()).until(stops, 0, false))
    }

    fn thinking() -> Voice {
        let reader = AnswerReader::new(ReasoningSplit::after_prompt("assistant\n"));
        Voice::new(Hearing::new(&vocabulary::bytes(), reader))
    }

    /// A score that tells its token, as the engine would give it.
    fn score(token: u32) -> Option<Score> {
        Some(Score { token, logprob: Some(-1.0), top: Vec::new(), offset: 0 })
    }

    /// All that is said, as (thinking, text), and the scores; what it is so far after each token.
    #[derive(Default)]
    struct Heard {
        reasoning: String,
        content: String,
        scores: Vec<Score>,
    }

    impl Heard {
        fn add(&mut self, piece: Piece) {
            for said in piece.said {
                match said {
                    Said::Reasoning(text) => self.reasoning += &text,
                    Said::Text(text) => self.content += &text,
                    other => panic!("{other:?} of an answer without calls"),
                }
            }
            self.scores.extend(piece.scores);
        }
    }

    /// Hears a text whose tokens are its bytes; with the lengths of the content after each.
    fn say(voice: &mut Voice, text: &str) -> (Heard, Vec<usize>) {
        let (mut all, mut lengths) = (Heard::default(), Vec::new());
        for byte in text.bytes() {
            all.add(voice.push(u32::from(byte), score(u32::from(byte))));
            lengths.push(all.content.len());
        }
        all.add(voice.finish());
        (all, lengths)
    }

    #[test]
    fn a_character_comes_whole_and_a_stop_string_not_at_all() {
        let (all, lengths) = say(&mut voice(&["STOP"]), "é STOP it");
        assert_eq!(all.content, "é ");
        assert_eq!(lengths[..2], [0, "é".len()]);
        // The two bytes of é and the space; the tokens of the stop string are not shown.
        assert_eq!(all.scores.iter().map(|score| score.token).collect::<Vec<_>>(), [0xc3, 0xa9, 0x20]);
        assert_eq!(all.scores.iter().map(|score| score.offset).collect::<Vec<_>>(), [0, 0, 1]);
    }

    #[test]
    fn what_only_began_a_stop_string_is_said_in_the_end() {
        let (all, _) = say(&mut voice(&["STOP"]), "no STO");
        assert_eq!(all.content, "no STO");
        assert_eq!(all.scores.len(), 6);
    }

    #[test]
    fn thinking_is_told_apart_and_counted() {
        let mut voice = thinking();
        let mut all = Heard::default();
        // <think> h m </think> \n o k
        for token in [258, 104, 109, 259, 10, 111, 107] {
            all.add(voice.push(token, None));
        }
        all.add(voice.finish());
        assert_eq!((all.reasoning.as_str(), all.content.as_str()), ("hm", "ok"));
        // All before the first token of the answer: the tags and the white space, too.
        assert_eq!(voice.reasoning_tokens(), 5);
    }

    #[test]
    fn an_answer_without_thinking_has_no_reasoning_tokens() {
        let mut voice = thinking();
        voice.push(111, None);
        voice.push(END, None);
        voice.finish();
        assert_eq!(voice.reasoning_tokens(), 0);
    }

    /// The text before the stop string that is complete first.
    fn until_stop<'a>(text: &'a str, stops: &[&str]) -> (&'a str, bool) {
        let hits = stops.iter().filter_map(|stop| text.find(stop).map(|start| (start + stop.len(), start)));
        hits.min().map_or((text, false), |(_, start)| (&text[..start], true))
    }

    proptest! {
        #[test]
        fn the_text_is_that_before_the_first_stop_and_each_token_of_it_has_its_score(
            text in "[abé€😀]{0,24}", stops in prop::collection::vec("[abé]{1,3}", 0..3),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (all, _) = say(&mut voice(&stops), &text);
            let (expected, _) = until_stop(&text, &stops);
            prop_assert_eq!(&all.content, expected);
            let bytes: Vec<u32> = expected.bytes().map(u32::from).collect();
            prop_assert_eq!(all.scores.iter().map(|score| score.token).collect::<Vec<_>>(), bytes);
            for (byte, score) in all.scores.iter().enumerate() {
                // Characters that ended before this byte.
                let before = expected.char_indices().filter(|(at, c)| at + c.len_utf8() <= byte).count();
                prop_assert_eq!(score.offset, before);
            }
        }
    }
}
