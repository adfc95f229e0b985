"""The training data of the built-in model: conversations from `grammar` and some of the King James Bible.

    echo gen1:1-rev22:21 | bible -f > DIR/kjv.txt         # Debian package bible-kjv; the text is in the public domain
    python -m train_demo.corpus DIR                       # from tools/

Reads DIR/kjv.txt; writes tokenizer.json, train.npy and heldout_text.npy into DIR.
"""

import random
import re
import sys
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .grammar import conversation

VOCABULARY = 1024
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONVERSATIONS = 40_000
TEXT_PARAGRAPHS = 3_000
HELD_OUT_PARAGRAPHS = 200
# The pre-tokenizer "qwen2" of GGUF files: digits stand alone.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def paragraphs(path):
    """Four verses each, without their numbers."""
    lines = path.read_text(encoding="latin-1").splitlines()
    verses = [re.match(r"^[0-9]?[A-Za-z]+[0-9]+:[0-9]+ (.*)$", line) for line in lines]
    verses = [verse[1].strip() for verse in verses if verse]
    return [" ".join(verses[i : i + 4]) for i in range(0, len(verses), 4)]


def train_tokenizer(documents):
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer, documents):
    return [np.array(encoding.ids, np.uint16) for encoding in tokenizer.encode_batch(documents)]


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    r = random.Random(7)
    texts = [paragraph + "<|endoftext|>" for paragraph in paragraphs(directory / "kjv.txt")]
    r.shuffle(texts)
    held_out, texts = texts[:HELD_OUT_PARAGRAPHS], texts[HELD_OUT_PARAGRAPHS:][:TEXT_PARAGRAPHS]
    chats = [conversation(r) for _ in range(CONVERSATIONS)]
    tokenizer = train_tokenizer(texts + chats[:6000])
    tokenizer.save(str(directory / "tokenizer.json"))
    documents = encode(tokenizer, texts) + encode(tokenizer, chats)
    r.shuffle(documents)
    np.save(directory / "train.npy", np.concatenate(documents))
    np.save(directory / "heldout_text.npy", np.concatenate(encode(tokenizer, held_out)))
    total = sum(map(len, documents))
    print(f"{total} tokens, {total - sum(map(len, encode(tokenizer, texts)))} of them conversations")


if __name__ == "__main__":
    main()
