//! WordPiece (GGUF model "bert"): words of plain letters, each cut into the longest pieces from the left.
//!
//! Text is made plain first, as BERT does: control characters go, and where the vocabulary is of lower case so do capital
//! letters and accents. White space parts words, and every punctuation mark and Chinese character is one of its own.
//! Files write a piece that begins a word with '▁'; here that is a space.

use unicode_general_category::{GeneralCategory, get_general_category};
use unicode_normalization::UnicodeNormalization;

use crate::TextError;
use crate::pieces::Pieces;
use crate::vocabulary::{Vocabulary, kind};

/// A word of more characters than this is unknown, whatever it is made of.
const LONGEST_WORD: usize = 100;

/// How text is made plain, and what stands for a word that cannot be cut.
#[derive(Debug)]
pub(crate) struct WordPiece {
    unknown: u32,
    lower_case: bool,
    strip_accents: bool,
}

impl WordPiece {
    pub(crate) fn new(vocabulary: &Vocabulary<'_>) -> Result<(WordPiece, Pieces), TextError> {
        let tokens = &vocabulary.tokens;
        let mut pieces = Pieces::with_capacity(tokens.len(), tokens.iter().map(|token| token.len()).sum());
        for &token in tokens {
            let begins_word = token.strip_prefix('▁');
            let space = begins_word.map(|_| b' ');
            pieces.push(space.into_iter().chain(begins_word.unwrap_or(token).bytes()));
        }
        for (id, &kind) in (0..).zip(&vocabulary.types) {
            if !matches!(kind, kind::CONTROL | kind::UNKNOWN) {
                pieces.index(id);
            }
        }
        let unknown =
            vocabulary.unknown.ok_or(TextError::Missing { key: "tokenizer.ggml.unknown_token_id" })?;
        let lower_case = vocabulary.lower_case.unwrap_or(true);
        let strip_accents = vocabulary.strip_accents.unwrap_or(lower_case);
        Ok((WordPiece { unknown, lower_case, strip_accents }, pieces))
    }

    /// Appends the ids of a text without special tokens.
    pub(crate) fn encode(&self, pieces: &Pieces, text: &str, ids: &mut Vec<u32>) {
        let mut word = String::from(" ");
        let mut plain = |c: char| {
            if c.is_whitespace() {
                self.end_word(pieces, &mut word, ids);
            } else if stands_alone(c) {
                self.end_word(pieces, &mut word, ids);
                word.push(c);
                self.end_word(pieces, &mut word, ids);
            } else {
                word.push(c);
            }
        };
        let mut cased =
            |c: char| if self.lower_case { c.to_lowercase().for_each(&mut plain) } else { plain(c) };
        let clean = text.chars().filter(|&c| !is_dropped(c));
        if self.strip_accents {
            clean
                .nfd()
                .filter(|&c| get_general_category(c) != GeneralCategory::NonspacingMark)
                .for_each(&mut cased);
        } else {
            clean.for_each(&mut cased);
        }
        self.end_word(pieces, &mut word, ids);
    }

    /// Appends the ids of the word, which begins with a space, and leaves the space.
    fn end_word(&self, pieces: &Pieces, word: &mut String, ids: &mut Vec<u32>) {
        let first = ids.len();
        let mut at = 0;
        if word.chars().nth(LONGEST_WORD + 1).is_some() {
            ids.push(self.unknown);
            at = word.len();
        }
        while word.len() > 1 && at < word.len() {
            let reach = word.len().min(at + pieces.longest());
            let ends = (at + 1..=reach).rev();
            let piece = ends.filter_map(|end| Some((end, pieces.find(&word.as_bytes()[at..end])?))).next();
            let Some((end, id)) = piece else {
                ids.truncate(first);
                ids.push(self.unknown);
                break;
            };
            ids.push(id);
            at = end;
        }
        word.truncate(1);
    }
}

/// What is no text: U+FFFD, and control, format and unassigned characters that are no white space.
fn is_dropped(c: char) -> bool {
    use GeneralCategory as C;
    let blank = matches!(c, '\t' | '\n' | '\r');
    let control = matches!(get_general_category(c), C::Control | C::Format | C::PrivateUse | C::Surrogate);
    c == char::REPLACEMENT_CHARACTER || (control && !blank)
}

/// Punctuation, with all symbols of ASCII, and Chinese characters.
fn stands_alone(c: char) -> bool {
    use GeneralCategory as C;
    let punctuation = c.is_ascii_punctuation()
        || matches!(
            get_general_category(c),
            C::ConnectorPunctuation
                | C::DashPunctuation
                | C::OpenPunctuation
                | C::ClosePunctuation
                | C::InitialPunctuation
                | C::FinalPunctuation
                | C::OtherPunctuation
        );
    punctuation || is_chinese(c)
}

/// The blocks that BERT takes for Chinese (`tokenization.py`; the last extension as in `tokenizers`).
fn is_chinese(c: char) -> bool {
    matches!(c,
        '\u{4e00}'..='\u{9fff}'
        | '\u{3400}'..='\u{4dbf}'
        | '\u{20000}'..='\u{2a6df}'
        | '\u{2a700}'..='\u{2b73f}'
        | '\u{2b740}'..='\u{2b81f}'
        | '\u{2b920}'..='\u{2ceaf}'
        | '\u{f900}'..='\u{faff}'
        | '\u{2f800}'..='\u{2fa1f}')
}
