"""Servers under clients: started, asked by several streaming clients at once, and looked at from outside.

The clients speak OpenAI's `/v1/completions`. A prompt is common English words in random order, about one token each;
no two prompts are alike.
"""

import http.client
import json
import os
import random
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from engines import Failed, complaint

WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city name team minute idea body back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force""".split()


def prompt(words, seed):
    """So many words, always the same for a seed."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Server:
    """A server that is ready; `ready_after` seconds after its start."""

    def __init__(self, process, port, ready_after):
        self.process, self.port, self.ready_after = process, port, ready_after

    def ask(self, text, tokens, barrier=None):
        """Streams one answer of so many tokens: its text, and the times of sending, first text and end."""
        body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        body = json.dumps({**body, "stream_options": {"include_usage": True}})
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.connect()
        if barrier:
            barrier.wait()
        answer = {"sent": time.perf_counter(), "first": None, "text": "", "tokens": 0}
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise Failed(f"HTTP {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            read_event(line, answer)
        answer["end"] = time.perf_counter()
        connection.close()
        if answer["first"] is None or answer["tokens"] != tokens:
            raise Failed(f"{answer['tokens']} of {tokens} tokens came")
        return answer

    def ask_together(self, texts, tokens):
        """As many clients as texts, all at once; the answers in their order."""
        barrier, answers, errors = threading.Barrier(len(texts)), [None] * len(texts), []

        def client(i):
            try:
                answers[i] = self.ask(texts[i], tokens, barrier)
            except (Failed, OSError, http.client.HTTPException, threading.BrokenBarrierError) as error:
                barrier.abort()
                errors.append(error)

        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise Failed(f"a client of {len(texts)} failed: {errors[0]!r}")
        return answers

    def memory(self):
        """Bytes of the process: resident, of it mapped from files, and resident at most so far."""
        return memory_of(Path(f"/proc/{self.process.pid}/status").read_text())


def read_event(line, answer):
    """Takes over one line of an event stream."""
    if not line.startswith(b"data: {"):
        return
    event = json.loads(line[6:])
    if "error" in event:
        raise Failed(f"the stream broke: {event['error']}")
    for choice in event.get("choices", []):
        if choice.get("text"):
            answer["first"] = answer["first"] or time.perf_counter()
            answer["text"] += choice["text"]
    if event.get("usage"):
        answer["tokens"] = event["usage"]["completion_tokens"]


def memory_of(status):
    """From /proc/PID/status."""
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    resident, mapped, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "RssFile", "VmHWM"))
    return {"memory": resident, "memory, mapped files": mapped, "memory at most": most}


@contextmanager
def serving(engine, model, threads, conversations, context):
    """The engine's server, ready; stopped at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command, environment = engine.server(model, threads, conversations, context, port)
    with tempfile.TemporaryFile() as log:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not healthy(port):
                if process.poll() is not None or time.perf_counter() - begun > 300:
                    raise Failed(f"the server did not start: {last_words(log)}")
                time.sleep(0.002)
            yield Server(process, port, time.perf_counter() - begun)
            if process.poll() is not None:
                raise Failed(f"the server ended with {process.returncode}: {last_words(log)}")
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def healthy(port):
    """Whether the server says that it is ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def last_words(log):
    """What a server wrote of its end."""
    log.seek(0)
    return complaint(log.read().decode(errors="replace"))


def clients(engine, model, threads, conversations, context, words, tokens, seed):
    """Start to ready, median time to first token and tokens per second of so many clients at once, on a fresh server."""
    with serving(engine, model, threads, conversations, context) as server:
        # A first request alone: what is only made when it is first needed.
        server.ask(prompt(words, f"{seed} warm"), 4)
        answers = server.ask_together([prompt(words, f"{seed} {i}") for i in range(conversations)], tokens)
        waits = sorted(answer["first"] - answer["sent"] for answer in answers)
        took = max(answer["end"] for answer in answers) - min(answer["sent"] for answer in answers)
        return {
            "start to ready": server.ready_after,
            "time to first token": (waits[(len(waits) - 1) // 2] + waits[len(waits) // 2]) / 2,
            "http": sum(answer["tokens"] for answer in answers) / took,
        }


def full_memory(engine, model, threads, conversations, context):
    """Memory when so many conversations have filled all but a little of their context."""
    # Long answers: the last one begins before the first one ends, so that all are full at once.
    tokens = context // 3
    with serving(engine, model, threads, conversations, context) as server:
        # Words are tokens but for a few: 3 % of room.
        words = int((context - tokens) * 0.97)
        server.ask_together([prompt(words, f"memory {i}") for i in range(conversations)], tokens)
        return server.memory()


def same_tokens(engine, model, threads, conversations, context, words, tokens):
    """How many of so many conversations say the same alone and all together, decoding greedily."""
    texts = [prompt(words, f"same {i}") for i in range(conversations)]
    with serving(engine, model, threads, conversations, context) as server:
        alone = [server.ask(text, tokens)["text"] for text in texts]
        together = server.ask_together(texts, tokens)
        return sum(a == b["text"] for a, b in zip(alone, together, strict=True))
