//! What architectures have in common: sizes, position encodings, attention, feed-forward, embedding and head.
//!
//! Blocks read a normed row and leave their result in a buffer; adding it to the residual stream is left to the
//! architecture.

use crate::builder::Builder;
use crate::header::{Header, ModelError};
use crate::network::Network;
use crate::program::*;

/// Sizes that every architecture has.
pub(super) struct Sizes {
    pub(super) vocab: usize,
    pub(super) d_model: usize,
    /// Trunk layers, without MTP layers.
    pub(super) layers: usize,
    /// MTP layers behind the trunk.
    pub(super) mtp_layers: usize,
    pub(super) context: usize,
    pub(super) heads: usize,
    /// By layer, MTP layers included.
    pub(super) kv_heads: Vec<usize>,
    pub(super) key_dim: usize,
    pub(super) value_dim: usize,
    pub(super) eps: f32,
}

/// Greatest number of layers accepted: a header can't make motet build endless programs.
const MAX_LAYERS: usize = 1024;

impl Sizes {
    pub(super) fn read(header: &Header<'_>) -> Result<Self, ModelError> {
        let embedding = "token_embd.weight";
        let table =
            header.file().tensor(embedding).ok_or_else(|| ModelError::MissingTensor(embedding.into()))?;
        let vocab = table.shape.get(1).copied().unwrap_or(0) as usize;
        let d_model = header.needed("embedding_length")?;
        let blocks = header.needed("block_count")?;
        let mtp_layers = header.size("nextn_predict_layers")?.unwrap_or(0);
        if blocks > MAX_LAYERS || mtp_layers >= blocks {
            return Err(ModelError::Value {
                key: header.key("block_count"),
                found: blocks.to_string(),
                expected: format!("at most {MAX_LAYERS} and more than the {mtp_layers} MTP layers"),
            });
        }
        let heads = header.needed("attention.head_count")?;
        let kv_heads = match header.size("attention.head_count_kv") {
            Ok(None) => vec![heads; blocks],
            _ => header.by_layer("attention.head_count_kv", blocks)?,
        };
        if let Some(bad) = kv_heads.iter().find(|&&kv| kv == 0 || heads % kv != 0) {
            return Err(ModelError::Value {
                key: header.key("attention.head_count_kv"),
                found: bad.to_string(),
                expected: format!("a divisor of the {heads} heads"),
            });
        }
        let key_dim = match header.size("attention.key_length")? {
            Some(dim) => dim,
            None => d_model / heads,
        };
        let value_dim = header.size("attention.value_length")?.unwrap_or(key_dim);
        if key_dim == 0 || key_dim > 1024 || value_dim == 0 || value_dim > 1024 {
            return Err(ModelError::Value {
                key: header.key("attention.key_length"),
                found: format!("{key_dim} (values {value_dim})"),
                expected: "1 to 1024".into(),
            });
        }
        let eps_key = "attention.layer_norm_rms_epsilon";
        Ok(Self {
            vocab,
            d_model,
            layers: blocks - mtp_layers,
            mtp_layers,
            context: header.needed("context_length")?,
            heads,
            kv_heads,
            key_dim,
            value_dim,
            eps: header.number(eps_key)?.ok_or_else(|| ModelError::MissingKey(header.key(eps_key)))?,
        })
    }

    /// The finished network.
    pub(super) fn network(self, header: &Header<'_>, trunk: Program, draft: Option<Program>) -> Network {
        Network {
            architecture: header.architecture().into(),
            name: header.file().metadata().optional::<&str>("general.name").ok().flatten().map(Into::into),
            vocab: self.vocab,
            d_model: self.d_model,
            layers: self.layers,
            context: self.context,
            trunk,
            draft,
        }
    }
}

