"""Write the values that the Rust tests compare with: tests/fixtures/expected.

    python expected_values.py TINY_DIR [OUTPUT_DIR]

TINY_DIR holds `tiny-NAME-f32.gguf` and `tiny-NAME.npz` as make_tiny.py writes them. Every array is a plain .npy file
(version 1, C order, `<f4` or `<i4`), a row per position of the prompt:

    prompt.P.ids                            token ids of prompt P (a, b, c, d), the same for every model
    tiny-NAME-f32.P.logits                  transformers, F32 weights
    tiny-NAME-f32.P.{hidden,mtp_logits,mtp_hidden}      models with an MTP layer; hidden rows are those after output_norm
    tiny-NAME-f32.P.mtp_chain               reference.py: logits of three drafts behind the prompt's last token, each fed
                                            with the layer's own hidden row and its own greatest token of the one before
    tiny-NAME-f16.P.logits                  reference.py (float64) on the F16 twin
    tiny-NAME-q8_0.P.logits                 reference.py on the Q8_0 twin, activations rounded by motet's rule
    tiny-NAME-q8_0.P.logits_exact           the same with unrounded activations
    tiny-NAME-q8_0.P.routing_margin         by how much the last expert chosen beat the next one, where it was closest

and twins.json has the hashes of the twins: of the tensors' bytes in file order, and of the whole file as twins.py writes it.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from reference import Network
from twins import data_hash, write_twin

MODELS = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35", "qwen35moe", "glm4moe")
PROMPTS = "abcd"
# The set must stay small, so what adds nothing is left out.
F32_PROMPTS = {"qwen35moe": "ab", "glm4moe": "ab"}
TWIN_PROMPTS = {"qwen35moe": "", "glm4moe": ""}
EXACT_PROMPTS = "b"


def save(directory, name, array):
    kind = np.int32 if np.issubdtype(array.dtype, np.integer) else np.float32
    np.save(directory / f"{name}.npy", np.ascontiguousarray(array, kind))


def chain(network, next_ids, hidden, drafts=3):
    """Logits `[drafts, vocab]` of the MTP layer behind its last row, which feeds itself from then on."""
    rows = []
    for _ in range(drafts):
        logits, own = network.mtp(next_ids, hidden)
        rows.append(logits[-1])
        next_ids = np.append(next_ids, logits[-1].argmax())
        hidden = np.concatenate([hidden, own[-1:]])
    return np.stack(rows)


def oracle_values(name, tiny, out):
    """Values of transformers for the F32 file, and how far the float64 reference is from them."""
    network = Network(tiny / f"tiny-{name}-f32.gguf")
    arrays = np.load(tiny / f"tiny-{name}.npz")
    for prompt in F32_PROMPTS.get(name, PROMPTS):
        ids = arrays[f"{prompt}.ids"]
        logits, hidden = network.forward(ids)
        reference = {"logits": logits, "hidden": hidden}
        if f"{prompt}.mtp_logits" in arrays:
            reference["mtp_logits"], reference["mtp_hidden"] = network.mtp(ids[1:], hidden[:-1])
            save(out, f"tiny-{name}-f32.{prompt}.mtp_chain", chain(network, ids[1:], hidden[:-1]))
        save(out, f"prompt.{prompt}.ids", ids)
        difference = []
        for what, ours in reference.items():
            if f"{prompt}.{what}" in arrays:
                theirs = arrays[f"{prompt}.{what}"]
                save(out, f"tiny-{name}-f32.{prompt}.{what}", theirs)
                difference.append(f"{what} {np.abs(ours - theirs).max():.1e}")
        print(f"{name} f32 {prompt}: transformers and float64 differ by at most {', '.join(difference)}")


def twin_values(name, tiny, out, scratch):
    """Values of the float64 reference for the twins; returns their hashes."""
    hashes = {}
    prompts = TWIN_PROMPTS.get(name, PROMPTS)
    for kind in ("f16", "q8_0") if prompts else ():
        path = scratch / f"tiny-{name}-{kind}.gguf"
        write_twin(tiny / f"tiny-{name}-f32.gguf", kind, path)
        hashes[path.stem] = {"tensors": data_hash(path), "file": hashlib.sha256(path.read_bytes()).hexdigest()}
        network = Network(path, quantised_activations=True)  # in an F16 file no weight is quantised
        exact = Network(path)
        for prompt in prompts:
            ids = np.load(out / f"prompt.{prompt}.ids.npy")
            logits, _ = network.forward(ids)
            save(out, f"{path.stem}.{prompt}.logits", logits)
            if kind == "q8_0" and np.isfinite(network.routing_margin).any():
                save(out, f"{path.stem}.{prompt}.routing_margin", network.routing_margin[:, None])
            if kind == "q8_0":
                unrounded, _ = exact.forward(ids)
                if prompt in EXACT_PROMPTS:
                    save(out, f"{path.stem}.{prompt}.logits_exact", unrounded)
                change = np.sqrt(np.mean((logits - unrounded) ** 2) / np.mean(unrounded**2))
                print(f"{name} q8_0 {prompt}: rounding the activations changes the logits by {change:.2%} (RMS)")
    return hashes


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    tiny = Path(sys.argv[1])
    default = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "expected"
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else default
    out.mkdir(parents=True, exist_ok=True)
    hashes = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            oracle_values(name, tiny, out)
            hashes |= twin_values(name, tiny, out, Path(scratch))
    (out / "twins.json").write_text(json.dumps(hashes, indent=1) + "\n")
    print(f"{out}: {sum(f.stat().st_size for f in out.iterdir())} bytes")


if __name__ == "__main__":
    main()
