//! Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's plan with biases on q, k, v and half-split rotations.

use super::llama;
use crate::header::{Header, ModelError};
use crate::network::Network;
use crate::program::RopeStyle;

pub(super) fn build(header: &Header<'_>) -> Result<Network, ModelError> {
    llama::build_with(header, RopeStyle::Neox, false)
}