/// The header's position encoding with the base that `base_key` names. `scaled` tells whether the stretching that
/// the header asks for applies.
pub(super) fn rope(
    b: &mut Builder<'_>,
    style: RopeStyle,
    head_dim: usize,
    base_key: &str,
    scaled: bool,
) -> Result<RopeId, ModelError> {
    let h = b.header;
    let base = h.number(base_key)?.unwrap_or(10_000.0);
    let rot = h.size("rope.dimension_count")?.unwrap_or(head_dim);
    if rot > head_dim || rot % 2 != 0 || base <= 0.0 {
        return Err(ModelError::Value {
            key: h.key("rope.dimension_count"),
            found: format!("{rot} (base {base})"),
            expected: format!("an even number of at most {head_dim}, a positive base"),
        });
    }
    let scaling = if scaled { rope_scaling(h)? } else { RopeScaling::None };
    let factors = b.optional("rope_freqs.weight", &[rot / 2], WeightKind::Vector)?;
    Ok(b.rope(Rope { base, rot, style, scaling, factors }))
}

fn rope_scaling(h: &Header<'_>) -> Result<RopeScaling, ModelError> {
    let factor = match h.number("rope.scaling.factor")? {
        Some(f) => f,
        None => h.number("rope.scale_linear")?.unwrap_or(1.0),
    };
    let kind = h.text("rope.scaling.type")?.unwrap_or(if factor == 1.0 { "none" } else { "linear" });
    if factor <= 0.0 {
        let key = h.key("rope.scaling.factor");
        return Err(ModelError::Value { key, found: factor.to_string(), expected: "more than 0".into() });
    }
    match kind {
        "none" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor }),
        "yarn" => Ok(RopeScaling::Yarn {
            factor,
            original_context: h.needed("rope.scaling.original_context_length")? as u32,
            attention_factor: h.number("rope.scaling.attn_factor")?.unwrap_or(1.0),
            beta_fast: h.number("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
            beta_slow: h.number("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        }),
        other => Err(ModelError::Value {
            key: h.key("rope.scaling.type"),
            found: other.into(),
            expected: "none, linear or yarn".into(),
        }),
    }
}

/// residual = embedding of the token.
pub(super) fn embed(b: &mut Builder<'_>, vocab: usize, scale: f32) -> Result<(), ModelError> {
    b.at(Place::Input);
    let out = b.residual();
    let table = b.weight("token_embd.weight", &[b.d_model, vocab], WeightKind::Table)?;
    b.push(Op::Embed { table, scale, out });
    Ok(())
}

/// Logits of W · norm(residual); W is the embedding where the file has no head of its own.
pub(super) fn head(
    b: &mut Builder<'_>,
    sizes: &Sizes,
    norm: &str,
    softcap: Option<f32>,
) -> Result<(), ModelError> {
    b.at(Place::Output);
    let x = b.buffer("normed", b.d_model);
    b.norm(norm, b.residual(), sizes.eps, x)?;
    let own = if b.has("output.weight") { "output.weight" } else { "token_embd.weight" };
    let weight = b.weight(own, &[b.d_model, sizes.vocab], WeightKind::Matrix)?;
    b.push(Op::Head { x, weight, softcap });
    Ok(())
}

/// residual += block(norm(residual)).
pub(super) fn residual_block(
    b: &mut Builder<'_>,
    norm: &str,
    eps: f32,
    block: impl FnOnce(&mut Builder<'_>, Cols, Cols) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    let (normed, branch) = (b.buffer("normed", b.d_model), b.buffer("branch", b.d_model));
    b.norm(norm, b.residual(), eps, normed)?;
    block(b, normed, branch)?;
    b.push(Op::Add { x: branch, out: b.residual() });
    Ok(())
}

/// Grouped-query attention of one layer.
pub(super) struct Attention {
    pub(super) layer: usize,
    pub(super) rope: RopeId,
    pub(super) window: Option<u32>,
    pub(super) scale: f32,
    /// RMS norm of queries and keys by head, before the rotation.
    pub(super) qk_norm: bool,
    /// First position that exists: 0, and 1 in an MTP layer.
    pub(super) first: u32,
}

/// Queries, keys and values of a layer, and where they are remembered.
struct Projected {
    q: Heads,
    k: Heads,
    v: Heads,
    state: StateId,
}

/// q, k, v = W_q x, W_k x, W_v x, normed and turned; q only with `queries`.
fn project(
    b: &mut Builder<'_>,
    sizes: &Sizes,
    a: &Attention,
    x: Cols,
    queries: bool,
) -> Result<Projected, ModelError> {
    let p = format!("blk.{}", a.layer);
    let (heads, kv) = (sizes.heads, sizes.kv_heads[a.layer]);
    let (nq, nk, nv) = (heads * sizes.key_dim, kv * sizes.key_dim, kv * sizes.value_dim);
    let qkv = b.buffer("q, k, v", nq + nk + nv);
    let (q, k, v) = (qkv.part(0..nq), qkv.part(nq..nq + nk), qkv.part(nq + nk..nq + nk + nv));
    if b.has(&format!("{p}.attn_qkv.weight")) {
        b.linear(&format!("{p}.attn_qkv"), x, qkv)?;
    } else {
        if queries {
            b.linear(&format!("{p}.attn_q"), x, q)?;
        }
        b.linear(&format!("{p}.attn_k"), x, k)?;
        b.linear(&format!("{p}.attn_v"), x, v)?;
    }
    let (q, k, v) = (q.heads(heads), k.heads(kv), v.heads(kv));
    for (name, x) in [("q", q), ("k", k)].into_iter().skip(usize::from(!queries)) {
        if a.qk_norm {
            b.head_norm(&format!("{p}.attn_{name}_norm.weight"), x, sizes.eps, x)?;
        }
        b.push(Op::Rope { x, rope: a.rope });
    }
    let kind =
        StateKind::Kv { heads: kv, key_dim: sizes.key_dim, value_dim: sizes.value_dim, window: a.window };
    Ok(Projected { q, k, v, state: b.state(a.layer, kind) })
}

/// out = W_o · attend(W_q x, W_k x, W_v x).
pub(super) fn attention(
    b: &mut Builder<'_>,
    sizes: &Sizes,
    a: &Attention,
    x: Cols,
    out: Cols,
) -> Result<(), ModelError> {
    let Projected { q, k, v, state } = project(b, sizes, a, x, true)?;
    let attended = b.buffer("attended", q.count * v.dim);
    let by_head = attended.heads(q.count);
    b.push(Op::Attend { q, k, v, out: by_head, state, scale: a.scale, first: a.first });
    b.linear(&format!("blk.{}.attn_output", a.layer), attended, out)
}

/// Keys and values of x for rows to come.
pub(super) fn remember(b: &mut Builder<'_>, sizes: &Sizes, a: &Attention, x: Cols) -> Result<(), ModelError> {
    let Projected { k, v, state, .. } = project(b, sizes, a, x, false)?;
    b.push(Op::Remember { k, v, state });
    Ok(())
}

/// 1/√n, the usual factor on attention scores.
pub(super) fn inverse_root(n: usize) -> f32 {
    1.0 / (n as f32).sqrt()
}

/// out = W_down (activation(W_gate x) · W_up x), with the layer's own width.
pub(super) fn feed_forward(
    b: &mut Builder<'_>,
    layer: usize,
    activation: Activation,
    x: Cols,
    out: Cols,
) -> Result<(), ModelError> {
    let width = b.header.by_layer("feed_forward_length", layer + 1).or_else(|_| {
        let blocks = b.header.needed("block_count")?;
        b.header.by_layer("feed_forward_length", blocks)
    })?[layer];
    gated_feed_forward(b, &format!("blk.{layer}"), "", width, activation, x, out)
}

fn gated_feed_forward(
    b: &mut Builder<'_>,
    p: &str,
    suffix: &str,
    width: usize,
    activation: Activation,
    x: Cols,
    out: Cols,
) -> Result<(), ModelError> {
    let (gate, up) = (b.buffer("gate", width), b.buffer("up", width));
    b.linear(&format!("{p}.ffn_gate{suffix}"), x, gate)?;
    b.linear(&format!("{p}.ffn_up{suffix}"), x, up)?;
    b.push(Op::Gate { gate: gate.row(), activation, x: up.row(), out: gate.row() });
    b.linear(&format!("{p}.ffn_down{suffix}"), gate, out)
}

/// How router logits choose and weight experts.
pub(super) struct Routing {
    pub(super) gating: Gating,
    /// Whether the chosen weights are divided by their sum.
    pub(super) normalise: bool,
    /// Factor on the weights.
    pub(super) scale: f32,
}

impl Routing {
    /// Soft-max over all experts, the weights of those chosen divided by their sum.
    pub(super) const SOFTMAX: Routing = Routing { gating: Gating::Softmax, normalise: true, scale: 1.0 };
}

/// An expert of `width` that every row goes to beside those chosen for it:
/// out += \[sigmoid(w x) ·\] W_down (silu(W_gate x) · W_up x); the factor where the file holds w.
pub(super) fn shared_expert(
    b: &mut Builder<'_>,
    layer: usize,
    width: usize,
    x: Cols,
    out: Cols,
) -> Result<(), ModelError> {
    let p = format!("blk.{layer}");
    let shared = b.buffer("shared expert", b.d_model);
    gated_feed_forward(b, &p, "_shexp", width, Activation::Silu, x, shared)?;
    let own = format!("{p}.ffn_gate_inp_shexp");
    if b.has(&format!("{own}.weight")) {
        let gate = b.buffer("shared expert's gate", 1);
        b.linear(&own, x, gate)?;
        let (gate, x) = (gate.row(), shared.row());
        b.push(Op::Gate { gate, activation: Activation::Sigmoid, x, out: x });
    }
    b.push(Op::Add { x: shared, out });
    Ok(())
}

/// A mixture of experts, each a feed-forward block with SiLU: the best by their router's logits, plus a selection bias
/// where the file holds one.
pub(super) fn experts(
    b: &mut Builder<'_>,
    layer: usize,
    by: &Routing,
    x: Cols,
    out: Cols,
) -> Result<(), ModelError> {
    let p = format!("blk.{layer}");
    let count = b.header.needed("expert_count")?;
    let used = b.header.needed("expert_used_count")?;
    if used > count {
        return Err(ModelError::Value {
            key: b.header.key("expert_used_count"),
            found: used.to_string(),
            expected: format!("at most the {count} experts"),
        });
    }
    let width = match b.header.size("expert_feed_forward_length")? {
        Some(width) => width,
        None => b.header.needed("feed_forward_length")?,
    };
    let logits = b.buffer("router", count);
    let routing = b.buffer("routing", 2 * used);
    b.linear(&format!("{p}.ffn_gate_inp"), x, logits)?;
    let selection_bias = b.optional(&format!("{p}.exp_probs_b.bias"), &[count], WeightKind::Vector)?;
    let Routing { gating, normalise, scale } = *by;
    b.push(Op::Route { logits, gating, selection_bias, used, normalise, scale, out: routing });

    let by_rank =
        |c: Cols, at: usize| Heads { buffer: c.buffer, at, count: used, dim: width, stride: 2 * width };
    let both = b.buffer("expert gate, up", used * 2 * width);
    let (gate, up) = (by_rank(both, 0), by_rank(both, width));
    let fused = format!("{p}.ffn_gate_up_exps.weight");
    if b.has(&fused) {
        let weight = b.weight(&fused, &[b.d_model, 2 * width, count], WeightKind::Experts)?;
        b.push(Op::ExpertLinear { x: x.row(), weight, routing, out: both.heads(used) });
    } else {
        for (name, out) in [("gate", gate), ("up", up)] {
            let name = format!("{p}.ffn_{name}_exps.weight");
            let weight = b.weight(&name, &[b.d_model, width, count], WeightKind::Experts)?;
            b.push(Op::ExpertLinear { x: x.row(), weight, routing, out });
        }
    }
    b.push(Op::Gate { gate, activation: Activation::Silu, x: up, out: gate });
    let down = b.buffer("expert down", used * b.d_model);
    let weight =
        b.weight(&format!("{p}.ffn_down_exps.weight"), &[width, b.d_model, count], WeightKind::Experts)?;
    b.push(Op::ExpertLinear { x: gate, weight, routing, out: down.heads(used) });
    b.push(Op::Combine { x: down, routing, out });
    Ok(())
}
