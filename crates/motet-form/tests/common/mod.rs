//! Vocabularies of real models, and answers that are written at random within a form.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::path::Path;
use std::sync::Arc;

use motet_engine::{Advance, Constraint};
use motet_form::{FormLimits, Forms};
use motet_gguf::ModelFile;
use motet_text::{Begins, Grammar, Tokenizer};
use serde_json::Value;

/// A vocabulary that `motet-text` has as a fixture: "smollm2" or "gemma3".
pub(crate) fn tokenizer(name: &str) -> Arc<Tokenizer> {
    let path = format!("../motet-text/tests/fixtures/tokenizer/{name}.gguf.xz");
    let compressed = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect("a fixture");
    let mut bytes = Vec::new();
    lzma_rs::xz_decompress(&mut compressed.as_slice(), &mut bytes).expect("a whole xz file");
    let file = ModelFile::from_vec(bytes).expect("a whole model file");
    Arc::new(Tokenizer::from_gguf(file.metadata()).expect("a supported vocabulary"))
}

pub(crate) fn forms(tokenizer: &Arc<Tokenizer>) -> Forms {
    Forms::new(tokenizer.clone(), FormLimits::default())
}

/// The whole answer is a document of a schema.
pub(crate) fn json(schema: &Value) -> Grammar {
    Grammar { lark: format!("start: %json {schema}"), begins: Begins::AtOnce }
}

/// xorshift64*
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }
}

pub(crate) fn mask(form: &mut dyn Constraint, vocab: usize) -> Vec<u64> {
    let mut allowed = vec![0; vocab.div_ceil(64)];
    form.mask(&mut allowed).expect("something may come next");
    allowed
}

pub(crate) fn tokens(mask: &[u64]) -> Vec<u32> {
    let bits = |(word, bits): (usize, &u64)| {
        let bits = *bits;
        (0..64).filter(move |bit| bits >> bit & 1 == 1).map(move |bit| (word * 64 + bit) as u32)
    };
    mask.iter().enumerate().flat_map(bits).collect()
}

pub(crate) fn may(mask: &[u64], token: u32) -> bool {
    mask[token as usize / 64] >> (token % 64) & 1 == 1
}

/// Chooses of the tokens that may come, at random, at most `most`; where the answer may end it does so soon. The tokens
/// and whether the answer is complete.
pub(crate) fn walk(
    form: &mut dyn Constraint,
    tokenizer: &Tokenizer,
    rng: &mut Rng,
    most: usize,
) -> (Vec<u32>, bool) {
    let mut said = Vec::new();
    while said.len() < most {
        let may = tokens(&mask(form, tokenizer.vocab_len()));
        let ends = may.iter().any(|&token| tokenizer.is_end(token));
        if ends && (rng.below(4) == 0 || may.iter().all(|&token| tokenizer.is_end(token))) {
            return (said, true);
        }
        let token = loop {
            // Short tokens close what long ones open for ever.
            let token = may[rng.below(may.len())];
            if !tokenizer.is_end(token) && (tokenizer.piece(token).len() <= 2 || rng.below(3) == 0) {
                break token;
            }
        };
        said.push(token);
        match form.advance(token) {
            Advance::GoesOn => {}
            Advance::Ends => return (said, true),
            Advance::Refused => panic!("token {token} may come and is refused"),
        }
    }
    (said, false)
}

pub(crate) fn text(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|&token| tokenizer.piece(token)).copied().collect();
    String::from_utf8(bytes).expect("text in UTF-8")
}
