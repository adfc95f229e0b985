//! Why a form can't be kept to.

/// Why there is no constraint for a grammar or a schema.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormError {
    /// A keyword of JSON Schema that can't be enforced.
    #[error("the JSON schema uses '{keyword}' at {place}, which can't be enforced; leave it out")]
    Keyword {
        /// The keyword.
        keyword: String,
        /// Where it stands, as a JSON pointer.
        place: String,
    },
    /// A schema that is none, or that nothing fits.
    #[error("the JSON schema can't be used: {what}")]
    Schema {
        /// What is wrong, and where.
        what: String,
    },
    /// A grammar or a regular expression that is none.
    #[error("the grammar can't be used: {what}")]
    Grammar {
        /// What is wrong.
        what: String,
    },
    /// More than is taken.
    #[error("{what}: {found}, at most {most} can be had")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// What was found.
        found: usize,
        /// What is taken.
        most: usize,
    },
    /// The vocabulary can't be laid out for matching, or there is no memory or thread for it.
    #[error("answers can't be constrained with this model: {what}")]
    Vocabulary {
        /// Why.
        what: String,
    },
}
