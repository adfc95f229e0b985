//! A tokenizer whose ids are bytes, with a few special tokens: text that a test can write down as ids.

use std::sync::Arc;

use motet_text::{Tokenizer, Vocabulary};

/// Ends an answer; a message in the template.
pub(crate) const END: u32 = 257;
/// Number of tokens.
pub(crate) const VOCAB: usize = 260;

/// How byte-level BPE writes a byte (GPT-2's `bytes_to_unicode`).
fn written(byte: u8) -> String {
    let plain = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let code = if plain(byte) {
        u32::from(byte)
    } else {
        256 + (0..byte).filter(|&other| !plain(other)).count() as u32
    };
    char::from_u32(code).unwrap().to_string()
}

/// Ids 0–255 are the bytes, 256 `<|im_start|>`, 257 `<|im_end|>` (the end), 258 `<think>`, 259 `</think>`.
pub(crate) fn bytes() -> Arc<Tokenizer> {
    let written: Vec<String> = (0..=255).map(written).collect();
    let mut tokens: Vec<&str> = written.iter().map(String::as_str).collect();
    tokens.extend(["<|im_start|>", "<|im_end|>", "<think>", "</think>"]);
    let mut types = vec![1; 256];
    types.extend([3, 3, 4, 4]);
    let vocabulary = Vocabulary {
        model: "gpt2",
        pre: Some("gpt2"),
        tokens,
        types,
        eos: Some(END),
        add_bos: Some(false),
        ..Vocabulary::default()
    };
    Arc::new(Tokenizer::new(vocabulary).unwrap())
}
