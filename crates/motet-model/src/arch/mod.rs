//! Architectures: one file of declarations each, to be held against the paper.
//!
//! A file here says what to run and never runs it.

mod blocks;
mod draft_head;
mod gemma3;
mod glm4moe;
mod llama;
mod qwen2;
mod qwen3;
mod qwen35;

use crate::header::{Header, ModelError};
use crate::network::Network;

/// Builds a network from its header.
type Build = fn(&Header<'_>) -> Result<Network, ModelError>;

/// The architectures that motet runs, by the name that GGUF gives them.
const ARCHITECTURES: [(&str, Build); 8] = [
    ("llama", llama::build),
    ("qwen2", qwen2::build),
    ("qwen3", qwen3::build),
    ("qwen3moe", qwen3::build_moe),
    ("gemma3", gemma3::build),
    ("qwen35", qwen35::build),
    ("qwen35moe", qwen35::build_moe),
    ("glm4moe", glm4moe::build),
];

/// Names of the supported architectures.
pub fn supported() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|(name, _)| *name)
}

/// The network of a header.
pub(crate) fn build(header: &Header<'_>) -> Result<Network, ModelError> {
    let found = header.architecture();
    match ARCHITECTURES.iter().find(|(name, _)| *name == found) {
        Some((_, build)) => build(header),
        None => Err(ModelError::Architecture {
            found: found.into(),
            supported: supported().collect::<Vec<_>>().join(", "),
        }),
    }
}
