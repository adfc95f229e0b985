"""The built-in model: a hybrid of the kind of Qwen3.5, three gated-delta layers and one of gated attention, with an MTP
layer; 1.2 million parameters."""

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from mtp import ModelWithMtp

CONFIG = dict(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_conv_kernel_dim=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    rms_norm_eps=1e-6,
    rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=[3, 3, 2]),
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
    attn_implementation="sdpa",
)


def build():
    """The model with fresh weights."""
    trunk = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG))
    for layer in trunk.model.layers:
        if hasattr(layer, "linear_attn"):
            # Milder decay than the default, so that heads remember over a useful distance at this size.
            with torch.no_grad():
                layer.linear_attn.A_log.uniform_(0.05, 4).log_()
                layer.linear_attn.dt_bias.fill_(-2.0)
    return ModelWithMtp(trunk, Qwen3_5DecoderLayer, Qwen3_5RMSNorm)


def load(path):
    """The model of a checkpoint written by `train`."""
    model = build()
    model.load_state_dict(torch.load(path, weights_only=True)["weights"])
    return model.eval()
