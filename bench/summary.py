"""Statistics: medians, spreads, and ratios between values of the same round.

A sample is a dictionary: model, threads, engine, what, conversations, context, round, value. `what` names what was
measured; the engine "machine" is the limit of what any engine could reach.
"""

from collections import defaultdict
from statistics import median

# What is measured: its unit, and whether more is better.
MEASURES = {
    "prefill": ("tokens/s", True),
    "decode": ("tokens/s", True),
    "http": ("tokens/s", True),
    "time to first token": ("s", False),
    "start to ready": ("s", False),
    "memory": ("bytes", False),
    "memory, mapped files": ("bytes", False),
    "memory at most": ("bytes", False),
    "same tokens": ("of all", True),
}


def spread(values):
    """Median, least and greatest of some values, and how many there are."""
    values = list(values)
    return {"median": median(values), "low": min(values), "high": max(values), "n": len(values)}


def ratios(ours, theirs):
    """The spread of value over value, round by round; none where no round has both. {round: value} each."""
    both = [ours[r] / theirs[r] for r in sorted(ours.keys() & theirs.keys()) if theirs[r]]
    return spread(both) if both else None


def summarise(samples):
    """One entry for each thing that was measured: every engine's spread, motet's ratio to each peer and to the better
    one, and everybody's fraction of the machine's limit where there is one."""
    grouped = defaultdict(lambda: defaultdict(dict))
    for s in samples:
        key = s["model"], s["threads"], s["what"], s["context"], s["conversations"]
        grouped[key][s["engine"]][s["round"]] = s["value"]
    measures, models = list(MEASURES), list(dict.fromkeys(s["model"] for s in samples))

    def place(key):
        model, threads, what, context, conversations = key
        return models.index(model), -threads, measures.index(what), context, conversations

    entries = []
    for key in sorted(grouped, key=place):
        engines = grouped[key]
        entry = dict(zip(("model", "threads", "what", "context", "conversations"), key, strict=True))
        unit, more_is_better = MEASURES[entry["what"]]
        limit = engines.pop("machine", {})
        entry |= {"unit": unit, "engines": {engine: spread(values.values()) for engine, values in engines.items()}}
        entry["limit"] = spread(limit.values()) if limit else None
        entry["of limit"] = {engine: ratios(values, limit) for engine, values in engines.items()}
        entry["ratio"], entry["better peer"], entry["ratio to better"] = {}, None, None
        peers = [engine for engine in engines if engine != "motet"]
        if "motet" in engines and peers:
            entry["ratio"] = {peer: ratios(engines["motet"], engines[peer]) for peer in peers}
            best = max if more_is_better else min
            entry["better peer"] = best(peers, key=lambda peer: entry["engines"][peer]["median"])
            entry["ratio to better"] = entry["ratio"][entry["better peer"]]
        entries.append(entry)
    return entries


def added_memory(entries, model, threads, engine):
    """Bytes that each further conversation adds, between the fewest and the most that were measured."""
    at = {
        e["conversations"]: e["engines"][engine]["median"]
        for e in entries
        if (e["model"], e["threads"], e["what"]) == (model, threads, "memory") and engine in e["engines"]
    }
    if len(at) < 2:
        return None
    few, many = min(at), max(at)
    return (at[many] - at[few]) / (many - few)
