"""A float64 reference of the networks that motet runs, straight from a GGUF file.

This is the definition that motet's own arithmetic is tested against: plain numpy, one function per part of a network,
no cache, no batching. Every weight is dequantised (by the PyPI package `gguf`) to float64.

With ``quantised_activations=True`` the input of every product with a *quantised* weight is first rounded the way motet
does it: int8 per 32 values (`round_activations`). What is left between this and motet is then rounding of f32 only.

    python reference.py MODEL.gguf 72 101 108 108 111     # prints the greedy next token after every position
"""

import argparse
from dataclasses import dataclass

import gguf
import numpy as np

FLOAT_TYPES = {gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "glm4moe")
BLOCK = 32


# --- element-wise functions -------------------------------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu_tanh(x):
    """GELU in its tanh form (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softplus(x):
    return np.logaddexp(0, x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def round_activations(x):
    """Round rows `[rows, k]` to int8 per 32 values: d = amax / 127 and q = round-half-even(x / d), both in float32; d is 0
    (and so is the block) when amax < 2^-100. Returns d * q as float64."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(-1, keepdims=True)
    d = np.where(amax < np.float32(2.0**-100), np.float32(0), amax / np.float32(127))
    q = np.rint(np.divide(blocks, d, out=np.zeros_like(blocks), where=d > 0))
    return (d.astype(np.float64) * q.astype(np.float64)).reshape(x.shape)


# --- a model file -----------------------------------------------------------------------------------------------------


@dataclass
class Weight:
    """A tensor in float64, shape as numpy sees it (`[out, in]` for a matrix), and whether the file holds it quantised."""

    values: np.ndarray
    quantised: bool


def read_gguf(path):
    """Metadata as a dict and every tensor as a `Weight`."""
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        shape = [int(n) for n in reversed(tensor.shape)]
        weights[tensor.name] = Weight(values.reshape(shape), tensor.tensor_type not in FLOAT_TYPES)
    return metadata, weights


