"""Draws the five pictures of docs/concepts.md: `python docs/generate/diagrams.py` writes docs/images/concept-*.svg.

Each lies on a light panel of its own, so that it reads the same on a light and on a dark page.
"""

from html import escape
from pathlib import Path

IMAGES = Path(__file__).parents[1] / "images"
INK, PAPER, LINE = "#1f2933", "#fafaf7", "#52606d"
SERVER, CLIENT, SECRET, SEEN = "#d9e2ec", "#e3f1e5", "#f6dcd8", "#fdf0c4"
FONT = "font-family='Helvetica, Arial, sans-serif'"


def panel(width: int, height: int, title: str, *parts: str) -> str:
    """Return a whole picture."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' role='img' {FONT} font-size='14' fill='{INK}'>"
        f"<title>{escape(title)}</title><defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='7' "
        f"markerHeight='7' orient='auto-start-reverse'><path d='M0 0L8 4L0 8z' fill='{LINE}'/></marker></defs>"
        f"<rect width='{width}' height='{height}' rx='10' fill='{PAPER}' stroke='#cbd2d9'/>{''.join(parts)}</svg>\n"
    )


def box(x: int, y: int, width: int, height: int, color: str, *lines: str, dashed: bool = False) -> str:
    """Return a box with centred lines of text, the first one bold."""
    dash = " stroke-dasharray='5 4'" if dashed else ""
    top = y + height / 2 - 9.5 * (len(lines) - 1) + 5
    middle = f"x='{x + width / 2}' text-anchor='middle'"
    words = "".join(
        f"<text {middle} y='{top + 19 * i}' font-weight='{400 if i else 700}'>{escape(line)}</text>"
        for i, line in enumerate(lines)
    )
    return (
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='6' fill='{color}' stroke='{LINE}'{dash}/>{words}"
    )


def arrow(x1: int, y1: int, x2: int, y2: int) -> str:
    """Return an arrow from one point to another."""
    return f"<path d='M{x1} {y1}L{x2} {y2}' stroke='{LINE}' stroke-width='1.6' fill='none' marker-end='url(#tip)'/>"


def note(x: int, y: int, words: str, anchor: str = "middle", color: str = INK) -> str:
    """Return a line of text."""
    return f"<text x='{x}' y='{y}' text-anchor='{anchor}' fill='{color}'>{escape(words)}</text>"


def rule(x: int, y1: int, y2: int, words: str) -> str:
    """Return a vertical dashed line with a word above it."""
    return f"<path d='M{x} {y1}L{x} {y2}' stroke='{LINE}' stroke-width='1.4' stroke-dasharray='3 5'/>" + note(
        x, y1 - 8, words
    )


def round_() -> str:
    """One round: down, local work, up, aggregate."""
    rows = [(46, "client 0"), (128, "client 1"), (210, "client 2")]
    parts = [box(30, 100, 170, 116, SERVER, "server", "items of round t", "aggregate: items", "of round t + 1")]
    for y, name in rows:
        lost = name == "client 2"
        parts += [box(480, y, 200, 62, CLIENT, name, "state, own data", "local work")]
        parts += [arrow(204, y + 22, 476, y + 22), arrow(476, y + 42, 330 if lost else 204, y + 42)]
        parts += [note(340, y + 16, "downlink"), note(400 if lost else 340, y + 58, "uplink")]
        parts += [note(322, y + 47, "lost", "end", "#9b1c1c")] if lost else []
    parts += [note(690, 298, "client 2 keeps its old state: its upload was not accepted", "end")]
    return panel(720, 316, "One round of a federation", *parts)


def wire() -> str:
    """What crosses the wire in FedRep, and what does not."""
    return panel(
        720, 250, "The wire of FedRep",
        box(30, 60, 170, 130, SERVER, "server", "body.*"),
        rule(360, 48, 220, "the wire"),
        arrow(206, 96, 494, 96), note(280, 88, "body.*"), note(440, 88, "weights"),
        arrow(494, 150, 206, 150), note(280, 142, "body.*"), note(440, 142, "weights"),
        box(500, 40, 190, 90, CLIENT, "client", "body.*"),
        box(500, 136, 190, 70, SECRET, "private", "head.*  never sent"),
        note(360, 240, "An item that the method did not declare stops the run."),
    )  # fmt: skip


def capture() -> str:
    """What a capture holds, and what lies in the vault."""
    return panel(
        720, 290, "A capture and the vault",
        box(30, 30, 190, 84, CLIENT, "client's local work", "on a victim batch,", "on a copy of its state"),
        arrow(224, 72, 296, 72),
        box(300, 30, 190, 84, SEEN, "capture", "downlink, uplink,", "public facts"),
        arrow(494, 72, 552, 72),
        box(556, 30, 134, 84, SERVER, "attack", "sees this alone"),
        arrow(125, 118, 125, 176),
        box(30, 180, 190, 78, SECRET, "vault", "true images, labels,", "private items"),
        arrow(224, 219, 552, 219),
        box(556, 180, 134, 78, SERVER, "score", "compares"),
        arrow(623, 118, 623, 176), note(632, 152, "guess", "start"),
        note(388, 210, "opened by scoring alone"),
    )  # fmt: skip


def knowledge() -> str:
    """What each adversary knows."""
    columns = ["method's code", "own messages", "settings", "history", "labels, private items"]
    rows = {
        "client": (1, 0, 1, 0, 0),
        "server-secagg": (1, 0, 1, 0, 0),
        "eavesdropper": (1, 1, 0, 0, 0),
        "server, wire": (1, 1, 1, 1, 0),
        "server, oracle": (1, 1, 1, 1, 1),
    }
    parts = []
    for j, title in enumerate(columns):
        parts += [note(226 + 112 * j, 34, title)] if j < 4 else [note(658, 34, "labels, private", "middle")]
    for i, (name, has) in enumerate(rows.items()):
        parts += [note(150, 74 + 40 * i, name, "end")]
        for j, known in enumerate(has):
            fill, word = (SEEN, "knows") if known else ("#ffffff", "no")
            parts += [
                f"<rect x='{172 + 112 * j}' y='{52 + 40 * i}' width='108' height='34' rx='4' fill='{fill}' stroke='#9aa5b1'/>",
                note(226 + 112 * j, 74 + 40 * i, word, color=INK if known else "#52606d"),
            ]
    parts += [note(370, 274, "client, server-secagg: something made of several messages, in place of single ones")]
    return panel(740, 292, "What the adversaries know", *parts)


def hidden() -> str:
    """The four ways to treat what the client hides."""
    ways = [
        ("log", "computed from", "earlier messages"),
        ("joint", "optimised with", "the image"),
        ("cotangent", "its gradient at", "the features instead"),
        ("guess", "drawn as a", "newcomer would"),
        ("oracle", "given:", "an upper bound"),
    ]
    parts = [
        box(30, 30, 150, 60, SEEN, "guess of image"), arrow(184, 60, 246, 60),
        box(250, 30, 230, 60, CLIENT, "the client's own code", "(replay)"), arrow(484, 60, 546, 60),
        box(550, 30, 160, 60, SEEN, "would-be upload", "compare, improve"),
        box(290, 130, 150, 46, SECRET, "hidden state?", dashed=True), arrow(365, 128, 365, 94),
    ]  # fmt: skip
    for i, way in enumerate(ways):
        parts += [box(22 + 141 * i, 206, 132, 72, PAPER, *way)]
    return panel(740, 300, "Hidden state", *parts)


if __name__ == "__main__":
    for draw in (round_, wire, capture, knowledge, hidden):
        (IMAGES / f"concept-{draw.__name__.strip('_')}.svg").write_text(draw(), encoding="utf8")
