"""Write a transformers model (and its MTP layer) as an F32 GGUF file.

Names, shapes and what conversion does to the weights are the conventions of llama.cpp: rotated q/k rows for llama,
1 added to the norms of gemma3, qwen35 and qwen35moe, tiled value heads and -exp(A_log) for the gated delta rule.
"""

from dataclasses import dataclass

import torch
from gguf import ExpertGatingFuncType, GGUFWriter

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class Vocabulary:
    """A byte-level BPE vocabulary. `types` are GGUF's (1 normal, 3 control)."""

    tokens: list
    types: list
    merges: list
    bos: int
    eos: int
    pad: int
    pre_tokenizer: str = "qwen2"
    chat_template: str = CHATML

    def write(self, writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre_tokenizer)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        writer.add_bos_token_id(self.bos)
        writer.add_eos_token_id(self.eos)
        writer.add_pad_token_id(self.pad)
        writer.add_add_bos_token(False)
        writer.add_chat_template(self.chat_template)


QWEN35 = ("qwen35", "qwen35moe")

# --- tensors of a layer, in the order they are written: (GGUF name, transformers name) -------------------------------

NORMS = [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")]
NORMS_BEFORE_FFN_RENAMED = [("attn_norm", "input_layernorm"), ("post_attention_norm", "post_attention_layernorm")]
NORMS_GEMMA = [
    ("attn_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
]
ATTENTION = [(f"attn_{part}", f"self_attn.{part}_proj") for part in "qkv"] + [("attn_output", "self_attn.o_proj")]
HEAD_NORMS = [(f"attn_{part}_norm", f"self_attn.{part}_norm") for part in "qk"]
FEED_FORWARD = [(f"ffn_{part}", f"mlp.{part}_proj") for part in ("gate", "up", "down")]
SHARED_EXPERT = [(f"ffn_{part}_shexp", f"mlp.shared_experts.{part}_proj") for part in ("gate", "up", "down")]
ONE_SHARED_EXPERT = [(f"ffn_{part}_shexp", f"mlp.shared_expert.{part}_proj") for part in ("gate", "up", "down")]

LAYER = {
    "llama": NORMS + ATTENTION + FEED_FORWARD,
    "qwen2": NORMS + ATTENTION + FEED_FORWARD,
    "qwen3": NORMS + ATTENTION + HEAD_NORMS + FEED_FORWARD,
    "qwen3moe": NORMS + ATTENTION + HEAD_NORMS,
    "gemma3": NORMS_GEMMA + HEAD_NORMS + ATTENTION + FEED_FORWARD,
    "qwen35": NORMS_BEFORE_FFN_RENAMED + ATTENTION + HEAD_NORMS,
    "qwen35moe": NORMS_BEFORE_FFN_RENAMED + ATTENTION + HEAD_NORMS + ONE_SHARED_EXPERT,
    "glm4moe": NORMS_BEFORE_FFN_RENAMED + ATTENTION + HEAD_NORMS + FEED_FORWARD + SHARED_EXPERT,
}


def adjacent_pairs(weight, heads):
    """Rows of q or k from half-split RoPE (i, i + d/2) to adjacent pairs (2i, 2i + 1)."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape)


def tiled_heads(weight, axis, key_heads, head_size):
    """Value heads along `axis` from grouped by key head to tiled: value head j then belongs to key head j mod key_heads."""
    shape = list(weight.shape)
    repeats = shape[axis] // (key_heads * head_size)
    split = shape[:axis] + [key_heads, repeats, head_size] + shape[axis + 1 :]
    return weight.reshape(split).swapaxes(axis, axis + 1).reshape(shape)


class Converter:
    """Writes one file. `state` is the trunk's state dict, `mtp` the MTP layer's (or None)."""

    def __init__(self, path, arch, name, config, vocabulary):
        self.arch, self.config, self.vocabulary = arch, config, vocabulary
        self.writer = GGUFWriter(path, arch)
        self.writer.add_name(name)

    def tensor(self, name, value):
        self.writer.add_tensor(name, value.detach().float().contiguous().numpy())

    def norm(self, name, value):
        """A norm weight: gemma3, qwen35 and qwen35moe keep it as its distance from 1."""
        self.tensor(name, value + 1 if self.arch in ("gemma3", *QWEN35) else value)

    def hyper_parameters(self, mtp_layers):
        c, w = self.config, self.writer
        w.add_block_count(c.num_hidden_layers + mtp_layers)
        w.add_context_length(c.max_position_embeddings)
        w.add_embedding_length(c.hidden_size)
        if self.arch != "qwen35moe":
            w.add_feed_forward_length(c.intermediate_size)
        w.add_head_count(c.num_attention_heads)
        w.add_head_count_kv(c.num_key_value_heads)
        w.add_layer_norm_rms_eps(c.rms_norm_eps)
        if self.arch not in ("llama", "qwen2"):
            w.add_key_length(c.head_dim)
            w.add_value_length(c.head_dim)
        rope = c.rope_parameters
        if self.arch == "llama":
            w.add_rope_dimension_count(c.head_dim)
        if self.arch in (*QWEN35, "glm4moe"):
            w.add_rope_dimension_count(int(c.head_dim * rope["partial_rotary_factor"]))
        global_rope = rope["full_attention"] if self.arch == "gemma3" else rope
        w.add_rope_freq_base(global_rope["rope_theta"])
        if self.arch == "llama":
            w.add_vocab_size(c.vocab_size)
        if self.arch == "gemma3":
            w.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
            w.add_sliding_window(c.sliding_window)
            w.add_uint32("gemma3.attention.sliding_window_pattern", c.layer_types.index("full_attention") + 1)
        if self.arch in ("qwen3moe", "qwen35moe"):
            w.add_expert_count(c.num_experts)
        if self.arch == "qwen35moe":
            w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
        if self.arch == "glm4moe":
            w.add_expert_count(c.n_routed_experts)
            w.add_expert_shared_count(c.n_shared_experts)
            w.add_leading_dense_block_count(c.first_k_dense_replace)
            w.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
            w.add_expert_weights_scale(c.routed_scaling_factor)
            w.add_expert_weights_norm(c.norm_topk_prob)
        if self.arch in ("qwen3moe", "qwen35moe", "glm4moe"):
            w.add_expert_used_count(c.num_experts_per_tok)
            w.add_expert_feed_forward_length(c.moe_intermediate_size)
        if self.arch in QWEN35:
            w.add_rope_dimension_sections([*rope["mrope_section"], 0])
            w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
            w.add_ssm_state_size(c.linear_key_head_dim)
            w.add_ssm_group_count(c.linear_num_key_heads)
            w.add_ssm_time_step_rank(c.linear_num_value_heads)
            w.add_ssm_inner_size(c.linear_num_value_heads * c.linear_value_head_dim)
            w.add_uint32(f"{self.arch}.full_attention_interval", c.layer_types.index("full_attention") + 1)
        if mtp_layers:
            w.add_uint32(f"{self.arch}.nextn_predict_layers", mtp_layers)

    def layer(self, prefix, source, state):
        """Decoder layer `source…` of `state` as `prefix…`."""
        for name, theirs in LAYER[self.arch]:
            weight, bias = state.get(f"{source}{theirs}.weight"), state.get(f"{source}{theirs}.bias")
            if weight is None:  # a gated-delta layer has no attention, a dense layer no experts, …
                continue
            if name.endswith("norm"):
                self.norm(f"{prefix}{name}.weight", weight)
                continue
            if self.arch == "llama" and name in ("attn_q", "attn_k"):
                heads = self.config.num_attention_heads if name == "attn_q" else self.config.num_key_value_heads
                weight = adjacent_pairs(weight, heads)
            self.tensor(f"{prefix}{name}.weight", weight)
            if bias is not None:
                self.tensor(f"{prefix}{name}.bias", bias)
        if source + "mlp.gate.weight" in state:
            self.experts(prefix, source + "mlp.", state)
        if source + "linear_attn.A_log" in state:
            self.gated_delta(prefix, source + "linear_attn.", state)
        if self.arch == "qwen35":
            for name, theirs in FEED_FORWARD:
                self.tensor(f"{prefix}{name}.weight", state[f"{source}{theirs}.weight"])

    def experts(self, prefix, source, state):
        self.tensor(prefix + "ffn_gate_inp.weight", state[source + "gate.weight"])
        if source + "shared_expert_gate.weight" in state:
            self.tensor(prefix + "ffn_gate_inp_shexp.weight", state[source + "shared_expert_gate.weight"].squeeze(0))
        if source + "gate.e_score_correction_bias" in state:
            self.tensor(prefix + "exp_probs_b.bias", state[source + "gate.e_score_correction_bias"])
        gate, up = state[source + "experts.gate_up_proj"].chunk(2, dim=1)
        self.tensor(prefix + "ffn_gate_exps.weight", gate)
        self.tensor(prefix + "ffn_up_exps.weight", up)
        self.tensor(prefix + "ffn_down_exps.weight", state[source + "experts.down_proj"])

    def gated_delta(self, prefix, source, state):
        c = self.config
        key_heads, head = c.linear_num_key_heads, c.linear_value_head_dim
        keys = 2 * key_heads * c.linear_key_head_dim

        def tiled(name, axis=0, head_size=head):
            return tiled_heads(state[source + name], axis, key_heads, head_size)

        def tiled_values(weight):
            """q and k rows as they are, the value rows behind them tiled."""
            return torch.cat([weight[:keys], tiled_heads(weight[keys:], 0, key_heads, head)])

        self.tensor(prefix + "attn_qkv.weight", tiled_values(state[source + "in_proj_qkv.weight"]))
        self.tensor(prefix + "attn_gate.weight", tiled("in_proj_z.weight"))
        self.tensor(prefix + "ssm_beta.weight", tiled("in_proj_b.weight", head_size=1))
        self.tensor(prefix + "ssm_alpha.weight", tiled("in_proj_a.weight", head_size=1))
        self.tensor(prefix + "ssm_a", -torch.exp(tiled("A_log", head_size=1)))
        self.tensor(prefix + "ssm_dt.bias", tiled("dt_bias", head_size=1))
        self.tensor(prefix + "ssm_conv1d.weight", tiled_values(state[source + "conv1d.weight"].squeeze(1)))
        self.tensor(prefix + "ssm_norm.weight", state[source + "norm.weight"])  # the one norm that is not kept from 1
        self.tensor(prefix + "ssm_out.weight", tiled("out_proj.weight", axis=1))

    def convert(self, state, mtp=None):
        c = self.config
        self.hyper_parameters(1 if mtp else 0)
        self.vocabulary.write(self.writer)
        self.tensor("token_embd.weight", state["model.embed_tokens.weight"])
        self.norm("output_norm.weight", state["model.norm.weight"])
        if not c.tie_word_embeddings:
            self.tensor("output.weight", state["lm_head.weight"])
        for i in range(c.num_hidden_layers):
            self.layer(f"blk.{i}.", f"model.layers.{i}.", state)
        if mtp:
            prefix = f"blk.{c.num_hidden_layers}."
            self.layer(prefix, "block.", mtp)
            self.tensor(prefix + "nextn.eh_proj.weight", mtp["eh_proj.weight"])
            for name in ("enorm", "hnorm", "shared_head_norm"):
                self.norm(f"{prefix}nextn.{name}.weight", mtp[name + ".weight"])
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_gguf(path, arch, name, config, vocabulary, state, mtp=None):
    """Write `state` (and the MTP layer `mtp`) as a GGUF file of architecture `arch`."""
    Converter(path, arch, name, config, vocabulary).convert(state, mtp)
