"""End-to-end test of a running motet server with the real `openai` client.

    motet serve --api-key KEY --port 8080 &
    python openai_client_test.py http://127.0.0.1:8080 --api-key KEY [--model NAME]

Every check is a function `test_…`; a failure says what was expected and what came. Exits 1 if any check fails. The checks
hold for any model that can be asked for a story (the built-in one can): texts are compared with each other, never with a
text written down here.
"""

import argparse
import json
import math
import sys
import threading
import traceback
import urllib.error
import urllib.request
import uuid

import openai

STORY = [{"role": "user", "content": "Tell me a story."}]
QUESTIONS = ["Tell me a story.", "Who are you?", "Count to 12.", "What is the capital of France?"]
TOKEN_IDS = [5, 300, 77, 131, 302, 91, 45, 310]


class Server:
    """The server under test, through the openai client and (for what the client can't say) plain HTTP."""

    def __init__(self, url, api_key, model):
        self.url = url.rstrip("/")
        self.api_key = api_key
        self.client = self.client_with(api_key)
        self.model = model or self.client.models.list().data[0].id

    def client_with(self, api_key):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0, timeout=120)

    def chat(self, messages=STORY, **options):
        options = {"model": self.model, "max_tokens": 24, "temperature": 0} | options
        return self.client.chat.completions.create(messages=messages, **options)

    def text(self, messages=STORY, **options):
        """The answer's text; a streamed answer is put together."""
        answer = self.chat(messages, **options)
        if not options.get("stream"):
            return answer.choices[0].message.content
        return "".join(c.choices[0].delta.content or "" for c in answer if c.choices)

    def complete(self, prompt, **options):
        options = {"model": self.model, "max_tokens": 12, "temperature": 0} | options
        return self.client.completions.create(prompt=prompt, **options)

    def http(self, path, body=None, key=None):
        """A plain request, POST if it has a body. Returns the status and the body of the answer."""
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url + path, data=body, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def equal(found, expected, what):
    assert found == expected, f"{what}: expected {expected!r}, found {found!r}"


def openai_error(body, what):
    """The body is an error in OpenAI's shape; returns the error."""
    error = body.get("error") if isinstance(body, dict) else None
    assert isinstance(error, dict), f"{what}: expected a body with an `error` object, found {body!r}"
    for field in ("message", "type", "param", "code"):
        assert field in error, f"{what}: the error has no field {field!r}: {error!r}"
    assert isinstance(error["message"], str) and error["message"], f"{what}: empty message: {error!r}"
    return error


def refused(kind, call, what, code=None):
    """`call` must raise the client's exception `kind`, and with the given error code where one is given."""
    try:
        call()
    except openai.APIStatusError as error:
        assert isinstance(error, kind), f"{what}: expected {kind.__name__}, found {error!r}"
        body = openai_error(error.response.json(), what)
        if code is not None:
            equal(body["code"], code, f"{what}: error code")
        return
    raise AssertionError(f"{what}: expected {kind.__name__}, but the request succeeded")


# --- what a server offers ---------------------------------------------------------------------------------------------


def test_models(server):
    models = server.client.models.list().data
    assert server.model in [m.id for m in models], f"{server.model!r} is not in /v1/models"
    equal({m.object for m in models}, {"model"}, "object of the models")


def test_health_and_metrics(server):
    for path in ("/health", "/livez"):
        equal(server.http(path)[0], 200, path)
    status, metrics = server.http("/metrics", key=server.api_key)
    equal(status, 200, "/metrics")
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total"):
        assert name in metrics, f"/metrics has no {name}"


# --- chat completions -------------------------------------------------------------------------------------------------


def test_chat(server):
    answer = server.chat()
    equal(answer.object, "chat.completion", "object")
    equal(answer.model, server.model, "model")
    equal(len(answer.choices), 1, "number of choices")
    equal(answer.choices[0].index, 0, "index")
    equal(answer.choices[0].message.role, "assistant", "role")
    assert answer.choices[0].message.content, "the answer is empty"
    assert answer.id and answer.created > 1_600_000_000, f"id {answer.id!r}, created {answer.created!r}"
    usage = answer.usage
    assert usage.prompt_tokens > 0, f"prompt_tokens {usage.prompt_tokens}"
    assert 0 < usage.completion_tokens <= 24, f"completion_tokens {usage.completion_tokens}"
    equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total_tokens")


