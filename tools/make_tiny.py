"""The recipe of the tiny models in tests/fixtures/tiny: random weights, every architecture, 288 tokens of vocabulary.

Each model is built with transformers from a fixed seed, written as F32 GGUF (`tiny-NAME-f32.gguf`) and run on four fixed
prompts; the values go to `tiny-NAME.npz` (`a.ids`, `a.logits` and, for models with an MTP layer, `a.hidden`,
`a.mtp_logits`, `a.mtp_hidden`). All norms and biases are random as well, so that a missing operation shows.

    python make_tiny.py OUTPUT_DIR [NAME ...]        # needs requirements-fixtures.txt
"""

import math
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe

from mtp import ModelWithMtp
from torch_to_gguf import Vocabulary, write_gguf

# Lengths cross what can go wrong at a border: a sliding window of 8, a convolution of 4 taps, a page of 64 positions.
PROMPTS = {
    "a": [72, 101, 108, 108, 111],
    "b": [(i * 37 + 11) % 284 for i in range(40)],
    "c": [(i * i * 7 + 3 * i + 5) % 284 for i in range(97)],
    "d": [284],
}

MERGES = (
    "Ġ t|h e|i n|Ġ a|r e|o n|Ġt he|e r|Ġ s|a t|n d|Ġ w|i t|o u|e s|Ġ c|i s|o r|Ġa nd|e n|Ġ f|in g|Ġ b|Ġ p|e d|a n|Ġ o|a l"
).split("|")
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]


def byte_characters():
    """GPT-2's printable character for each byte: itself where it is printable, else the next code point from 256."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def vocabulary():
    """256 bytes, 28 merges, 4 special tokens."""
    tokens = byte_characters() + [merge.replace(" ", "") for merge in MERGES] + SPECIAL_TOKENS
    types = [1] * (len(tokens) - len(SPECIAL_TOKENS)) + [3] * len(SPECIAL_TOKENS)
    return Vocabulary(tokens, types, MERGES, bos=284, eos=286, pad=287)


COMMON = dict(
    vocab_size=288,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=284,
    eos_token_id=286,
    pad_token_id=287,
    attn_implementation="eager",
)


def rope(theta, **more):
    return dict(rope_type="default", rope_theta=theta, **more)


def llama():
    settings = COMMON | dict(head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False)
    return hf.LlamaForCausalLM(hf.LlamaConfig(rope_parameters=rope(1e4), **settings))


def qwen2():
    """Tied, with biases on q, k and v."""
    settings = COMMON | dict(num_hidden_layers=3, rms_norm_eps=1e-6, tie_word_embeddings=True)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(rope_parameters=rope(1e6), **settings))


def qwen3():
    """Tied, heads of 32 where d / heads would be 16, norms on q and k."""
    settings = COMMON | dict(num_hidden_layers=2, head_dim=32, rms_norm_eps=1e-6, tie_word_embeddings=True)
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(rope_parameters=rope(1e6), **settings))


def qwen3moe():
    settings = COMMON | dict(num_hidden_layers=3, head_dim=32, tie_word_embeddings=False)
    experts = dict(moe_intermediate_size=32, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True)
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(rope_parameters=rope(1e6), **experts, **settings))


def gemma3():
    """A window of 8 positions in all layers but every third."""
    sliding, full = "sliding_attention", "full_attention"
    settings = COMMON | dict(head_dim=32, query_pre_attn_scalar=32, tie_word_embeddings=True)
    layers = dict(sliding_window=8, layer_types=[sliding, sliding, full, sliding])
    ropes = {full: rope(1e6), sliding: rope(1e4)}
    return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(rope_parameters=ropes, **layers, **settings))


def qwen35():
    """Three gated-delta layers and one of gated attention, and an MTP layer."""
    settings = COMMON | dict(head_dim=32, rms_norm_eps=1e-6, tie_word_embeddings=False)
    delta = dict(
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    ropes = rope(1e4, partial_rotary_factor=0.5, mrope_section=[3, 3, 2])
    trunk = hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(rope_parameters=ropes, **delta, **settings))
    return ModelWithMtp(trunk, qwen3_5.Qwen3_5DecoderLayer, qwen3_5.Qwen3_5RMSNorm)


def qwen35moe():
    """Two gated-delta layers and one of gated attention, each with experts and a gated shared one, and an MTP layer."""
    settings = COMMON | dict(num_hidden_layers=3, head_dim=32, rms_norm_eps=1e-6, tie_word_embeddings=False)
    del settings["intermediate_size"]
    delta = dict(
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    experts = dict(
        moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=6, num_experts_per_tok=2
    )
    ropes = rope(1e4, partial_rotary_factor=0.5, mrope_section=[3, 3, 2])
    config = hf.Qwen3_5MoeTextConfig(rope_parameters=ropes, **delta, **experts, **settings)
    trunk = hf.Qwen3_5MoeForCausalLM(config)
    return ModelWithMtp(trunk, qwen3_5_moe.Qwen3_5MoeDecoderLayer, qwen3_5_moe.Qwen3_5MoeRMSNorm)


def glm4moe():
    """One dense layer, two of experts with a selection bias and a shared expert, and an MTP layer."""
    settings = COMMON | dict(num_hidden_layers=3, head_dim=32, attention_bias=True, use_qk_norm=True)
    experts = dict(
        moe_intermediate_size=32,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_routed_experts=6,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        norm_topk_prob=True,
    )
    ropes = rope(1e4, partial_rotary_factor=0.5)
    trunk = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(rope_parameters=ropes, **experts, **settings))
    return ModelWithMtp(trunk, glm4_moe.Glm4MoeDecoderLayer, glm4_moe.Glm4MoeRMSNorm)


BUILDERS = (llama, qwen2, qwen3, qwen3moe, gemma3, qwen35, qwen35moe, glm4moe)
MODELS = {build.__name__: build for build in BUILDERS}

# Of the two MoE layers and the MTP layer: the values once drawn for the fixture, kept so that the file can be made again.
GLM4MOE_SELECTION_BIAS = [
    [0.053153563, -0.006725717, -0.13091014, 0.06019783, -0.07415097, 0.16103987],
    [0.11671889, -0.17139268, 0.08864577, -0.16679083, -0.17303884, -0.0404248],
    [0.019249415, -0.19255601, 0.018153047, -0.1656802, -0.069579296, 0.16921298],
]


def randomise(parameters, seed):
    """Draw every parameter, in the order given, so that none is trivial."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(shape, low, high):
        return torch.empty(shape).uniform_(low, high, generator=generator)

    def normal(shape, deviation):
        return torch.empty(shape).normal_(0, deviation, generator=generator)

    with torch.no_grad():
        for name, parameter in parameters:
            shape = parameter.shape
            if name.endswith(("A_log", "dt_bias")):
                parameter.copy_(uniform(shape, -3, 1))
            elif "norm" in name and parameter.ndim == 1:
                parameter.add_(uniform(shape, -0.4, 0.4))
            elif "conv1d" in name:
                parameter.copy_(normal(shape, 0.5))
            elif "embed_tokens" in name:
                parameter.copy_(normal(shape, 1.0))
            elif parameter.ndim >= 2:
                parameter.copy_(normal(shape, 1.0 / math.sqrt(shape[-1])))
            else:
                parameter.copy_(normal(shape, 0.2))


