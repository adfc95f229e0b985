//! Llama (Touvron et al. 2023) and what follows its plan: Mistral, SmolLM, Mixtral (with experts).

use super::blocks::*;
use crate::builder::Builder;
use crate::header::{Header, ModelError};
use crate::network::Network;
use crate::program::*;

pub(super) fn build(header: &Header<'_>) -> Result<Network, ModelError> {
    build_with(header, RopeStyle::Norm, false)
}

/// A pre-norm transformer with grouped-query attention and a gated feed-forward block or experts. What differs in
/// its relatives is how rotations pair columns and whether queries and keys are normed.
pub(super) fn build_with(
    header: &Header<'_>,
    style: RopeStyle,
    qk_norm: bool,
) -> Result<Network, ModelError> {
    let sizes = Sizes::read(header)?;
    let mut b = Builder::new(header, sizes.d_model);
    embed(&mut b, sizes.vocab, 1.0)?;
    let rope = rope(&mut b, style, sizes.key_dim, "rope.freq_base", true)?;
    for layer in 0..sizes.layers {
        b.at(Place::Layer(layer));
        let p = format!("blk.{layer}");
        let scale = inverse_root(sizes.key_dim);
        let a = Attention { layer, rope, window: None, scale, qk_norm, first: 0 };
        residual_block(&mut b, &format!("{p}.attn_norm.weight"), sizes.eps, |b, x, out| {
            attention(b, &sizes, &a, x, out)
        })?;
        let routed = b.has(&format!("{p}.ffn_gate_inp.weight"));
        residual_block(&mut b, &format!("{p}.ffn_norm.weight"), sizes.eps, |b, x, out| match routed {
            true => experts(b, layer, &Routing::SOFTMAX, x, out),
            false => feed_forward(b, layer, Activation::Silu, x, out),
        })?;
    }
    head(&mut b, &sizes, "output_norm.weight", None)?;
    let trunk = b.finish();
    Ok(sizes.network(header, trunk, None))
}
