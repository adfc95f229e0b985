//! What forms take: measured with a counting allocator (the test of the same name), and never more than this.

use motet_engine::Line;
use motet_text::{Grammar, Tokenizer};

use crate::FormLimits;

/// Bytes of the trie and its slices, for each token and for each byte of all tokens.
const TOKEN: u64 = 160;
const BYTE: u64 = 40;

/// Bytes of a choice that keeps to a form.
const CHOICE: u64 = 128 << 10;

/// Bytes of a grammar that was compiled, about: what any has, and for each byte of its text.
const COMPILED: (usize, usize) = (64 << 10, 100);

pub(crate) fn lines(tokenizer: &Tokenizer, choices: usize, limits: &FormLimits) -> Vec<Line> {
    let tokens = tokenizer.vocab_len() as u64;
    let bytes: u64 = (0..tokens as u32).map(|id| tokenizer.piece(id).len() as u64).sum();
    let line = |name: &str, bytes| Line { name: name.to_owned(), bytes, parts: Vec::new() };
    vec![
        line("forms: the vocabulary laid out for them", tokens * TOKEN + bytes * BYTE),
        line("forms: answers that keep to one", choices as u64 * CHOICE),
        line("forms: grammars remembered", limits.remembered.1 as u64),
    ]
}

/// What is counted for a grammar that is remembered.
pub(crate) fn compiled_bytes(grammar: &Grammar) -> usize {
    COMPILED.0 + COMPILED.1 * grammar.lark.len()
}
