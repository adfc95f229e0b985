//! GLM-4.5 (Zeng et al. 2025): grouped-query attention with biases, dense layers in front, then experts chosen by sigmoids
//! with a selection bias (DeepSeek-V3, section 2.1.2) beside shared ones, and an MTP head.

use super::blocks::*;
use super::draft_head::with_draft_head;
use crate::builder::Builder;
use crate::header::{Header, ModelError};
use crate::network::Network;
use crate::program::*;

pub(super) fn build(header: &Header<'_>) -> Result<Network, ModelError> {
    let sizes = Sizes::read(header)?;
    let routed = Experts::read(header)?;
    let mut b = Builder::new(header, sizes.d_model);
    embed(&mut b, sizes.vocab, 1.0)?;
    let rope = rope(&mut b, RopeStyle::Neox, sizes.key_dim, "rope.freq_base", true)?;
    let attention_of = |b: &Builder<'_>, layer, first| Attention {
        layer,
        rope,
        window: None,
        scale: inverse_root(sizes.key_dim),
        qk_norm: b.has(&format!("blk.{layer}.attn_q_norm.weight")),
        first,
    };
    let block = |b: &mut Builder<'_>, a: &Attention| {
        let p = format!("blk.{}", a.layer);
        residual_block(b, &format!("{p}.attn_norm.weight"), sizes.eps, |b, x, out| {
            attention(b, &sizes, a, x, out)
        })?;
        residual_block(b, &format!("{p}.post_attention_norm.weight"), sizes.eps, |b, x, out| {
            match a.layer < routed.dense_layers {
                true => feed_forward(b, a.layer, Activation::Silu, x, out),
                false => routed.run(b, a.layer, x, out),
            }
        })
    };
    for layer in 0..sizes.layers {
        b.at(Place::Layer(layer));
        let a = attention_of(&b, layer, 0);
        block(&mut b, &a)?;
    }
    head(&mut b, &sizes, "output_norm.weight", None)?;
    let trunk = b.so_far();
    let a = attention_of(&b, sizes.layers, 1);
    let draft = with_draft_head(b, &sizes, |b, x| remember(b, &sizes, &a, x), |b| block(b, &a))?;
    Ok(sizes.network(header, trunk, draft))
}

/// The layers with experts.
struct Experts {
    /// Layers before the first with experts.
    dense_layers: usize,
    routing: Routing,
    /// Width of the shared experts together.
    shared_width: usize,
}

impl Experts {
    fn read(header: &Header<'_>) -> Result<Self, ModelError> {
        let gating = match header.size("expert_gating_func")? {
            Some(1) => Gating::Softmax,
            None | Some(2) => Gating::Sigmoid,
            Some(other) => {
                let (key, found) = (header.key("expert_gating_func"), other.to_string());
                return Err(ModelError::Value { key, found, expected: "1 (soft-max) or 2 (sigmoid)".into() });
            }
        };
        if let Some(groups @ 2..) = header.size("expert_group_count")? {
            let (key, found) = (header.key("expert_group_count"), groups.to_string());
            return Err(ModelError::Value { key, found, expected: "1: experts are chosen among all".into() });
        }
        let shared = header.size("expert_shared_count")?.unwrap_or(0);
        let routing = Routing {
            gating,
            normalise: header.flag("expert_weights_norm")?.unwrap_or(true),
            scale: header.number("expert_weights_scale")?.unwrap_or(1.0),
        };
        Ok(Self {
            dense_layers: header.size("leading_dense_block_count")?.unwrap_or(0),
            routing,
            shared_width: shared * header.needed("expert_feed_forward_length")?,
        })
    }

    fn run(&self, b: &mut Builder<'_>, layer: usize, x: Cols, out: Cols) -> Result<(), ModelError> {
        experts(b, layer, &self.routing, x, out)?;
        match self.shared_width {
            0 => Ok(()),
            width => shared_expert(b, layer, width, x, out),
        }
    }
}
