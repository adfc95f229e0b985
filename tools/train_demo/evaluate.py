"""How good a model is at the grammar's conversations, and how often its drafts are what the trunk says.

    OMP_WAIT_POLICY=passive python -m train_demo.evaluate DIR/checkpoint.pt DIR [CONVERSATIONS]

Every answer is generated greedily, in conversations with new random questions; each kind of question is scored by the share
of answers that are right word for word (a story: that ends as one). Drafts: the share of answer tokens at which the MTP
layer, given the true rows before, says what the trunk then says, one and two tokens ahead.
"""

import random
import sys
from collections import defaultdict
from pathlib import Path

import torch
from tokenizers import Tokenizer

from .grammar import OPEN, exchange, turn
from .model import load

END_OF_TURN = 2
LONGEST_ANSWER = 160


@torch.no_grad()
def answer(model, ids):
    """Greedy continuation up to the end of the turn."""
    out = []
    while len(out) < LONGEST_ANSWER:
        hidden = model.hidden(torch.tensor([ids + out]))
        token = int(model.head(hidden[0, -1]).argmax())
        if token == END_OF_TURN:
            break
        out.append(token)
    return out


@torch.no_grad()
def agreement(model, ids, first):
    """Of the rows from `first` on: drafts equal to the trunk's greedy token, at depths 1 and 2, and the number of rows."""
    tokens = torch.tensor([ids])
    hidden = model.hidden(tokens)
    trunk = model.head(hidden)[0].argmax(-1)
    equal = []
    rows = hidden
    for depth in (1, 2):
        rows = model.draft_hidden(tokens[:, depth:], rows[:, : len(ids) - depth])
        drafts = model.head(rows)[0].argmax(-1)
        equal.append((drafts[first:] == trunk[depth + first :]).float().mean().item())
    return equal


def score(model, tokenizer, conversations):
    right, asked, agreed = defaultdict(int), defaultdict(int), []
    r = random.Random(2026)
    for _ in range(conversations):
        memory, text = {}, ""
        for _ in range(r.randint(1, 3)):
            kind, question, expected = exchange(r, memory)
            text += turn("user", question)
            prompt = tokenizer.encode(text + "<|im_start|>assistant\n").ids
            ids = answer(model, prompt)
            said = tokenizer.decode(ids, skip_special_tokens=False)
            asked[kind.__name__] += 1
            right[kind.__name__] += said.endswith((".", '"')) if kind in OPEN else said == expected
            if len(ids) > 3:
                agreed.append(agreement(model, prompt + ids, len(prompt)))
            text += turn("assistant", expected)
    return right, asked, torch.tensor(agreed).mean(0).tolist()


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    torch.set_num_threads(2)
    tokenizer = Tokenizer.from_file(str(Path(sys.argv[2]) / "tokenizer.json"))
    conversations = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    right, asked, agreed = score(load(sys.argv[1]), tokenizer, conversations)
    for kind in sorted(asked):
        print(f"{kind:16} {right[kind]:3} of {asked[kind]:3}")
    print(f"all              {sum(right.values())} of {sum(asked.values())}")
    print(f"drafts agree with the trunk: {agreed[0]:.2f} one token ahead, {agreed[1]:.2f} two")


if __name__ == "__main__":
    main()
