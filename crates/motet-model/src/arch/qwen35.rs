//! Qwen3.5 (2026), text, dense and with experts: gated delta layers (Yang et al. 2024, Gated Delta Networks) with a gated
//! full-attention layer in every fourth place, and an MTP head.

use super::blocks::*;
use super::draft_head::with_draft_head;
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
                false => GatedAttention { layer, rope, first: 0 }.attend(b, &sizes, x, out),
            }
        })?;
        feed_forward_block(&mut b, &sizes, layer)?;
    }
    head(&mut b, &sizes, "output_norm.weight", None)?;
    let trunk = b.so_far();
    let attention = GatedAttention { layer: sizes.layers, rope, first: 1 };
    let draft = with_draft_head(
        b,
        &sizes,
        |b, x| attention.remember(b, &sizes, x),
        |b| {
            let norm = format!("blk.{}.attn_norm.weight", sizes.layers);
            residual_block(b, &norm, sizes.eps, |b, x, out| attention.attend(b, &sizes, x, out))?;
            feed_forward_block(b, &sizes, sizes.layers)
        },
    )?;
    Ok(sizes.network(header, trunk, draft))
}

/// With experts: the same plan; each layer has experts and one that is shared, with a gate.
pub(super) fn build_moe(header: &Header<'_>) -> Result<Network, ModelError> {
    header.needed("expert_count")?;
    build(header)
}

fn feed_forward_block(b: &mut Builder<'_>, sizes: &Sizes, layer: usize) -> Result<(), ModelError> {
    let p = format!("blk.{layer}");
    let routed = b.has(&format!("{p}.ffn_gate_inp.weight"));
    residual_block(b, &format!("{p}.post_attention_norm.weight"), sizes.eps, |b, x, out| {
        if !routed {
            return feed_forward(b, layer, Activation::Silu, x, out);
        }
        experts(b, layer, &Routing::SOFTMAX, x, out)?;
        let width = b.header.needed("expert_shared_feed_forward_length")?;
        shared_expert(b, layer, width, x, out)
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

/// Full attention of one layer.
struct GatedAttention {
    layer: usize,
    rope: RopeId,
    /// First position that exists.
    first: u32,
}

impl GatedAttention {
    /// out = W_o (attend(q, k, v) · sigmoid(gate)); W_q holds, head by head, the query's rows and the gate's.
    fn attend(&self, b: &mut Builder<'_>, sizes: &Sizes, x: Cols, out: Cols) -> Result<(), ModelError> {
        let p = format!("blk.{}", self.layer);
        let (heads, dim) = (sizes.heads, sizes.key_dim);
        let both = b.buffer("q, gate", 2 * heads * dim);
        let half = |at| Heads { buffer: both.buffer, at, count: heads, dim, stride: 2 * dim };
        let (q, gate) = (half(0), half(dim));
        b.linear(&format!("{p}.attn_q"), x, both)?;
        let [k, v] = self.keys_values(b, sizes, x)?;
        b.head_norm(&format!("{p}.attn_q_norm.weight"), q, sizes.eps, q)?;
        b.push(Op::Rope { x: q, rope: self.rope });
        self.turn_keys(b, sizes, k)?;
        let state = self.state(b, sizes);
        let attended = b.buffer("attended", heads * sizes.value_dim);
        let by_head = attended.heads(heads);
        let (scale, first) = (inverse_root(dim), self.first);
        b.push(Op::Attend { q, k, v, out: by_head, state, scale, first });
        b.push(Op::Gate { gate, activation: Activation::Sigmoid, x: by_head, out: by_head });
        b.linear(&format!("{p}.attn_output"), attended, out)
    }

    /// Keys and values of x for rows to come.
    fn remember(&self, b: &mut Builder<'_>, sizes: &Sizes, x: Cols) -> Result<(), ModelError> {
        let [k, v] = self.keys_values(b, sizes, x)?;
        self.turn_keys(b, sizes, k)?;
        let state = self.state(b, sizes);
        b.push(Op::Remember { k, v, state });
        Ok(())
    }

    fn keys_values(&self, b: &mut Builder<'_>, sizes: &Sizes, x: Cols) -> Result<[Heads; 2], ModelError> {
        let (kv, dim) = (sizes.kv_heads[self.layer], sizes.key_dim);
        let keys_values = b.buffer("k, v", kv * (dim + sizes.value_dim));
        let k = keys_values.part(0..kv * dim);
        let v = keys_values.part(kv * dim..keys_values.width);
        b.linear(&format!("blk.{}.attn_k", self.layer), x, k)?;
        b.linear(&format!("blk.{}.attn_v", self.layer), x, v)?;
        Ok([k.heads(kv), v.heads(kv)])
    }

    fn turn_keys(&self, b: &mut Builder<'_>, sizes: &Sizes, k: Heads) -> Result<(), ModelError> {
        b.head_norm(&format!("blk.{}.attn_k_norm.weight", self.layer), k, sizes.eps, k)?;
        b.push(Op::Rope { x: k, rope: self.rope });
        Ok(())
    }

    fn state(&self, b: &mut Builder<'_>, sizes: &Sizes) -> StateId {
        let (key_dim, value_dim) = (sizes.key_dim, sizes.value_dim);
        let heads = sizes.kv_heads[self.layer];
        b.state(self.layer, StateKind::Kv { heads, key_dim, value_dim, window: None })
    }
}