def draw_weights(name, model):
    if name == "qwen35":
        randomise(model.named_parameters(), seed=12)
    elif name == "qwen35moe":
        randomise(model.named_parameters(), seed=31)
    elif name == "glm4moe":
        randomise(model.trunk.named_parameters(), seed=21)
        parts = (
            getattr(model.mtp, part).named_parameters(part)
            for part in ("enorm", "hnorm", "eh_proj", "block", "shared_head_norm")
        )
        randomise(chain(*parts), seed=22)
        layers = [*model.trunk.model.layers[1:], model.mtp.block]
        for layer, bias in zip(layers, GLM4MOE_SELECTION_BIAS, strict=True):
            layer.mlp.gate.e_score_correction_bias.data.copy_(torch.tensor(bias))
    else:
        randomise(model.named_parameters(), seed=11)


@torch.no_grad()
def values(model, ids):
    """Expected arrays of one prompt. The MTP layer is teacher-forced: row i is fed hidden row i and token i + 1."""
    batch = torch.tensor([ids])
    if not isinstance(model, ModelWithMtp):
        return {"logits": model(batch).logits[0].numpy()}
    hidden = model.hidden(batch)
    out = {"logits": model.head(hidden)[0].numpy(), "hidden": hidden[0].numpy()}
    if len(ids) > 1:
        drafted = model.draft_hidden(batch[:, 1:], hidden[:, :-1])
        out |= {"mtp_logits": model.head(drafted)[0].numpy(), "mtp_hidden": drafted[0].numpy()}
    return out


def make(name, directory):
    """Write tiny-NAME-f32.gguf and tiny-NAME.npz."""
    model = MODELS[name]().eval()
    draw_weights(name, model)
    with_mtp = isinstance(model, ModelWithMtp)
    trunk = model.trunk if with_mtp else model
    mtp = model.mtp.state_dict() if with_mtp else None
    path = directory / f"tiny-{name}-f32.gguf"
    write_gguf(path, name, f"tiny-{name}", trunk.config, vocabulary(), trunk.state_dict(), mtp)
    arrays = {}
    for prompt, ids in PROMPTS.items():
        arrays[f"{prompt}.ids"] = np.array(ids, np.int32)
        arrays |= {f"{prompt}.{what}": array for what, array in values(model, ids).items()}
    np.savez(directory / f"tiny-{name}.npz", **arrays)
    print(f"{path}: {path.stat().st_size} bytes")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in sys.argv[2:] or MODELS:
        make(name, directory)


if __name__ == "__main__":
    main()
