"""One measurement with ik_llama.cpp's library, in the words of its own llama-batched-bench (a line of JSON).

    python ik_wheel.py MODEL THREADS CONVERSATIONS CONTEXT DECODE

Runs in the environment that has the wheel `ik-llama-cpp-python`. Weights are repacked at load, which is the faster way
for every format that was tried. Logits are computed where that program computes them, and nothing is sampled.
"""

import json
import sys
import time

import ik_llama_cpp._ctypes_api as api

BATCH, MICRO_BATCH = 2048, 512


def decode(context, batch, rows):
    """Runs rows of (token, position, sequence, whether logits are wanted)."""
    for begin in range(0, len(rows), BATCH):
        part = rows[begin : begin + BATCH]
        batch.n_tokens = len(part)
        for i, (token, position, sequence, wanted) in enumerate(part):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if api.llama_decode(context, batch) != 0:
            sys.exit("llama_decode failed")
    # Waits until the logits are there.
    api.llama_get_logits_ith(context, batch.n_tokens - 1)


def main():
    path, (threads, conversations, context, decoded) = sys.argv[1], map(int, sys.argv[2:])
    api.llama_backend_init()
    options = api.llama_model_default_params()
    options.repack_tensors, options.use_mmap = True, False
    model = api.llama_model_load_from_file(path.encode(), options)
    if not model:
        sys.exit("the model could not be loaded")
    options = api.llama_context_default_params()
    options.n_ctx, options.n_seq_max = conversations * (context + decoded) + 64, conversations
    options.n_batch, options.n_ubatch, options.flash_attn = BATCH, MICRO_BATCH, True
    options.n_threads = options.n_threads_batch = threads
    state = api.llama_init_from_model(model, options)
    if not state:
        sys.exit("no context of this size")
    batch = api.llama_batch_init(BATCH, 0, conversations)
    vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def token(i, sequence):
        return 100 + (i * 7919 + sequence * 104729) % (vocabulary - 200)

    def read():
        prompt = [(token(i, s), i, s, i == context - 1) for s in range(conversations) for i in range(context)]
        begun = time.perf_counter()
        decode(state, batch, prompt)
        return time.perf_counter() - begun

    # Memory that was never touched, threads that do not run yet.
    if not decoded:
        read()
    else:
        decode(state, batch, [(token(0, 0), 0, 0, True)])
    api.llama_kv_cache_clear(state)
    reading = read()
    begun = time.perf_counter()
    for step in range(decoded):
        rows = [(token(context + step, s), context + step, s, True) for s in range(conversations)]
        decode(state, batch, rows)
    deciding = time.perf_counter() - begun
    line = {"pp": context, "tg": decoded, "pl": conversations, "speed_pp": conversations * context / reading}
    print(json.dumps({**line, "speed_tg": conversations * decoded / deciding if decoded else 0}))


main()
