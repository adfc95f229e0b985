//! Qwen3.5 (2026), text: gated delta layers (Yang et al. 2024, Gated Delta Networks) with a gated full-attention
//! layer in every fourth place, and an MTP head.

use super::blocks::*;
use crate::builder::Builder;
use crate::header::{Header, ModelError};
use crate::network::Network;
use crate::program::*;

pub(super) fn build(header: &Header<'_>) -> Result<Network, ModelError> {
    let sizes = Sizes::read(header)?;
    let mut b = Builder::new(header, sizes.d_model);
    embed(&mut b, sizes.vocab, 1.0)?;
    let rope = rope(&mut b, RopeStyle::Neox, sizes.key_dim, "rope.freq_base", true)?;
    let delta = DeltaSizes::read(header)?;
    for (layer, recurrent) in recurrent_layers(header, &sizes)?.into_iter().enumerate() {
        b.at(Place::Layer(layer));
        residual_block(&mut b, &format!("blk.{layer}.attn_norm.weight"), sizes.eps, |b, x, out| {
            match recurrent {
                true => gated_delta(b, &sizes, &delta, layer, x, out),
                false => gated_attention(b, &sizes, rope, layer, 0, x, out),
            }
        })?;
        feed_forward_block(&mut b, &sizes, layer)?;
    }
    head(&mut b, &sizes, "output_norm.weight", None)?;
    let trunk = b.finish();
    let draft = match sizes.mtp_layers {
        0 => None,
        _ => Some(mtp(header, &sizes)?),
    };
    Ok(sizes.network(header, trunk, draft))
}

fn feed_forward_block(b: &mut Builder<'_>, sizes: &Sizes, layer: usize) -> Result<(), ModelError> {
    residual_block(b, &format!("blk.{layer}.post_attention_norm.weight"), sizes.eps, |b, x, out| {
        feed_forward(b, layer, Activation::Silu, x, out)
    })
}

/// Which trunk layers are recurrent: as listed, or all but each `full_attention_interval`-th.
fn recurrent_layers(header: &Header<'_>, sizes: &Sizes) -> Result<Vec<bool>, ModelError> {
    if let Some(list) = header.flags("attention.recurrent_layers")? {
        return match list.len() >= sizes.layers {
            true => Ok(list[..sizes.layers].to_vec()),
            false => Err(ModelError::Value {
                key: header.key("attention.recurrent_layers"),
                found: format!("{} flags", list.len()),
                expected: format!("{} or more", sizes.layers),
            }),
        };
    }
    let interval = header.size("full_attention_interval")?.unwrap_or(4).max(1);
    Ok((0..sizes.layers).map(|layer| (layer + 1) % interval != 0).collect())
}

/// Sizes of a gated delta layer.
struct DeltaSizes {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    kernel: usize,
}

impl DeltaSizes {
    fn read(header: &Header<'_>) -> Result<Self, ModelError> {
        let (key_heads, value_heads) =
            (header.needed("ssm.group_count")?, header.needed("ssm.time_step_rank")?);
        let inner = header.needed("ssm.inner_size")?;
        let kernel = header.needed("ssm.conv_kernel")?;
        if value_heads % key_heads != 0 || inner % value_heads != 0 || !(2..=8).contains(&kernel) {
            return Err(ModelError::Value {
                key: header.key("ssm.*"),
                found: format!(
                    "{key_heads} key heads, {value_heads} value heads, inner {inner}, kernel {kernel}"
                ),
                expected: "value heads a multiple of key heads, inner a multiple of value heads, kernel 2–8"
                    .into(),
            });
        }
        let key_dim = header.needed("ssm.state_size")?;
        Ok(Self { key_heads, value_heads, key_dim, value_dim: inner / value_heads, kernel })
    }
}

/// out = W_out (norm(delta rule(convolved q, k, v)) · silu(W_z x)).
fn gated_delta(
    b: &mut Builder<'_>,
    sizes: &Sizes,
    s: &DeltaSizes,
    layer: usize,
    x: Cols,
    out: Cols,
) -> Result<(), ModelError> {
    let p = format!("blk.{layer}");
    let (nk, nv) = (s.key_heads * s.key_dim, s.value_heads * s.value_dim);
    let channels = 2 * nk + nv;
    let mixed = b.buffer("mixed", channels);
    let z = b.buffer("z", nv);
    let (alpha, beta) = (b.buffer("alpha", s.value_heads), b.buffer("beta", s.value_heads));
    b.linear(&format!("{p}.attn_qkv"), x, mixed)?;
    b.linear(&format!("{p}.attn_gate"), x, z)?;
    b.linear(&format!("{p}.ssm_alpha"), x, alpha)?;
    b.linear(&format!("{p}.ssm_beta"), x, beta)?;

    let convolved = b.buffer("convolved", channels);
    let weight = b.weight(&format!("{p}.ssm_conv1d.weight"), &[s.kernel, channels], WeightKind::Vector)?;
    let state = b.state(layer, StateKind::Convolution { kernel: s.kernel, channels });
    b.push(Op::Convolve { x: mixed, weight, state, out: convolved });

    let q = convolved.part(0..nk).heads(s.key_heads);
    let k = convolved.part(nk..2 * nk).heads(s.key_heads);
    let v = convolved.part(2 * nk..channels).heads(s.value_heads);
    b.push(Op::UnitNorm { x: q, eps: 1e-6, scale: inverse_root(s.key_dim) });
    b.push(Op::UnitNorm { x: k, eps: 1e-6, scale: 1.0 });
    let a = b.weight(&format!("{p}.ssm_a"), &[s.value_heads], WeightKind::Vector)?;
    let dt = b.weight(&format!("{p}.ssm_dt.bias"), &[s.value_heads], WeightKind::Vector)?;
    let kind = StateKind::Delta { heads: s.value_heads, key_dim: s.key_dim, value_dim: s.value_dim };
    let state = b.state(layer, kind);
    let read = b.buffer("read", nv);
    let heads = read.heads(s.value_heads);
    b.push(Op::Delta { q, k, v, alpha, beta, a, dt, state, out: heads });
    b.head_norm(&format!("{p}.ssm_norm.weight"), heads, sizes.eps, heads)?;
    b.push(Op::Gate { gate: z.row(), activation: Activation::Silu, x: read.row(), out: read.row() });
    b.linear(&format!("{p}.ssm_out"), read, out)
}

