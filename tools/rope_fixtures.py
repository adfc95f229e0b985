#!/usr/bin/env python3
"""Frequencies of stretched rotary embeddings as transformers computes them.

    pip install torch transformers
    python3 tools/rope_fixtures.py           # writes crates/motet-cpu/tests/fixtures/rope_scaling.txt

A line is: kind, its parameters (dims, base, factor, ...), a colon, the attention factor, one frequency per pair.
"""

import pathlib

from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CASES = [
    ("linear", dict(dims=64, base=10000.0, factor=4.0), {}),
    ("linear", dict(dims=128, base=1000000.0, factor=8.0), {}),
    ("yarn", dict(dims=128, base=1000000.0, factor=4.0, original=32768, fast=32.0, slow=1.0), {}),
    ("yarn", dict(dims=64, base=10000.0, factor=40.0, original=4096, fast=32.0, slow=1.0), {}),
    ("yarn", dict(dims=128, base=150000.0, factor=32.0, original=8192, fast=16.0, slow=2.0), {}),
    ("llama3", dict(dims=128, base=500000.0, factor=8.0), dict(low_freq_factor=1.0, high_freq_factor=4.0, original=8192)),
    ("llama3", dict(dims=64, base=500000.0, factor=32.0), dict(low_freq_factor=1.0, high_freq_factor=4.0, original=8192)),
]


def main():
    lines = ["# made by tools/rope_fixtures.py: kind parameters : attention-factor frequencies"]
    for kind, p, extra in CASES:
        rope = {"rope_type": kind, "rope_theta": p["base"], "factor": p["factor"]}
        if kind == "yarn":
            rope |= {"beta_fast": p["fast"], "beta_slow": p["slow"], "original_max_position_embeddings": p["original"]}
        if kind == "llama3":
            rope |= {k: v for k, v in extra.items() if k != "original"}
            rope |= {"original_max_position_embeddings": extra["original"]}
        config = LlamaConfig(
            hidden_size=p["dims"], num_attention_heads=1, head_dim=p["dims"], rope_parameters=rope,
            max_position_embeddings=int(p.get("original", 4096) * p["factor"]),
        )
        frequencies, attention = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        words = [kind, *(f"{v!r}" for v in p.values()), ":", f"{attention!r}", *(f"{float(f)!r}" for f in frequencies)]
        lines.append(" ".join(words))
    path = pathlib.Path(__file__).parent.parent / "crates/motet-cpu/tests/fixtures/rope_scaling.txt"
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
