//! What can go wrong on the way from text to tokens and back.

use motet_gguf::GgufError;

/// An error of this crate. Each says what was expected, what was found and, where there is something, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The model file has no usable value under a key the tokenizer needs.
    #[error(transparent)]
    Metadata(#[from] GgufError),

    /// A key without which text cannot be turned into tokens.
    #[error("the model file has no '{key}', which its tokenizer needs; convert the model again")]
    Missing {
        /// The key.
        key: &'static str,
    },

    /// `tokenizer.ggml.model` names an algorithm that is not implemented.
    #[error(
        "tokenizer model '{found}' is not supported; supported are 'gpt2' (byte-level BPE), 'llama' (SentencePiece) and 'bert' (WordPiece)"
    )]
    UnsupportedModel {
        /// The name in the file.
        found: String,
    },

    /// `tokenizer.ggml.pre` names a pre-tokenizer that is not implemented.
    #[error("pre-tokenizer '{found}' is not supported; supported are {}", .supported.join(", "))]
    UnsupportedPreTokenizer {
        /// The name in the file.
        found: String,
        /// Every name that would have done.
        supported: Vec<&'static str>,
    },

    /// A list of the vocabulary has not one entry per token.
    #[error("the vocabulary has {tokens} tokens, but {found} {what}; the file is damaged")]
    Length {
        /// Which list.
        what: &'static str,
        /// Number of tokens.
        tokens: usize,
        /// Number of entries found.
        found: usize,
    },

    /// A token id of the header lies outside the vocabulary.
    #[error("{what} is token {id}, but the vocabulary has {tokens} tokens")]
    IdOutOfRange {
        /// Which special token.
        what: &'static str,
        /// The id in the file.
        id: u32,
        /// Number of tokens.
        tokens: usize,
    },

    /// A merge rule that joins what the vocabulary does not hold.
    #[error("merge rule {index} ('{rule}') needs a token '{missing}' that the vocabulary does not have")]
    Merge {
        /// Position in the list of merges.
        index: usize,
        /// The rule as the file has it.
        rule: String,
        /// The part, or the joined text, that is no token.
        missing: String,
    },

    /// A SentencePiece score that cannot be ordered.
    #[error("token {id} has the score NaN; every score must be a number")]
    Score {
        /// The token.
        id: usize,
    },

    /// A vocabulary beyond what ids and offsets of 32 bits can address.
    #[error("the vocabulary holds {bytes} bytes in {tokens} tokens; at most 2^31 of either are supported")]
    TooLarge {
        /// Bytes of all tokens.
        bytes: usize,
        /// Number of tokens.
        tokens: usize,
    },

    /// The chat template does not parse.
    #[error("the model's chat template has a syntax error: {message}")]
    TemplateSyntax {
        /// The template engine's message, with the line.
        message: String,
    },

    /// The chat template refused the conversation (`raise_exception`) or failed on it.
    #[error("the model's chat template refuses this conversation: {message}")]
    Template {
        /// The template's own message where it raised one, else the template engine's.
        message: String,
    },
}
