//! A vocabulary as a model file states it, before a tokenizer is built from it.

use motet_gguf::{Metadata, Strings};

use crate::TextError;

/// What a GGUF header says of the tokenizer (keys `tokenizer.ggml.*`), unchecked and borrowed.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary<'a> {
    /// `model`: the algorithm, "gpt2" (byte-level BPE), "llama" (SentencePiece) or "bert" (WordPiece).
    pub model: &'a str,
    /// `pre`: how BPE cuts text into words.
    pub pre: Option<&'a str>,
    /// `tokens`: the text of each token, as the algorithm writes it.
    pub tokens: Vec<&'a str>,
    /// `token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte; empty: all normal.
    pub types: Vec<i32>,
    /// `scores`, SentencePiece only; empty: all zero.
    pub scores: Vec<f32>,
    /// `merges`, BPE only: "left right", best first.
    pub merges: Vec<&'a str>,
    /// `bos_token_id`; absent: none, but for SentencePiece, whose unknown, bos and eos are 0, 1 and 2.
    pub bos: Option<u32>,
    /// `eos_token_id`.
    pub eos: Option<u32>,
    /// `eot_token_id`: end of a turn.
    pub eot: Option<u32>,
    /// `eom_token_id`: end of a message.
    pub eom: Option<u32>,
    /// `unknown_token_id`.
    pub unknown: Option<u32>,
    /// `cls_token_id`, WordPiece only: begins a text where there is no bos; absent: 101, as BERT numbers it.
    pub cls: Option<u32>,
    /// `seperator_token_id` (so spelt): ends a text in WordPiece; absent: 102.
    pub separator: Option<u32>,
    /// `add_bos_token`; absent: what is usual for the algorithm.
    pub add_bos: Option<bool>,
    /// `add_eos_token`; absent: no.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`, SentencePiece only; absent: yes.
    pub add_space_prefix: Option<bool>,
    /// `add_sep_token`, WordPiece only; absent: yes.
    pub add_sep: Option<bool>,
    /// `normalizer.lowercase`, WordPiece only: text is put into lower case first; absent: yes.
    pub lower_case: Option<bool>,
    /// `normalizer.strip_accents`, WordPiece only; absent: as `lower_case`.
    pub strip_accents: Option<bool>,
}

/// Token types of GGUF.
pub(crate) mod kind {
    pub(crate) const NORMAL: i32 = 1;
    pub(crate) const UNKNOWN: i32 = 2;
    pub(crate) const CONTROL: i32 = 3;
    pub(crate) const USER_DEFINED: i32 = 4;
    pub(crate) const BYTE: i32 = 6;
}

impl<'a> Vocabulary<'a> {
    /// Reads the header of a model file. Nothing is copied but the lists of borrowed texts and numbers.
    ///
    /// # Errors
    /// A key that is missing or of another type.
    pub fn from_gguf(metadata: &'a Metadata) -> Result<Vocabulary<'a>, TextError> {
        let strings = |key| metadata.optional::<Strings<'a>>(key);
        let id = |key| metadata.optional::<u32>(key);
        let flag = |key| metadata.optional::<bool>(key);
        Ok(Vocabulary {
            model: metadata.required("tokenizer.ggml.model")?,
            pre: metadata.optional("tokenizer.ggml.pre")?,
            tokens: metadata.required::<Strings<'a>>("tokenizer.ggml.tokens")?.iter().collect(),
            types: metadata.optional("tokenizer.ggml.token_type")?.unwrap_or_default(),
            scores: metadata.optional("tokenizer.ggml.scores")?.unwrap_or_default(),
            merges: strings("tokenizer.ggml.merges")?
                .map(|merges| merges.iter().collect())
                .unwrap_or_default(),
            bos: id("tokenizer.ggml.bos_token_id")?,
            eos: id("tokenizer.ggml.eos_token_id")?,
            eot: id("tokenizer.ggml.eot_token_id")?,
            eom: id("tokenizer.ggml.eom_token_id")?,
            unknown: id("tokenizer.ggml.unknown_token_id")?,
            cls: id("tokenizer.ggml.cls_token_id")?,
            separator: id("tokenizer.ggml.seperator_token_id")?,
            add_bos: flag("tokenizer.ggml.add_bos_token")?,
            add_eos: flag("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: flag("tokenizer.ggml.add_space_prefix")?,
            add_sep: flag("tokenizer.ggml.add_sep_token")?,
            lower_case: flag("tokenizer.ggml.normalizer.lowercase")?,
            strip_accents: flag("tokenizer.ggml.normalizer.strip_accents")?,
        })
    }

    /// Checks that the lists have one entry per token and the ids lie inside, and fills what may be left out.
    pub(crate) fn checked(mut self) -> Result<Vocabulary<'a>, TextError> {
        let tokens = self.tokens.len();
        let bytes = self.tokens.iter().map(|token| token.len()).sum();
        if tokens.max(bytes) >= 1 << 31 {
            return Err(TextError::TooLarge { bytes, tokens });
        }
        if self.model == "llama" && tokens > 2 {
            // What SentencePiece numbers them, where the file does not say.
            self.unknown.get_or_insert(0);
            self.bos.get_or_insert(1);
            self.eos.get_or_insert(2);
        }
        if self.model == "bert" && tokens > 102 {
            self.unknown.get_or_insert(100);
            self.bos = self.bos.or(self.cls).or(Some(101));
            self.separator.get_or_insert(102);
        }
        if self.types.is_empty() {
            self.types = vec![kind::NORMAL; tokens];
        }
        if self.scores.is_empty() {
            self.scores = vec![0.0; tokens];
        }
        for (what, found) in [("types", self.types.len()), ("scores", self.scores.len())] {
            if found != tokens {
                return Err(TextError::Length { what, tokens, found });
            }
        }
        let ids = [
            ("bos_token_id", self.bos),
            ("eos_token_id", self.eos),
            ("eot_token_id", self.eot),
            ("eom_token_id", self.eom),
            ("unknown_token_id", self.unknown),
            ("seperator_token_id", self.separator),
        ];
        for (what, id) in ids {
            if let Some(id) = id.filter(|&id| id as usize >= tokens) {
                return Err(TextError::IdOutOfRange { what, id, tokens });
            }
        }
        Ok(self)
    }
}