def test_chat_stream(server):
    whole = server.chat()
    chunks = list(server.chat(stream=True))
    equal({c.object for c in chunks}, {"chat.completion.chunk"}, "object of the chunks")
    equal(len({c.id for c in chunks}), 1, "ids in one stream")
    assert all(c.usage is None for c in chunks), "usage was streamed without include_usage"
    equal(chunks[0].choices[0].delta.role, "assistant", "role of the first chunk")
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    equal(text, whole.choices[0].message.content, "the streamed text")
    reasons = [c.choices[0].finish_reason for c in chunks]
    equal(reasons[-1], whole.choices[0].finish_reason, "finish_reason of the last chunk")
    equal(set(reasons[:-1]) - {None}, set(), "finish_reasons before the last chunk")
    assert len(chunks) > 4, f"24 tokens came in {len(chunks)} chunks: that is not a stream"


def test_chat_stream_usage(server):
    whole = server.chat().usage
    chunks = list(server.chat(stream=True, stream_options={"include_usage": True}))
    equal(chunks[-1].choices, [], "choices of the usage chunk")
    assert all(c.usage is None for c in chunks[:-1]), "usage before the last chunk"
    usage = chunks[-1].usage
    equal(usage.prompt_tokens, whole.prompt_tokens, "prompt_tokens, streamed")
    equal(usage.completion_tokens, whole.completion_tokens, "completion_tokens, streamed")
    assert usage.prompt_tokens_details.cached_tokens >= 0, "no cached_tokens in the streamed usage"


def test_token_limits(server):
    for option in ("max_tokens", "max_completion_tokens"):
        answer = server.client.chat.completions.create(model=server.model, messages=STORY, temperature=0, **{option: 5})
        equal(answer.usage.completion_tokens, 5, f"completion_tokens under {option}=5")
        equal(answer.choices[0].finish_reason, "length", f"finish_reason under {option}=5")


def test_text_parts_and_roles(server):
    parts = [{"type": "text", "text": "Tell me a story."}]
    equal(server.text([{"role": "user", "content": parts}]), server.text(), "a text part against a string")
    both = server.chat([{"role": "user", "content": parts * 2}]).usage.prompt_tokens
    assert both > server.chat().usage.prompt_tokens, "the second of two text parts adds no tokens"
    for role in ("system", "developer"):
        messages = [
            {"role": role, "content": "You are a helpful assistant."},
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "Hello! How can I help you today?"},
            *STORY,
        ]
        more = server.chat(messages).usage.prompt_tokens - server.chat().usage.prompt_tokens
        assert more > 0, f"three more messages, first of them {role}, add {more} tokens"


def test_tools_are_accepted(server):
    function = {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}}
    answer = server.chat(tools=[{"type": "function", "function": function}])
    assert isinstance(answer.choices[0].message.content, str), f"no text: {answer.choices[0].message!r}"


def test_stop(server):
    text = server.text()
    assert len(text) > 16, f"the story is too short for this check: {text!r}"
    stop = text[7:13]  # most likely not a token's border
    expected = text[: text.index(stop)]
    for option in (stop, ["\x00 never", stop]):
        answer = server.chat(stop=option)
        equal(answer.choices[0].message.content, expected, f"text before stop {option!r}")
        equal(answer.choices[0].finish_reason, "stop", f"finish_reason with stop {option!r}")
    equal(server.text(stop=stop, stream=True), expected, f"streamed text before stop {stop!r}")


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_seed(server):
    texts = [server.text(temperature=1.2, seed=seed) for seed in (1, 2, 3, 4, 5, 6)]
    again = [server.text(temperature=1.2, seed=seed) for seed in (1, 2, 3, 4, 5, 6)]
    equal(again, texts, "the same seeds once more")
    assert len(set(texts)) > 1, f"six seeds, one text: {texts[0]!r}"
    equal(server.text(temperature=1.2, seed=1, stream=True), texts[0], "the same seed, streamed")


def test_sampling_limits_to_greedy(server):
    greedy = server.text()
    hot = dict(temperature=1.5, seed=7)
    assert server.text(**hot) != greedy or server.text(**hot | {"seed": 8}) != greedy, "temperature has no effect"
    equal(server.text(**hot, extra_body={"top_k": 1}), greedy, "top_k = 1 against temperature 0")
    equal(server.text(**hot, extra_body={"min_p": 1.0}), greedy, "min_p = 1 against temperature 0")
    equal(server.text(**hot, top_p=1e-6), greedy, "top_p = 1e-6 against temperature 0")


