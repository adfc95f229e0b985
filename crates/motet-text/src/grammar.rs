//! The form that an answer must have, as text: a grammar, and from where in the answer it counts.
//!
//! This is what a dialect or a response format says and what a matcher is built from. Nothing here knows a matcher.

/// A grammar for an answer or a part of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grammar {
    /// The grammar in Lark, as llguidance reads it: `start` is the first rule, `%json {…}` stands for a JSON schema,
    /// `<[123]>` for the token with that id.
    pub lark: String,
    /// From where on it counts.
    pub begins: Begins,
}

/// From where in an answer a grammar counts.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Begins {
    /// From the first token on, to the end of the answer.
    AtOnce,
    /// From behind the thinking on, to the end of the answer. Where the prompt did not open the thinking and the
    /// answer's first word is not `open`, from the first token on.
    AfterThinking {
        /// What opens the thinking.
        open: Marker,
        /// What closes it.
        close: Marker,
        /// Whether the prompt ends inside it.
        opened: bool,
    },
    /// Behind each of these markers, which are no part of the grammar; where the grammar is complete, everything may
    /// come again until the next marker.
    Behind(Vec<Marker>),
}

/// A text that means something in an answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Marker {
    /// How it is written.
    pub text: String,
    /// The token that is this marker; the same characters from other tokens are text then. `None`: any tokens that
    /// spell it.
    pub token: Option<u32>,
}
