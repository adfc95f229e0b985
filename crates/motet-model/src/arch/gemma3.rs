//! Gemma 3 (2025), text: norms before and after each block, sliding-window layers with their own rotation base.

use super::blocks::*;
use crate::builder::Builder;
use crate::header::{Header, ModelError};
use crate::network::Network;
use crate::program::*;

pub(super) fn build(header: &Header<'_>) -> Result<Network, ModelError> {
    let sizes = Sizes::read(header)?;
    let mut b = Builder::new(header, sizes.d_model);
    embed(&mut b, sizes.vocab, (sizes.d_model as f32).sqrt())?;
    let global = rope(&mut b, RopeStyle::Neox, sizes.key_dim, "rope.freq_base", true)?;
    let local = rope(&mut b, RopeStyle::Neox, sizes.key_dim, "rope.freq_base_swa", false)?;
    let window = header.needed("attention.sliding_window")? as u32;
    let sliding = sliding_layers(header, sizes.layers)?;
    // The 27B model alone scales by the width of a head's share of the row.
    let scaled_by = if sizes.layers == 62 { sizes.d_model / sizes.heads } else { sizes.key_dim };
    for (layer, &slides) in sliding.iter().enumerate() {
        b.at(Place::Layer(layer));
        let p = format!("blk.{layer}");
        let (rope, window) = if slides { (local, Some(window)) } else { (global, None) };
        let a = Attention { layer, rope, window, scale: inverse_root(scaled_by), qk_norm: true, first: 0 };
        residual_block(&mut b, &format!("{p}.attn_norm.weight"), sizes.eps, |b, x, out| {
            attention(b, &sizes, &a, x, out)?;
            b.norm(&format!("{p}.post_attention_norm.weight"), out, sizes.eps, out)
        })?;
        residual_block(&mut b, &format!("{p}.ffn_norm.weight"), sizes.eps, |b, x, out| {
            feed_forward(b, layer, Activation::GeluTanh, x, out)?;
            b.norm(&format!("{p}.post_ffw_norm.weight"), out, sizes.eps, out)
        })?;
    }
    let softcap = header.number("final_logit_softcapping")?.filter(|&cap| cap > 0.0);
    head(&mut b, &sizes, "output_norm.weight", softcap)?;
    let trunk = b.finish();
    Ok(sizes.network(header, trunk, None))
}

/// Which layers slide: all but the last of each group of `sliding_window_pattern` (default 6), or as listed.
fn sliding_layers(header: &Header<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let key = "attention.sliding_window_pattern";
    if let Some(list) = header.flags(key).ok().flatten() {
        return match list.len() == layers {
            true => Ok(list),
            false => Err(ModelError::Value {
                key: header.key(key),
                found: format!("{} flags", list.len()),
                expected: format!("{layers}"),
            }),
        };
    }
    let group = header.size(key)?.unwrap_or(6);
    Ok((0..layers).map(|layer| group != 0 && layer % group < group - 1).collect())
}
