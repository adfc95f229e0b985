//! Text to tokens and back: tokenizers, chat templates, stop strings, reasoning.
//!
//! A request passes this crate twice. On the way in, a [`ChatTemplate`] turns messages into one prompt and a
//! [`Tokenizer`] turns the prompt into ids. On the way out, a [`Detokenizer`] turns ids into whole UTF-8 text,
//! [`Stops`] cuts it at a stop string, and a [`ReasoningSplit`] tells thinking from answer. The three streams give
//! the same text however the tokens are grouped.
//!
//! Nothing here knows of networks, sessions or HTTP, and nothing here guesses: a vocabulary or pre-tokenizer that is
//! not supported is refused by name.

mod bpe;
mod detokenizer;
mod ends;
mod error;
mod grammar;
mod json;
mod merge;
mod pieces;
mod pretokenize;
mod reasoning;
mod sentencepiece;
mod special;
mod stops;
mod table;
mod template;
mod tokenizer;
mod vocabulary;
mod watch;
mod wordpiece;

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use grammar::{Begins, Grammar, Marker};
pub use pretokenize::pre_tokenizers;
pub use reasoning::{Parts, ReasoningSplit};
pub use stops::{Stops, UntilStop};
pub use template::{ChatTemplate, Conversation, Rendered};
pub use tokenizer::{Special, Tokenizer};
pub use vocabulary::Vocabulary;
pub use watch::{Place, Watch};