def test_logit_bias(server):
    answer = server.complete(TOKEN_IDS, logit_bias={"300": 100}, max_tokens=4)
    text = answer.choices[0].text
    assert text and text == text[: len(text) // 4] * 4, f"bias 100 on one token: expected it four times, found {text!r}"


def test_frequency_penalty(server):
    # Two tokens above all others, one 20 above the other: it wins every time, until its own repetitions weigh it down.
    options = dict(logit_bias={"300": 100, "301": 80}, max_tokens=32, logprobs=1)
    plain = server.complete(TOKEN_IDS, **options).choices[0].logprobs.tokens
    equal(len(set(plain)), 1, f"different tokens without a penalty ({plain})")
    weighed = server.complete(TOKEN_IDS, frequency_penalty=2.0, **options).choices[0].logprobs.tokens
    equal(len(set(weighed)), 2, f"different tokens under frequency_penalty ({weighed})")


def test_n(server):
    options = dict(temperature=1.3, seed=11)
    answer = server.chat(n=2, **options)
    equal([c.index for c in answer.choices], [0, 1], "indices of n = 2")
    texts = [c.message.content for c in answer.choices]
    assert texts[0] != texts[1], f"both choices are the same: {texts[0]!r}"
    equal(texts[0], server.text(**options), "choice 0 against n = 1")
    equal([c.message.content for c in server.chat(n=2, **options).choices], texts, "n = 2 once more")
    streamed = ["", ""]
    for chunk in server.chat(n=2, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    equal(streamed, texts, "n = 2, streamed")
    assert answer.usage.completion_tokens > 24, "usage counts one choice of two"


def test_chat_logprobs(server):
    answer = server.chat(logprobs=True, top_logprobs=3, max_tokens=8)
    equal(answer.choices[0].finish_reason, "length", "finish_reason")
    tokens = answer.choices[0].logprobs.content
    equal(len(tokens), 8, "number of tokens with log-probabilities")
    for token in tokens:
        top = [t.logprob for t in token.top_logprobs]
        equal(len(top), 3, "number of top_logprobs")
        equal(top, sorted(top, reverse=True), "order of top_logprobs")
        assert all(p <= 1e-6 for p in top), f"a log-probability above 0: {top}"
        assert sum(math.exp(p) for p in top) <= 1 + 1e-4, f"probabilities above 1 in total: {top}"
        equal((token.token, token.logprob), (token.top_logprobs[0].token, top[0]), "greedy token against the top")
    text = b"".join(bytes(t.bytes) for t in tokens)
    content = answer.choices[0].message.content
    assert text.startswith(content.encode()), f"bytes of the tokens {text!r} against the text {content!r}"
    streamed = [
        t.logprob
        for chunk in server.chat(logprobs=True, top_logprobs=3, max_tokens=8, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for t in chunk.choices[0].logprobs.content
    ]
    equal(streamed, [t.logprob for t in tokens], "log-probabilities, streamed")
    equal(server.chat().choices[0].logprobs, None, "logprobs that nobody asked for")


# --- completions ------------------------------------------------------------------------------------------------------


def test_completions_with_token_ids(server):
    answer = server.complete(TOKEN_IDS)
    equal(answer.object, "text_completion", "object")
    equal(answer.usage.prompt_tokens, len(TOKEN_IDS), "prompt_tokens of a prompt of token ids")
    assert 0 < answer.usage.completion_tokens <= 12, f"completion_tokens {answer.usage.completion_tokens}"
    equal(server.complete(TOKEN_IDS).choices[0].text, answer.choices[0].text, "the same ids once more")
    streamed = "".join(c.choices[0].text for c in server.complete(TOKEN_IDS, stream=True) if c.choices)
    equal(streamed, answer.choices[0].text, "the streamed text")


def test_completions_with_text(server):
    answer = server.complete("Once upon a time, ")
    assert answer.choices[0].text, "empty completion"
    assert answer.choices[0].finish_reason in ("stop", "length"), answer.choices[0].finish_reason
    equal(server.complete("Once upon a time, ").choices[0].text, answer.choices[0].text, "the same text once more")


def test_completions_logprobs(server):
    answer = server.complete(TOKEN_IDS, logprobs=2, max_tokens=6, logit_bias={"300": 100})
    found = answer.choices[0].logprobs
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        equal(len(getattr(found, field)), 6, f"length of logprobs.{field}")
    equal(len(set(found.tokens)), 1, "different tokens under a bias of 100 on one")
    for chosen, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert chosen <= 1e-6 and len(top) >= 2, f"chosen {chosen}, top {top}"


# --- memory of what was read ------------------------------------------------------------------------------------------


def test_cached_tokens(server):
    nonce = uuid.uuid4().hex
    long = f"{nonce} " + " ".join(f"The number {i} is followed by {i + 1}." for i in range(30))
    messages = [{"role": "system", "content": long}, *STORY]
    first, second = server.chat(messages), server.chat(messages)
    assert first.usage.prompt_tokens > 192, f"the prompt is only {first.usage.prompt_tokens} tokens"
    equal(first.usage.prompt_tokens_details.cached_tokens, 0, "cached_tokens of a new prompt")
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert 64 <= cached < second.usage.prompt_tokens, f"cached_tokens of a known prompt: {cached}"
    equal(second.choices[0].message.content, first.choices[0].message.content, "warm against cold answer")


# --- several at once --------------------------------------------------------------------------------------------------


def test_four_conversations_at_once(server):
    options = [
        dict(temperature=0.0),
        dict(temperature=1.1, seed=3),
        dict(temperature=0.0),
        dict(temperature=0.9, seed=4),
    ]
    asks = [([{"role": "user", "content": q}], o | {"max_tokens": 40}) for q, o in zip(QUESTIONS, options, strict=True)]
    solo = [server.text(messages, **o) for messages, o in asks]
    together = [None] * len(asks)
    gate = threading.Barrier(len(asks))

    def ask(i):
        gate.wait()
        messages, o = asks[i]
        together[i] = server.text(messages, stream=i % 2 == 0, **o)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for question, one, other in zip(QUESTIONS, solo, together, strict=True):
        equal(other, one, f"answer to {question!r}, four at once against alone")


def test_a_client_that_leaves(server):
    before = server.text()
    stream = server.chat(stream=True, max_tokens=200)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    equal(server.text(), before, "the answer after another client left in mid-answer")
    equal(server.http("/health")[0], 200, "/health after a client left")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_unknown_model(server):
    refused(openai.NotFoundError, lambda: server.chat(model="no-such-model"), "unknown model", "model_not_found")


def test_bad_json(server):
    for path in ("/v1/chat/completions", "/v1/completions"):
        for body in (b'{"model": ', b"[]", b'{"model": 7}'):
            what = f"{path} for the body {body!r}"
            status, answer = server.http(path, body, server.api_key)
            equal(status, 400, f"status of {what}")
            equal(openai_error(json.loads(answer), what)["type"], "invalid_request_error", f"error type of {what}")


def test_unknown_path(server):
    equal(server.http("/v1/nothing", b"{}", server.api_key)[0], 404, "status of an unknown path")


def test_over_long_prompt(server):
    code = "context_length_exceeded"
    long = [{"role": "user", "content": "word and number 12345 " * 20_000}]
    refused(openai.BadRequestError, lambda: server.chat(long), "an over-long chat", code)
    refused(openai.BadRequestError, lambda: server.chat(long, stream=True), "an over-long chat, streamed", code)
    refused(openai.BadRequestError, lambda: server.complete([300] * 100_000), "100,000 token ids", code)


def test_wrong_key(server):
    other = server.client_with("not-" + server.api_key)
    refused(openai.AuthenticationError, other.models.list, "models with a wrong key")
    ask = dict(model=server.model, messages=STORY, max_tokens=4)
    refused(openai.AuthenticationError, lambda: other.chat.completions.create(**ask), "chat with a wrong key")
    status, _ = server.http("/v1/chat/completions", json.dumps(ask).encode())
    equal(status, 401, "status without a key")


def test_what_is_not_offered(server):
    json_mode = {"type": "json_object"}
    refused(openai.BadRequestError, lambda: server.chat(response_format=json_mode), "response_format json_object")
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    refused(openai.BadRequestError, lambda: server.chat([{"role": "user", "content": image}]), "an image part")
    refused(openai.BadRequestError, lambda: server.complete([10**9]), "a token id outside the vocabulary")
    equal(server.chat(response_format={"type": "text"}).choices[0].index, 0, "response_format text")


def main():
    parser = argparse.ArgumentParser(description="end-to-end test of a motet server with the openai client")
    parser.add_argument("url", help="the server, without /v1")
    parser.add_argument("--api-key", required=True, help="the key that the server was started with")
    parser.add_argument("--model", help="default: the first of /v1/models")
    args = parser.parse_args()
    server = Server(args.url, args.api_key, args.model)
    tests = [(name, test) for name, test in globals().items() if name.startswith("test_")]
    failed = 0
    for name, test in tests:
        try:
            test(server)
            print(f"ok    {name}", flush=True)
        except Exception as error:  # noqa: BLE001 - any failure of one check is reported, the others still run
            failed += 1
            print(f"FAIL  {name}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
    print(f"{len(tests) - failed} of {len(tests)} checks passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
