"""Train the built-in model for a fixed time on the CPU.

    OMP_WAIT_POLICY=passive python -m train_demo.train DIR SECONDS        # from tools/, after train_demo.corpus

Reads DIR/train.npy, writes DIR/checkpoint.pt. The learning rate follows a cosine over the given time, so a run that is cut
short is not a shorter run: choose the time beforehand (about 45 minutes on two cores).
"""

import math
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from .model import build

ROWS, LENGTH = 12, 192
PEAK_RATE, WARM_UP, FINAL = 4e-3, 60, 0.02
DRAFT_WEIGHTS = (0.3, 0.15)  # of the loss of the first and the second drafted token


def losses(model, tokens):
    """Cross-entropy of the next token and of two drafted ones. The MTP layer feeds its own rows to the second draft."""
    ahead = len(DRAFT_WEIGHTS)
    length = tokens.shape[1] - 1 - ahead
    hidden = model.hidden(tokens[:, :length])
    out = []
    for depth in range(1 + ahead):
        if depth > 0:
            hidden = model.draft_hidden(tokens[:, depth : depth + length], hidden)
        target = tokens[:, depth + 1 : depth + 1 + length]
        out.append(F.cross_entropy(model.head(hidden).flatten(0, 1), target.flatten()))
    return out


def optimiser(model):
    """AdamW; norms, biases and convolutions do not decay."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim >= 2 and "conv1d" not in name else others).append(parameter)
    groups = [dict(params=matrices, weight_decay=0.05), dict(params=others, weight_decay=0)]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def rate(step, progress):
    """Linear warm-up by steps, then a cosine over the time."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return PEAK_RATE * min(1, (step + 1) / WARM_UP) * (FINAL + (1 - FINAL) * cosine)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    directory, seconds = Path(sys.argv[1]), float(sys.argv[2])
    torch.manual_seed(0)
    torch.set_num_threads(2)
    data = torch.from_numpy(np.load(directory / "train.npy").astype(np.int64))
    model = build()
    optimise = optimiser(model)
    start, step = time.monotonic(), 0
    while (elapsed := time.monotonic() - start) < seconds:
        for group in optimise.param_groups:
            group["lr"] = rate(step, elapsed / seconds)
        span = LENGTH + 1 + len(DRAFT_WEIGHTS)
        tokens = torch.stack([data[i : i + span] for i in torch.randint(0, len(data) - span, (ROWS,))])
        parts = losses(model, tokens)
        loss = parts[0] + sum(weight * part for weight, part in zip(DRAFT_WEIGHTS, parts[1:], strict=True))
        optimise.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimise.step()
        step += 1
        if step % 50 == 0:
            shown = " ".join(f"{part.item():.3f}" for part in parts)
            print(
                f"{elapsed:.0f} s, step {step}, losses {shown}, {step * ROWS * LENGTH / elapsed:.0f} tokens/s",
                flush=True,
            )
    torch.save({"weights": model.state_dict(), "steps": step}, directory / "checkpoint.pt")
    print(f"{step} steps, {step * ROWS * LENGTH} tokens")


if __name__ == "__main__":
    main()
