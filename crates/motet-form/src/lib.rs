//! Forms for answers: JSON schemas, regular expressions and grammars, behind the engine's [`Constraint`].
//!
//! `vocabulary` lays the model's tokens out for llguidance, `schema` says what of a JSON schema can be enforced, `forms`
//! compiles grammars and remembers them, `markers` notices where in an answer a grammar begins, and `form` is the
//! constraint itself: one for each choice of a request.
//!
//! Nothing here knows HTTP, dialects or sessions. Compiling happens on the caller's thread, which must not be the
//! engine's; a form that fails later says so and never panics.
//!
//! [`Constraint`]: motet_engine::Constraint

mod error;
mod form;
mod forms;
mod markers;
mod memory;
mod schema;
mod vocabulary;

pub use error::FormError;
pub use forms::{FormLimits, Forms};
pub use schema::{Fitted, fit};