/// out = W_o (attend(q, k, v) · sigmoid(gate)); W_q holds, head by head, the query's rows and the gate's.
fn gated_attention(
    b: &mut Builder<'_>,
    sizes: &Sizes,
    rope: RopeId,
    layer: usize,
    first: u32,
    x: Cols,
    out: Cols,
) -> Result<(), ModelError> {
    let p = format!("blk.{layer}");
    let (heads, kv, dim) = (sizes.heads, sizes.kv_heads[layer], sizes.key_dim);
    let both = b.buffer("q, gate", 2 * heads * dim);
    let half = |at| Heads { buffer: both.buffer, at, count: heads, dim, stride: 2 * dim };
    let (q, gate) = (half(0), half(dim));
    let keys_values = b.buffer("k, v", kv * (dim + sizes.value_dim));
    let k = keys_values.part(0..kv * dim);
    let v = keys_values.part(kv * dim..keys_values.width);
    b.linear(&format!("{p}.attn_q"), x, both)?;
    b.linear(&format!("{p}.attn_k"), x, k)?;
    b.linear(&format!("{p}.attn_v"), x, v)?;
    let (k, v) = (k.heads(kv), v.heads(kv));
    b.head_norm(&format!("{p}.attn_q_norm.weight"), q, sizes.eps, q)?;
    b.head_norm(&format!("{p}.attn_k_norm.weight"), k, sizes.eps, k)?;
    b.push(Op::Rope { x: q, rope });
    b.push(Op::Rope { x: k, rope });
    let kind = StateKind::Kv { heads: kv, key_dim: dim, value_dim: sizes.value_dim, window: None };
    let state = b.state(layer, kind);
    let attended = b.buffer("attended", heads * sizes.value_dim);
    let by_head = attended.heads(heads);
    b.push(Op::Attend { q, k, v, out: by_head, state, scale: inverse_root(dim), first });
    b.push(Op::Gate { gate, activation: Activation::Sigmoid, x: by_head, out: by_head });
    b.linear(&format!("{p}.attn_output"), attended, out)
}

/// The MTP head: reads the hidden row h_i (after the output norm) from the residual stream and the token x_{i+1},
/// leaves its own hidden row there for the next draft.
fn mtp(header: &Header<'_>, sizes: &Sizes) -> Result<Program, ModelError> {
    let layer = sizes.layers;
    let p = format!("blk.{layer}");
    let mut b = Builder::new(header, sizes.d_model);
    b.at(Place::Layer(layer));
    let d = sizes.d_model;
    let (embedded, both) = (b.buffer("embedded", d), b.buffer("embedded, hidden", 2 * d));
    let own = format!("{p}.nextn.embed_tokens.weight");
    let table = if b.has(&own) { own.as_str() } else { "token_embd.weight" };
    let table = b.weight(table, &[d, sizes.vocab], WeightKind::Table)?;
    b.push(Op::Embed { table, scale: 1.0, out: embedded });
    b.norm(&format!("{p}.nextn.enorm.weight"), embedded, sizes.eps, both.part(0..d))?;
    b.norm(&format!("{p}.nextn.hnorm.weight"), b.residual(), sizes.eps, both.part(d..2 * d))?;
    let out = b.residual();
    b.linear(&format!("{p}.nextn.eh_proj"), both, out)?;
    let rope = rope(&mut b, RopeStyle::Neox, sizes.key_dim, "rope.freq_base", true)?;
    residual_block(&mut b, &format!("{p}.attn_norm.weight"), sizes.eps, |b, x, out| {
        gated_attention(b, sizes, rope, layer, 1, x, out)
    })?;
    feed_forward_block(&mut b, sizes, layer)?;
    let norm = format!("{p}.nextn.shared_head_norm.weight");
    let norm = if b.has(&norm) { norm.as_str() } else { "output_norm.weight" };
    b.norm(norm, out, sizes.eps, out)?;
    let own = format!("{p}.nextn.shared_head_head.weight");
    let head = [own.as_str(), "output.weight"].into_iter().find(|n| b.has(n)).unwrap_or("token_embd.weight");
    let weight = b.weight(head, &[d, sizes.vocab], WeightKind::Matrix)?;
    b.push(Op::Head { x: out, weight, softcap: None });
    Ok(b.finish())
}
