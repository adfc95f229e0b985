"""The engines that are compared: how each is asked for tokens per second, and how its server is started.

Each measurement is one process of its own, so that the engines can alternate from one measurement to the next.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PATIENCE = 1800  # seconds that one measurement may take


class Failed(Exception):
    """An engine did not do what it was asked for; says why."""


@dataclass(frozen=True)
class Work:
    """`conversations` read `context` tokens each, then decide `decode` tokens each; without `decode` reading counts."""

    conversations: int
    context: int
    decode: int


def output(command, environment=None):
    """What a command prints; its last words where it fails."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            env={**os.environ, **(environment or {})},
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"took longer than {PATIENCE} s") from None
    except OSError as error:
        raise Failed(str(error)) from None
    if done.returncode != 0:
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        raise Failed(f"{how}: {complaint(done.stderr)}")
    return done.stdout


def complaint(text):
    """The line of an output that says what went wrong, or its last words."""
    lines = [line.strip() for line in text.splitlines() if re.search("assert|error|fail|panic", line, re.IGNORECASE)]
    return lines[0][:300] if lines else " ".join(text.split()[-20:])


class Motet:
    """This engine."""

    name = "motet"
    serves = True

    def __init__(self, binary):
        self.binary = Path(binary)
        self.version = output([self.binary, "--version"]).strip()

    def rate(self, model, threads, work):
        """Tokens per second of all conversations together."""
        command = [self.binary, "bench", "--json", "--repetitions", 1, "--model", model, "--threads", threads]
        if work.decode:
            command += ["--prefill", 1, "--conversations", work.conversations]
            command += ["--context", work.context, "--decode", work.decode]
        else:
            command += ["--prefill", work.context, "--conversations", 1, "--context", 1, "--decode", 1]
        return motet_rate(output(command), work)

    def server(self, model, threads, conversations, context, port):
        """The command that serves so many conversations of so many tokens each, and its environment."""
        command = [self.binary, "serve", "--model", model, "--threads", threads, "--port", port]
        return [*command, "--sessions", conversations, "--ctx", context], {}

    def plan(self, model, threads, conversations, context):
        """`motet plan`."""
        command = [self.binary, "plan", "--json", "--model", model, "--threads", threads]
        return json.loads(output([*command, "--sessions", conversations, "--ctx", context]))

    def program(self, model):
        """The network as `motet inspect` lists it."""
        return json.loads(output([self.binary, "inspect", "--program", "--json", model]))["program"]


class Llama:
    """llama.cpp, or a relative with the same programs; every option is left as it is but those that say the work."""

    def __init__(self, name, folder, version, bench=(), batched=()):
        self.name, self.folder, self.version = name, Path(folder), version
        self.bench, self.batched = bench, batched
        self.serves = (self.folder / "llama-server").exists()
        libraries = [str(self.folder), os.environ.get("LD_LIBRARY_PATH", "")]
        self.environment = {"LD_LIBRARY_PATH": ":".join(filter(None, libraries))}

    def rate(self, model, threads, work):
        """Tokens per second of all conversations together."""
        common = ["-m", model, "-t", threads, "-b", 2048, "-ub", 512]
        if work.decode:
            cells = work.conversations * (work.context + work.decode)
            # llama.cpp rounds what each sequence gets down to 256 cells.
            command = [self.folder / "llama-batched-bench", *common, "-c", cells + 256 * work.conversations]
            command += ["-npp", work.context, "-ntg", work.decode, "-npl", work.conversations]
            return batched_rate(output([*command, "--output-format", "jsonl", *self.batched], self.environment), work)
        command = [self.folder / "llama-bench", *common, "-p", work.context, "-n", 0, "-r", 1, "-o", "json"]
        return bench_rate(output([*command, *self.bench], self.environment), work)

    def server(self, model, threads, conversations, context, port):
        """As for motet. Its caches of prompts are off: prompts never repeat here, and they would only cost it memory."""
        command = [self.folder / "llama-server", "-m", model, "-t", threads, "--port", port, "-np", conversations]
        command += ["-c", conversations * context, "--no-cache-prompt", "--cache-ram", 0]
        return command, self.environment


class IkWheel:
    """ik_llama.cpp's library from its wheel; the wheel has neither the benchmarks nor a server."""

    name = "ik_llama.cpp"
    serves = False

    def __init__(self, python, version):
        self.python, self.version = Path(python), version

    def rate(self, model, threads, work):
        """Tokens per second of all conversations together."""
        words = [self.python, HERE / "ik_wheel.py", model, threads, work.conversations, work.context, work.decode]
        return batched_rate(output(words), work)


def number(found, name):
    """A rate that was found, or the complaint."""
    if not isinstance(found, (int, float)) or not found > 0:
        raise Failed(f"no {name} in its output")
    return float(found)


def motet_rate(text, work):
    """From `motet bench --json`."""
    report = json.loads(text)
    if not work.decode:
        lines = [line for line in report["prefill"] if line["tokens"] == work.context]
    else:
        lines = [line for line in report["decode"] if line["conversations"] == work.conversations]
    return number(lines[0]["tokens_per_second"] if lines else None, "such measurement")


def bench_rate(text, work):
    """From `llama-bench -o json`."""
    tests = [test for test in json.loads(text) if (test["n_prompt"], test["n_gen"]) == (work.context, 0)]
    return number(tests[0]["avg_ts"] if tests else None, f"pp{work.context}")


def batched_rate(text, work):
    """From `llama-batched-bench --output-format jsonl`."""
    for line in text.splitlines():
        if line.startswith("{"):
            test = json.loads(line)
            if (test["pp"], test["tg"], test["pl"]) == (work.context, work.decode, work.conversations):
                return number(test["speed_tg" if work.decode else "speed_pp"], "speed")
    raise Failed(f"no line with pp {work.context}, tg {work.decode}, pl {work.conversations}: it did not fit")
