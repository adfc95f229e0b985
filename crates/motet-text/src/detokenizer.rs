//! Ids to text while they are sampled.
//!
//! A token may end in the middle of a character. What is handed out is always whole UTF-8, and all of it together is
//! what a lossy conversion of all bytes would give; how the ids are grouped never shows.

use std::sync::Arc;

use crate::Tokenizer;

/// Decodes a stream of ids; see [`Tokenizer::stream`].
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The beginning of a character whose rest has not come yet: at most three bytes.
    pending: Vec<u8>,
    text: String,
}

impl Detokenizer {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>) -> Detokenizer {
        Detokenizer { tokenizer, pending: Vec::new(), text: String::new() }
    }

    /// The text that is complete with this token: all of its own, or less or more of it where characters cross tokens.
    pub fn push(&mut self, id: u32) -> &str {
        self.text.clear();
        if !self.tokenizer.is_hidden(id) {
            self.pending.extend_from_slice(self.tokenizer.piece(id));
            self.take_complete();
        }
        &self.text
    }

    /// What is left at the end of the stream: nothing, or U+FFFD for a character that was never finished.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.pending));
        self.pending.clear();
        &self.text
    }

    fn take_complete(&mut self) {
        let mut bytes = self.pending.as_slice();
        loop {
            match std::str::from_utf8(bytes) {
                Ok(text) => {
                    self.text.push_str(text);
                    self.pending.clear();
                    return;
                }
                Err(error) => {
                    let (valid, rest) = bytes.split_at(error.valid_up_to());
                    self.text.push_str(&String::from_utf8_lossy(valid));
                    match error.error_len() {
                        Some(length) => {
                            self.text.push(char::REPLACEMENT_CHARACTER);
                            bytes = &rest[length..];
                        }
                        None => {
                            self.pending = rest.to_vec();
                            return;
                        }
                    }
                }
            }
        }
    }
}
