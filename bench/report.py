"""The results for readers: two markdown tables."""

from summary import added_memory

ENGINES = ["motet", "llama.cpp", "ik_llama.cpp"]
# Where a ratio says something; the others only explain.
COMPARED = ["prefill", "decode", "http", "time to first token", "start to ready", "memory"]


def figure(value, unit):
    """A number as it is read."""
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "s":
        return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.1f} s"
    if unit == "of all":
        return f"{value:.0f}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def title(entry):
    """What an entry measured, in words."""
    n, context = entry["conversations"], entry["context"]
    some = "1 conversation" if n == 1 else f"{n} conversations"
    clients = "1 client" if n == 1 else f"{n} clients"
    return {
        "prefill": f"prefill of {context} tokens",
        "decode": f"decode, {some}, from position {context:,}",
        "http": f"HTTP, {clients}, tokens/s",
        "time to first token": f"HTTP, {clients}, median time to first token",
        "start to ready": f"start to ready, {some}",
        "same tokens": f"keep their tokens among {n}",
    }.get(entry["what"], f"{entry['what']}, {some} of {context:,} tokens")


def ratio_text(ratio):
    """A ratio and its spread."""
    return f"**{ratio['median']:.2f}** ({ratio['low']:.2f}–{ratio['high']:.2f})" if ratio else ""


def full_table(results):
    """Everything, model by model."""
    parts = [heading(results)]
    entries = results["summary"]
    for model, threads in dict.fromkeys((e["model"], e["threads"]) for e in entries):
        here = [e for e in entries if (e["model"], e["threads"]) == (model, threads)]
        engines = [engine for engine in ENGINES if any(engine in e["engines"] for e in here)]
        parts.append(f"\n## {model}, {threads} thread{'s' if threads > 1 else ''}\n")
        parts.append(row("", *engines, "motet to the better peer", "of the limit"))
        parts.append(row("---", *["---:"] * (len(engines) + 2)))
        for e in here:
            values = [figure(e["engines"][n]["median"], e["unit"]) if n in e["engines"] else "–" for n in engines]
            ours = e["of limit"].get("motet")
            limit = f"{ours['median']:.2f}" if ours else ""
            ratio = ratio_text(e["ratio to better"]) if e["what"] in COMPARED else ""
            parts.append(row(title(e), *values, ratio, limit))
        added = {n: added_memory(entries, model, threads, n) for n in engines}
        if any(value is not None for value in added.values()):
            values = ["–" if added[n] is None else f"{added[n] / 2**20:,.2f} MiB" for n in engines]
            parts.append(row("memory that each further conversation adds", *values, "", ""))
            keys = results["models"][model].get("conversation_bytes")
            if keys:
                parts.append(
                    row("of it keys and values by motet's plan", f"{keys / 2**20:,.2f} MiB", *[""] * len(engines), "")
                )
    if results["left_out"]:
        parts.append("\n## Left out\n")
        for one in dict.fromkeys(tuple(sorted(out.items())) for out in results["left_out"]):
            out = dict(one)
            parts.append(f"- {out['engine']}, {out['model']}, {out['threads']} threads, {out['what']}: {out['reason']}")
    return "\n".join(parts) + "\n"


def short_table(results):
    """For the README: a line for each thing, a column for each model; motet's value, its ratio, its part of the limit."""
    entries = results["summary"]
    threads = max(e["threads"] for e in entries)
    models = list(dict.fromkeys(e["model"] for e in entries if e["threads"] == threads))
    lines = {}
    for e in entries:
        if e["threads"] == threads and "motet" in e["engines"] and headline(e, entries):
            lines.setdefault(title(e), {})[e["model"]] = cell(e)
    parts = [row(f"{threads} threads", *models), row("---", *["---:"] * len(models))]
    parts += [row(name, *[cells.get(model, "") for model in models]) for name, cells in lines.items()]
    return "\n".join(parts) + "\n"


def headline(entry, entries):
    """Whether an entry is one of the few for the README: one conversation, or the model's most, at the shortest context."""
    alike = [e for e in entries if all(e[k] == entry[k] for k in ("what", "threads", "model"))]
    if entry["context"] != min(e["context"] for e in alike):
        return False
    most = max(e["conversations"] for e in alike)
    if entry["what"] == "decode":
        return entry["conversations"] in (1, 8 if any(e["conversations"] == 8 for e in alike) else most)
    return entry["what"] in (*COMPARED, "same tokens") and entry["conversations"] == most


def cell(entry):
    """A value, its ratio to the better peer, its part of the limit."""
    text = figure(entry["engines"]["motet"]["median"], entry["unit"])
    about = []
    if entry["what"] not in COMPARED:
        about = [f"{peer}: {values['median']:.0f}" for peer, values in entry["engines"].items() if peer != "motet"]
    elif entry["ratio to better"]:
        about.append(f"{entry['ratio to better']['median']:.2f}×")
    if entry["of limit"].get("motet"):
        about.append(f"{entry['of limit']['motet']['median']:.2f} of the limit")
    return f"{text} ({'; '.join(about)})" if about else text


def heading(results):
    """What was compared, where and how."""
    machine, settings = results["machine"], results["settings"]
    versions = ", ".join(f"{name} ({version})" for name, version in results["engines"].items())
    lines = [f"# Side by side, {results['begun']}", ""]
    lines += [
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['has'])}), {machine['system']}. {versions}."
    ]
    lines += [
        f"Medians of {settings['pairs']} alternating rounds; ratios are medians (least–greatest) of ratios within a round."
    ]
    for e in results["summary"]:
        model = results["models"][e["model"]]
        about = f"Limit for {e['model']}, {e['threads']} threads:"
        if e["what"] == "prefill" and e["limit"]:
            operations = e["limit"]["median"] * 2 * model["prompt_multiply_adds"] / 1e9
            lines.append(f"{about} {operations:,.0f} GOPS of dot products, {model['prompt_multiply_adds'] / 1e6:,.0f} M "
                         "multiply-adds for each token of a prompt.")  # fmt: skip
        if e["what"] == "decode" and e["limit"] and e["conversations"] == 1:
            read = e["limit"]["median"] * model["step_bytes"] / 1e9
            lines.append(f"{about} {read:,.1f} GB/s of plain reading, {model['step_bytes'] / 2**20:,.0f} MiB of weights for "
                         f"each step (measured beside position {e['context']:,}).")  # fmt: skip
    return "\n\n".join([lines[0], *lines[2:]])


def row(*cells):
    return f"| {' | '.join(cells)} |"
