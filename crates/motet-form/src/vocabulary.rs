//! The model's tokens as llguidance wants them: a trie of their bytes, and slices of it that are looked at as one.
//!
//! Only control tokens and unknown ones are marked as special. User-defined tokens are text: in some vocabularies runs
//! of spaces are of that kind, in others the markers of tool calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::ParserLimits;
use llguidance::earley::SlicedBiasComputer;
use motet_text::Tokenizer;
use toktrie::{INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};

use crate::FormError;

/// The longest token that has a place in the trie.
const LONGEST: usize = 1000;

/// The trie, and how text becomes tokens.
struct Vocabulary {
    trie: TokTrie,
    tokenizer: Arc<Tokenizer>,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        let tokens =
            self.trie.tokenize_with_greedy_fallback(bytes, |text| self.tokenizer.encode_onwards(text));
        // What is forced must be these very bytes.
        match self.trie.decode_raw(&tokens) == bytes {
            true => tokens,
            false => self.trie.greedy_tokenize(bytes),
        }
    }
}

/// What grammars are compiled with: once for a model.
///
/// # Errors
/// A vocabulary that is too large for the trie.
pub(crate) fn factory(tokenizer: &Arc<Tokenizer>, limits: &ParserLimits) -> Result<ParserFactory, FormError> {
    let build = AssertUnwindSafe(|| {
        let env: TokEnv = Arc::new(Vocabulary { trie: trie(tokenizer), tokenizer: tokenizer.clone() });
        let slices = SlicedBiasComputer::json_slices();
        ParserFactory::new(&env, InferenceCapabilities::default(), &slices).map_err(|e| e.to_string())
    });
    let built = catch_unwind(build).unwrap_or_else(|_| Err("its vocabulary is too large".to_owned()));
    let mut factory = built.map_err(|what| FormError::Vocabulary { what })?;
    *factory.limits_mut() = limits.clone();
    factory.quiet();
    Ok(factory)
}

fn trie(tokenizer: &Tokenizer) -> TokTrie {
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab_len() as u32).map(|id| word(tokenizer, id)).collect();
    let ends = tokenizer.ends();
    let info = TokRxInfo::new(words.len() as u32, ends.first().copied().unwrap_or(INVALID_TOKEN));
    let trie = TokTrie::from(&info, &words);
    if ends.is_empty() { trie } else { trie.with_eos_tokens(ends) }
}

/// The bytes by which the trie knows a token; none if it can't stand in any answer.
fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let piece = tokenizer.piece(id);
    let special = tokenizer.is_control(id) || tokenizer.is_hidden(id);
    if piece.len() > LONGEST || (!special && piece.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER)) {
        return Vec::new();
    }
    let marker = special.then_some(TokTrie::SPECIAL_TOKEN_MARKER);
    marker.into_iter().chain(piece.iter().copied()).collect()
}
