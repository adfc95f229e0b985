//! OpenAI's interfaces.

pub(crate) mod chat;
pub(crate) mod completions;
mod messages;
pub(crate) mod models;
pub(crate) mod shapes;