class Network:
    """One model. `forward(ids)` gives logits `[n, vocab]` and hidden rows `[n, d]`; `mtp` the same of the MTP layer."""

    def __init__(self, path, quantised_activations=False):
        self.metadata, self.weights = read_gguf(path)
        self.quantised_activations = quantised_activations
        self.arch = self.metadata["general.architecture"]
        if self.arch not in ARCHITECTURES:
            raise ValueError(f"{path}: architecture {self.arch!r}, expected one of {', '.join(ARCHITECTURES)}")
        if self.key("rope.scaling.type") not in (None, "none"):
            raise ValueError(f"{path}: rope scaling {self.key('rope.scaling.type')!r} is not part of this reference")
        self.layers = self.key("block_count") - self.key("nextn_predict_layers", 0)
        self.width = self.key("embedding_length")
        self.heads = self.key("attention.head_count")
        self.kv_heads = self.key("attention.head_count_kv", self.heads)
        self.head_dim = self.key("attention.key_length", self.width // self.heads)
        self.rope_dims = self.key("rope.dimension_count", self.head_dim)
        self.eps = self.key("attention.layer_norm_rms_epsilon")

    def key(self, name, default=None):
        """A hyper-parameter, `name` without the architecture's prefix."""
        return self.metadata.get(f"{self.arch}.{name}", default)

    def vector(self, name):
        return self.weights[name].values

    # --- parts ---

    def product(self, weight, x):
        """Rows `[rows, in]` times a weight `[out, in]`."""
        if weight.quantised and self.quantised_activations:
            x = round_activations(x)
        return x @ weight.values.T

    def linear(self, name, x):
        """`product` by a named weight, plus its bias where the file has one."""
        y = self.product(self.weights[name + ".weight"], x)
        bias = self.weights.get(name + ".bias")
        return y if bias is None else y + bias.values

    def norm(self, name, x):
        """RMSNorm (Zhang and Sennrich 2019) over the last axis."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.vector(name + ".weight")

    def rope(self, x, base):
        """Rotary position embedding (Su et al. 2021) of `[rows, heads, head_dim]` at positions 0, 1, … The first
        `rope_dims` dimensions turn: adjacent pairs for llama, (i, i + rope_dims / 2) for all others."""
        half = self.rope_dims // 2
        frequency = base ** (-np.arange(half) / half)
        if "rope_freqs.weight" in self.weights:
            frequency = frequency / self.vector("rope_freqs.weight")
        angle = np.arange(len(x))[:, None, None] * frequency
        if self.arch == "llama":
            first, second = slice(0, self.rope_dims, 2), slice(1, self.rope_dims, 2)
        else:
            first, second = slice(0, half), slice(half, self.rope_dims)
        a, b = x[..., first], x[..., second]
        y = x.copy()
        y[..., first] = a * np.cos(angle) - b * np.sin(angle)
        y[..., second] = a * np.sin(angle) + b * np.cos(angle)
        return y

    def attention(self, layer, x, window, rope_base):
        """Causal attention with grouped heads; optional q/k norms, biases, output gate (qwen35, qwen35moe) and sliding window."""
        rows = len(x)
        q = self.linear(layer + "attn_q", x).reshape(rows, self.heads, -1)
        k = self.linear(layer + "attn_k", x).reshape(rows, self.kv_heads, self.head_dim)
        v = self.linear(layer + "attn_v", x).reshape(rows, self.kv_heads, self.head_dim)
        q, gate = q[..., : self.head_dim], q[..., self.head_dim :]
        if layer + "attn_q_norm.weight" in self.weights:
            q, k = self.norm(layer + "attn_q_norm", q), self.norm(layer + "attn_k_norm", k)
        q, k = self.rope(q, rope_base), self.rope(k, rope_base)
        k, v = (np.repeat(t, self.heads // self.kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(self.head_dim)
        distance = np.arange(rows)[:, None] - np.arange(rows)[None]
        visible = (distance >= 0) & (distance < (window or rows))
        mixed = np.einsum("hqk,khd->qhd", softmax(np.where(visible, scores, -np.inf)), v)
        if gate.size:
            mixed = mixed * sigmoid(gate)
        return self.linear(layer + "attn_output", mixed.reshape(rows, -1))

    def gated_delta(self, layer, x):
        """Gated delta rule (Yang et al. 2024), one token at a time. Value head j uses key head j mod key_heads."""
        rows = len(x)
        key_heads, value_heads = self.key("ssm.group_count"), self.key("ssm.time_step_rank")
        key_dim, value_dim = self.key("ssm.state_size"), self.key("ssm.inner_size") // value_heads
        mixed = silu(self.causal_convolution(layer, self.linear(layer + "attn_qkv", x)))
        q, k, v = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
        q, k = (t.reshape(rows, key_heads, key_dim) for t in (q, k))
        q, k = (t / np.sqrt((t * t).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
        key_head = np.arange(value_heads) % key_heads
        q, k = q[:, key_head] / np.sqrt(key_dim), k[:, key_head]
        v = v.reshape(rows, value_heads, value_dim)
        beta = sigmoid(self.linear(layer + "ssm_beta", x))
        step = softplus(self.linear(layer + "ssm_alpha", x) + self.vector(layer + "ssm_dt.bias"))
        decay = np.exp(self.vector(layer + "ssm_a") * step)
        state = np.zeros((value_heads, key_dim, value_dim))
        out = np.zeros((rows, value_heads, value_dim))
        for t in range(rows):
            state = state * decay[t][:, None, None]
            error = v[t] - np.einsum("hkv,hk->hv", state, k[t])
            state = state + k[t][:, :, None] * (beta[t][:, None] * error)[:, None, :]
            out[t] = np.einsum("hkv,hk->hv", state, q[t])
        gate = self.linear(layer + "attn_gate", x).reshape(rows, value_heads, value_dim)
        out = self.norm(layer + "ssm_norm", out) * silu(gate)
        return self.linear(layer + "ssm_out", out.reshape(rows, -1))

    def causal_convolution(self, layer, x):
        """Depth-wise convolution over the last few rows, kernel `[channels, taps]`, zeros before the first row."""
        kernel = self.vector(layer + "ssm_conv1d.weight")
        taps = kernel.shape[1]
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        return sum(padded[tap : tap + len(x)] * kernel[:, tap] for tap in range(taps))

    def feed_forward(self, layer, x, suffix=""):
        """Gated feed-forward (Shazeer 2020): down(act(gate x) * up x)."""
        activate = gelu_tanh if self.arch == "gemma3" else silu
        gate, up = (self.linear(f"{layer}ffn_{part}{suffix}", x) for part in ("gate", "up"))
        return self.linear(f"{layer}ffn_down{suffix}", activate(gate) * up)

    def experts(self, layer, x):
        """Mixture of experts: the best `expert_used_count` by router score, the lower id first among equals."""
        scores = self.linear(layer + "ffn_gate_inp", x)
        if self.key("expert_gating_func") == 2:
            share = sigmoid(scores)
        else:
            share = softmax(scores)
        bias = self.weights.get(layer + "exp_probs_b.bias")  # for the selection only
        ranking = share if bias is None else share + bias.values
        order = np.argsort(-ranking, axis=-1, kind="stable")
        used = self.key("expert_used_count")
        chosen = order[:, :used]
        ranked = np.take_along_axis(ranking, order, axis=-1)
        self.routing_margin = np.minimum(self.routing_margin, ranked[:, used - 1] - ranked[:, used])
        share = np.take_along_axis(share, chosen, -1)
        share = share / share.sum(-1, keepdims=True) * self.key("expert_weights_scale", 1.0)
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            row, rank = np.nonzero(chosen == expert)
            gate, up = (
                self.product(self.expert(layer + f"ffn_{part}_exps.weight", expert), x[row]) for part in ("gate", "up")
            )
            down = self.product(self.expert(layer + "ffn_down_exps.weight", expert), silu(gate) * up)
            out[row] += share[row, rank][:, None] * down
        if layer + "ffn_gate_shexp.weight" in self.weights:
            shared = self.feed_forward(layer, x, "_shexp")
            if layer + "ffn_gate_inp_shexp.weight" in self.weights:
                shared = shared * sigmoid(x @ self.vector(layer + "ffn_gate_inp_shexp.weight"))[:, None]
            out = out + shared
        return out

    def expert(self, name, index):
        stack = self.weights[name]
        return Weight(stack.values[index], stack.quantised)

    def block(self, index, x):
        """One decoder layer on the residual stream `[rows, d]`."""
        layer = f"blk.{index}."
        gemma = self.arch == "gemma3"
        window, rope_base = None, self.key("rope.freq_base", 1e6 if gemma else 1e4)
        if gemma and (index + 1) % self.key("attention.sliding_window_pattern", 6) != 0:
            window, rope_base = self.key("attention.sliding_window"), self.key("rope.freq_base_swa", 1e4)
        h = self.norm(layer + "attn_norm", x)
        if layer + "ssm_a" in self.weights:
            h = self.gated_delta(layer, h)
        else:
            h = self.attention(layer, h, window, rope_base)
        x = x + (self.norm(layer + "post_attention_norm", h) if gemma else h)
        has_ffn_norm = layer + "ffn_norm.weight" in self.weights
        h = self.norm(layer + ("ffn_norm" if has_ffn_norm else "post_attention_norm"), x)
        if layer + "ffn_gate_inp.weight" in self.weights:
            h = self.experts(layer, h)
        else:
            h = self.feed_forward(layer, h)
        return x + (self.norm(layer + "post_ffw_norm", h) if gemma else h)

    def head(self, hidden):
        name = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        logits = self.product(self.weights[name], hidden)
        cap = self.key("final_logit_softcapping")
        return cap * np.tanh(logits / cap) if cap else logits

    # --- programs ---

    def forward(self, ids):
        """Logits `[n, vocab]` and hidden rows after the output norm `[n, d]` of a whole prompt.

        `routing_margin` `[n]` then holds, row by row, by how much the last expert chosen beat the next one in the layer
        where it was closest: where that is next to nothing, rounding decides and two right answers differ."""
        self.routing_margin = np.full(len(ids), np.inf)
        x = self.vector("token_embd.weight")[np.asarray(ids)]
        if self.arch == "gemma3":
            x = x * np.sqrt(self.width)
        for index in range(self.layers):
            x = self.block(index, x)
        hidden = self.norm("output_norm", x)
        return self.head(hidden), hidden

    def mtp(self, next_ids, hidden):
        """The MTP layer, teacher-forced: row i is fed hidden row i and token i + 1. Logits of token i + 2 and the layer's
        own hidden rows, which feed the next draft. Positions are those of the rows, from 0."""
        self.routing_margin = np.full(len(next_ids), np.inf)
        layer = f"blk.{self.layers}."
        embedded = self.vector("token_embd.weight")[np.asarray(next_ids)]
        pair = [self.norm(layer + "nextn.enorm", embedded), self.norm(layer + "nextn.hnorm", hidden)]
        x = self.linear(layer + "nextn.eh_proj", np.concatenate(pair, axis=-1))
        x = self.block(self.layers, x)
        own_norm = layer + "nextn.shared_head_norm"
        out = self.norm(own_norm if own_norm + ".weight" in self.weights else "output_norm", x)
        return self.head(out), out


def main():
    parser = argparse.ArgumentParser(description="float64 reference: greedy next token after each position")
    parser.add_argument("model")
    parser.add_argument("ids", type=int, nargs="+")
    parser.add_argument("--quantised-activations", action="store_true")
    args = parser.parse_args()
    logits, _ = Network(args.model, args.quantised_activations).forward(args.ids)
    for position, row in enumerate(logits):
        best = int(row.argmax())
        print(f"position {position}: token {best}, logit {row[best]:.6f}")


if __name__ == "__main__":
    main()
