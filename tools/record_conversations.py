"""Record four conversations at once with a running server, as an animated SVG (docs/four-conversations.svg).

    motet serve --model MODEL --port 8080 &
    python record_conversations.py http://127.0.0.1:8080 [OUTPUT.svg]

Each pane is one client; every piece of text appears at the moment at which it arrived.
"""

import json
import sys
import textwrap
import threading
import time
import urllib.request
from html import escape
from pathlib import Path

PROMPTS = [
    "Tell me a story.",
    "What is the capital of France?",
    "Count to 12.",
    "Who are you?",
]
COLUMNS, LINES = 52, 9
CHAR, LINE, PAD = 7.25, 17, 14
WIDTH, HEIGHT = COLUMNS * CHAR + 2 * PAD, (LINES + 2) * LINE + 2 * PAD


def ask(url, prompt, start, pieces):
    """Streams one answer; appends (seconds since start, text) as it arrives."""
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0, "max_tokens": 90}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", []):
                    text = choice["delta"].get("content")
                    if text:
                        pieces.append((time.monotonic() - start, text))


def pane(x, y, prompt, pieces, stretch):
    """One client's window: its prompt, and its answer wrapped into lines whose words appear in time."""
    out = [f'<g transform="translate({x},{y})"><rect width="{WIDTH}" height="{HEIGHT}" rx="8"/>']
    out.append(f'<text x="{PAD}" y="{PAD + LINE}" class="prompt">&gt; {escape(prompt)}</text>')
    text, times = "", []
    for at, piece in pieces:
        text += piece
        times += [at * stretch] * len(piece)
    row, position = 0, 0
    for paragraph in text.split("\n"):
        for line in textwrap.wrap(paragraph, COLUMNS) or [""]:
            if row == LINES:
                break
            here = text.index(line, position) if line else position
            position = here + len(line)
            y_line = PAD + (row + 2.4) * LINE
            spans, column = [], 0
            for word in line.split(" "):
                at = times[min(here + column, len(times) - 1)] if times else 0
                spans.append(f'<tspan style="animation-delay:{at:.2f}s">{escape(word)} </tspan>')
                column += len(word) + 1
            out.append(f'<text x="{PAD}" y="{y_line:.1f}" xml:space="preserve">{"".join(spans)}</text>')
            row += 1
    out.append("</g>")
    return "".join(out)


def main():
    url = sys.argv[1].rstrip("/")
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent.parent / "docs" / "four-conversations.svg"
    start, recorded = time.monotonic(), [[] for _ in PROMPTS]
    clients = [threading.Thread(target=ask, args=(url, p, start, r)) for p, r in zip(PROMPTS, recorded, strict=True)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    last = max((pieces[-1][0] for pieces in recorded if pieces), default=1.0)
    # What takes less than three seconds is shown slower.
    stretch = max(1.0, 3.0 / last)
    panes = [
        pane(i % 2 * (WIDTH + 10), i // 2 * (HEIGHT + 10), prompt, pieces, stretch)
        for i, (prompt, pieces) in enumerate(zip(PROMPTS, recorded, strict=True))
    ]
    width, height = 2 * WIDTH + 10, 2 * HEIGHT + 10 + 26
    caption = f"four clients, one engine; all answers complete after {last:.2f} s"
    if stretch > 1:
        caption += f" (shown {stretch:.0f} times slower)"
    target.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-size="12" '
        'font-family="ui-monospace,Menlo,Consolas,monospace"><style>rect{fill:#16181d;stroke:#3a3f4b}text{fill:#d7dae0}'
        ".prompt{fill:#7fb4ff}.caption{fill:#7a8290}tspan{opacity:0;animation:show .01s forwards}"
        "@keyframes show{to{opacity:1}}@media(prefers-reduced-motion:reduce){tspan{opacity:1;animation:none}}</style>"
        f'{"".join(panes)}<text class="caption" x="4" y="{height - 6:.0f}">{caption}</text></svg>\n'
    )
    print(f"{target}: {sum(len(p) for p in recorded)} pieces in {last:.2f} s")


if __name__ == "__main__":
    main()
