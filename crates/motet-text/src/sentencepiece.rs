//! SentencePiece's BPE by score (GGUF model "llama": Llama 2, Mistral, Gemma).
//!
//! Text is not cut into words first. Neighbours join when their text is a token, the best score first; characters that
//! are no token fall back to their bytes. Files write the space as '▁', and a literal '▁' in a text is the same to them,
//! so here both are the space.

use crate::TextError;
use crate::merge::{Join, Merger, Symbol};
use crate::pieces::{NONE, Pieces};
use crate::vocabulary::{Vocabulary, kind};

const ESCAPED_SPACE: char = '▁';

/// The order of the joins, and the tokens of bytes.
#[derive(Debug)]
pub(crate) struct SentencePiece {
    /// Of each token; the best score has the lowest.
    priorities: Vec<u32>,
    /// The token of each byte; [`NONE`] where there is neither one nor an unknown token.
    bytes: [u32; 256],
    /// The bytes that some token has before a space. After any other byte a space begins a word: a join across would need
    /// a token that holds both.
    joins_space: [bool; 256],
    /// A space is put before text that begins the prompt or follows a special token.
    pub(crate) space_prefix: bool,
}

impl SentencePiece {
    pub(crate) fn new(vocabulary: &Vocabulary<'_>) -> Result<(SentencePiece, Pieces), TextError> {
        let tokens = &vocabulary.tokens;
        let mut pieces = Pieces::with_capacity(tokens.len(), tokens.iter().map(|token| token.len()).sum());
        let mut joins_space = [false; 256];
        let mut bytes = [vocabulary.unknown.unwrap_or(NONE); 256];
        for (id, (token, kind)) in (0..).zip(tokens.iter().copied().zip(vocabulary.types.iter().copied())) {
            match byte_of(token).filter(|_| kind == kind::BYTE) {
                Some(byte) => {
                    pieces.push([byte]);
                    bytes[usize::from(byte)] = id;
                }
                None => pieces.push(unescaped(token)),
            }
        }
        for (id, (token, kind)) in (0..).zip(tokens.iter().copied().zip(vocabulary.types.iter().copied())) {
            // Joining makes no control token out of text, and no token that holds a literal space: that one is cut out
            // of the text as it stands.
            let never = matches!(kind, kind::BYTE | kind::CONTROL | kind::UNKNOWN) || token.contains(' ');
            if !never {
                pieces.index(id);
                for pair in pieces.get(id).windows(2).filter(|pair| pair[1] == b' ') {
                    joins_space[usize::from(pair[0])] = true;
                }
            }
        }
        let priorities = vocabulary.scores.iter().enumerate().map(|(id, &score)| priority(id, score));
        let priorities = priorities.collect::<Result<Vec<u32>, TextError>>()?;
        let space_prefix = vocabulary.add_space_prefix.unwrap_or(true);
        Ok((SentencePiece { priorities, bytes, joins_space, space_prefix }, pieces))
    }

    /// Appends the ids of a text without special tokens.
    pub(crate) fn encode(&self, pieces: &Pieces, text: &str, begins: bool, ids: &mut Vec<u32>) {
        let prefix = (begins && self.space_prefix).then_some(b' ');
        let text: Vec<u8> = prefix.into_iter().chain(unescaped(text)).collect();
        let mut merger = Merger::default();
        let mut rest = text.as_slice();
        while !rest.is_empty() {
            let (word, after) = rest.split_at(self.word_end(rest));
            self.encode_word(pieces, word, &mut merger, ids);
            rest = after;
        }
    }

    /// The next place, after the first byte, across which nothing can join.
    fn word_end(&self, text: &[u8]) -> usize {
        let borders =
            text.windows(2).position(|pair| pair[1] == b' ' && !self.joins_space[usize::from(pair[0])]);
        borders.map_or(text.len(), |before| before + 1)
    }

    fn encode_word(&self, pieces: &Pieces, word: &[u8], merger: &mut Merger, ids: &mut Vec<u32>) {
        let span = |start: u32, end: u32| &word[start as usize..end as usize];
        let mut at = 0;
        let symbols = std::iter::from_fn(|| {
            let start = at;
            at += utf8_length(*word.get(start as usize)?);
            Some(Symbol::new(start, at, pieces.find(span(start, at)).unwrap_or(NONE)))
        });
        let join = |left: &Symbol, right: &Symbol| {
            let id = pieces.find(span(left.start, right.end))?;
            Some(Join { priority: self.priorities[id as usize], id })
        };
        merger.run(symbols, join, |symbol| match symbol.id {
            NONE => {
                let bytes = span(symbol.start, symbol.end).iter().map(|&byte| self.bytes[usize::from(byte)]);
                ids.extend(bytes.filter(|&id| id != NONE));
            }
            id => ids.push(id),
        });
    }
}

/// The bytes of a text with '▁' as the space.
fn unescaped(text: &str) -> impl Iterator<Item = u8> {
    text.chars().flat_map(|c| {
        let mut buffer = [0; 4];
        let c = if c == ESCAPED_SPACE { ' ' } else { c };
        let length = c.encode_utf8(&mut buffer).len();
        buffer.into_iter().take(length)
    })
}

/// Orders by score, the highest first; -0 and 0 are the same.
fn priority(id: usize, score: f32) -> Result<u32, TextError> {
    if score.is_nan() {
        return Err(TextError::Score { id });
    }
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    Ok(!ascending)
}

/// The byte that "<0x2F>" stands for.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2)
}

fn utf8_length(first: u8) -> u32 {
    match first {
        0..0x80 => 1,
        0x80..0xe0 => 2,
        0xe0..0xf0 => 3,
        _ => 4,
    }
}
