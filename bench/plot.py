"""The results as a picture: tokens per second and memory against the number of conversations, a row for each model."""

from html import escape

COLOURS = {"motet": "#c2410c", "llama.cpp": "#2563eb", "ik_llama.cpp": "#15803d"}
WIDTH, HEIGHT = 330, 190  # of a panel's frame
LEFT, TOP, ACROSS, DOWN = 62, 58, 90, 86  # space left of and above the first frame, and between frames


def svg(entries, threads):
    """All panels. `entries` as `summary.summarise` makes them."""
    models = list(dict.fromkeys(e["model"] for e in entries if e["threads"] == threads))
    panels = []
    for i, model in enumerate(models):
        y = TOP + i * (HEIGHT + DOWN)
        here = [e for e in entries if (e["model"], e["threads"]) == (model, threads)]
        decode = [e for e in here if e["what"] == "decode"]
        shortest = min((e["context"] for e in decode), default=0)
        decode = [e for e in decode if e["context"] == shortest]
        memory = [e for e in here if e["what"] == "memory"]
        panels.append(panel(LEFT, y, f"{model}: tokens/s from position {shortest}", decode, 1))
        title = f"memory, MiB, {memory[0]['context']} tokens each" if memory else ""
        panels.append(panel(LEFT + WIDTH + ACROSS, y, title, memory, 2**20))
    width, height = LEFT + 2 * WIDTH + ACROSS + 24, TOP + len(models) * (HEIGHT + DOWN) - 20
    names = [name for name in COLOURS if any(name in e["engines"] for e in entries)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{legend(names, threads)}{"".join(panels)}</svg>\n'
    )


def legend(names, threads):
    """Which colour is whose."""
    out = []
    for i, name in enumerate(names):
        x = LEFT + i * 120
        out.append(f'<line x1="{x}" y1="18" x2="{x + 22}" y2="18" stroke="{COLOURS[name]}" stroke-width="2.5"/>')
        out.append(f'<text x="{x + 28}" y="22">{escape(name)}</text>')
    end = LEFT + len(names) * 120 + 20
    out.append(f'<text x="{end}" y="22" fill="#555">{threads} threads; medians, least to greatest</text>')
    return "".join(out)


def panel(x, y, title, entries, unit):
    """One frame with a line for each engine: its values against the number of conversations."""
    if not entries:
        return ""
    counts = sorted({e["conversations"] for e in entries})
    top, step = scale(max(s["high"] / unit for e in entries for s in e["engines"].values()))

    def at(count):
        return x + WIDTH * (0.06 + 0.88 * (counts.index(count) / max(1, len(counts) - 1)))

    def up(value):
        return y + HEIGHT * (1 - value / top)

    out = [f'<text x="{x}" y="{y - 10}" font-weight="600">{escape(title)}</text>']
    for i in range(round(top / step) + 1):
        tick = i * step
        out.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{up(tick):.1f}" y2="{up(tick):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{x - 6}" y="{up(tick) + 4:.1f}" text-anchor="end" fill="#555">{tick:,.0f}</text>')
    for count in counts:
        out.append(f'<text x="{at(count):.1f}" y="{y + HEIGHT + 18}" text-anchor="middle" fill="#555">{count}</text>')
    out.append(f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT + 36}" text-anchor="middle" fill="#555">conversations</text>')
    for name, colour in COLOURS.items():
        points = sorted((e["conversations"], e["engines"][name]) for e in entries if name in e["engines"])
        line = " ".join(f"{at(count):.1f},{up(s['median'] / unit):.1f}" for count, s in points)
        out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>' if points else "")
        for count, s in points:
            low, high = up(s["low"] / unit), up(s["high"] / unit)
            out.append(f'<path d="M{at(count):.1f} {low:.1f}V{high:.1f}" stroke="{colour}" stroke-width="1"/>')
            middle = up(s["median"] / unit)
            out.append(f'<circle cx="{at(count):.1f}" cy="{middle:.1f}" r="3.2" fill="{colour}"/>')
    return "".join(out)


def scale(greatest):
    """The top of an axis and the distance of its ticks: 1, 2 or 5 times a power of ten, at most six of them."""
    power = 1.0
    while power * 50 < greatest:
        power *= 10
    while power * 5 >= greatest and power > 1e-9:
        power /= 10
    step = next(power * m for m in (1, 2, 5, 10, 20, 50) if power * m * 6 >= greatest)
    ticks = -(-greatest // step)
    return max(1, ticks) * step, step
