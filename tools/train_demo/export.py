"""A checkpoint as GGUF: Q8_0, the built-in model's format.

python -m train_demo.export DIR OUTPUT.gguf        # from tools/
"""

import json
import sys
import tempfile
from pathlib import Path

from torch_to_gguf import Vocabulary, write_gguf
from twins import write_twin

from .corpus import SPECIAL_TOKENS
from .model import load

CONTROL, NORMAL = 3, 1


def vocabulary(path):
    """The vocabulary of tokenizer.json."""
    model = json.loads(path.read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    merges = [" ".join(merge) for merge in model["merges"]]
    types = [CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens]
    return Vocabulary(tokens, types, merges, bos=0, eos=2, pad=0)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    directory, output = Path(sys.argv[1]), sys.argv[2]
    model = load(directory / "checkpoint.pt")
    words = vocabulary(directory / "tokenizer.json")
    with tempfile.TemporaryDirectory() as scratch:
        f32 = Path(scratch) / "f32.gguf"
        write_gguf(
            f32, "qwen35", "motet-demo", model.trunk.config, words, model.trunk.state_dict(), model.mtp.state_dict()
        )
        write_twin(f32, "q8_0", output)
    print(f"{output}: {Path(output).stat().st_size} bytes")


if __name__ == "__main__":
    main()
