//! Qwen3 (2025), dense and with experts: Llama's plan with half-split rotations and normed queries and keys.

use super::llama;
use crate::header::{Header, ModelError};
use crate::network::Network;
use crate::program::RopeStyle;

pub(super) fn build(header: &Header<'_>) -> Result<Network, ModelError> {
    llama::build_with(header, RopeStyle::Neox, true)
}

/// With experts: the same plan; a layer has experts where the file holds a router for it.
pub(super) fn build_moe(header: &Header<'_>) -> Result<Network, ModelError> {
    header.needed("expert_count")?;
    build(header)
}
