"""The pages of the site that are made from the code: a page per method, attack, defense, dataset and model, and the commands.

All of it comes from the cards (docstrings, wire contracts, settings), from the classes and from docs/tables, so that no page
can say what the code does not. Nothing is written to disk.
"""

import html
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from typer.main import get_command

from pflsec.cli.app import app
from pflsec.core import registry
from pflsec.core.knowledge import WORDS, Knows
from pflsec.models import catalogue

TABLES = Path(__file__).parents[1] / "tables"
ROOT = "reference"
SINGULAR = {group: group.removesuffix("s") for group in registry.GROUPS} | {"algorithms": "method"}
TITLES = {group: group.capitalize() for group in registry.GROUPS} | {"algorithms": "Methods"}
FORMULAS = ("Solves", "Wire", "Private")
FAMILIES = (
    "traditional",
    "meta_learning",
    "regularization",
    "personalized_aggregation",
    "model_splitting",
    "knowledge_distillation",
    "other",
)
SOURCE = {"paper": "in the paper", "pfllib": "in PFLlib"}
Row = Sequence[Any]


@dataclass(frozen=True)
class Measured:
    """One row of one table of docs/tables, with the words that stand above the table."""

    file: str
    caption: str
    header: list[str]
    row: list[str]


def pages() -> dict[str, str]:
    """Return {path in the docs folder: Markdown} of all generated pages."""
    found = {f"{ROOT}/commands.md": commands()}
    for group in registry.GROUPS:
        found[f"{ROOT}/{group}/index.md"] = index(group)
        found |= {uri(group, name): page(group, name) for name in registry.names(group)}
    return found


def navigation() -> list[dict[str, Any]]:
    """Return the part of the site's navigation that leads to the generated pages."""
    entries: list[dict[str, Any]] = [{"Commands": f"{ROOT}/commands.md"}]
    for group in registry.GROUPS:
        inner: list[Any] = [f"{ROOT}/{group}/index.md"]
        if group == "algorithms":
            inner += [{words(f): [{n: uri(group, n)} for n in names]} for f, names in families().items()]
        else:
            inner += [{name: uri(group, name)} for name in registry.names(group)]
        entries.append({TITLES[group]: inner})
    return entries


def uri(group: str, name: str) -> str:
    """Return the path of the page of a registered thing."""
    return f"{ROOT}/{group}/{name}.md"


def families() -> dict[str, list[str]]:
    """Return the methods by family: ours in the order of the folders, then those that other packages add."""
    by_family: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for name in registry.names("algorithms"):
        by_family.setdefault(registry.card("algorithms", name).family, []).append(name)
    return {family: names for family, names in by_family.items() if names}


def index(group: str) -> str:
    """Return the page that lists a group."""
    lines = [f"# {TITLES[group]}", ""]
    if group == "algorithms":
        for family, names in families().items():
            lines += [
                f"## {words(family)}",
                "",
                *table(["method", "what it is", "private training"], map(_line, names)),
                "",
            ]
    else:
        rows = [[f"[{n}]({n}.md)", text(registry.card(group, n).title)] for n in registry.names(group)]
        lines += [*table([SINGULAR[group], "what it is"], rows), ""]
    return "\n".join([*lines, f"The same on the terminal: `pflsec list {group}`.", ""])


def _line(name: str) -> Row:
    covered = registry.load("algorithms", name).dp_support.partition(":")[0]
    return [f"[{name}]({name}.md)", text(registry.card("algorithms", name).title), covered]


def page(group: str, name: str) -> str:
    """Return the page of one registered thing."""
    card = registry.card(group, name)
    lines = [f"# {name}", "", text(card.title), "", *_use(group, name, card), *_sections(card)]
    lines += {"algorithms": _method, "attacks": _attack, "defenses": _defense, "models": _model}.get(
        group, lambda name: []
    )(name)
    lines += [*_settings(card), *_presets(name, card), *_measurements(name)]
    return "\n".join(lines)


def _use(group: str, name: str, card: registry.Card) -> list[str]:
    called = [name, *card.attributes.get("aliases", ())]
    path = ":PATH" if group == "datasets" and inspect.signature(registry.load(group, name)).parameters else ""
    knobs = ":NAME=VALUE" if card.settings else ""
    example = {
        "algorithms": f"pflsec train --algo {name}",
        "attacks": f"pflsec attack {called[-1]}",
        "defenses": f"pflsec train --defense {name}{knobs}",
        "datasets": f"pflsec train --data {name}{path}",
        "models": f"pflsec train --model {name}",
    }[group]
    where = f"A {SINGULAR[group]} of the family *{words(card.family)}*. " if group == "algorithms" else ""
    also = f" Also called {', '.join(called[1:])}." if called[1:] else ""
    return [f"{where}Use: `{example}`. This card on the terminal: `pflsec show {name}`.{also}", ""]


def _sections(card: registry.Card) -> list[str]:
    rows = [[f"**{label}**", code(v) if label in FORMULAS else text(v)] for label, v in card.sections.items()]
    return [*table(["card", ""], rows), ""]


def _method(name: str) -> list[str]:
    kind = registry.load("algorithms", name)
    rows = [
        [direction, code(item.rstrip("?")), text(what), "in some configurations" if item.endswith("?") else "always"]
        for direction, declared in (("down", kind.down), ("up", kind.up))
        for item, what in declared.items()
    ]
    rows += [["stays", code(f"{part}.*"), "weights", "never sent"] for part in kind.private]
    wire = table(["direction", "item", "kind and shape", "sent"], rows) if rows else ["Nothing crosses the wire."]
    about = "See [the wire](../../concepts.md#the-wire) for the words; `C` is the number of classes, `d` the feature dimension."
    return [
        "## What crosses the wire", "", *wire, "", *([about, ""] if rows else []),
        "## Private training", "", _support(kind.dp_support), "",
        "## Networks with BatchNorm", "", _batchnorm(kind.batchnorm), "",
    ]  # fmt: skip


def _support(declared: str) -> str:
    level, _, reason = declared.partition(": ")
    if level == "full":
        return "**Covered.** All that is sent follows from gradients that `dp-sgd` has noised, or is a public sample count."
    covers = "would cover only a part of what is sent" if level == "partial" else "would not cover what is sent"
    return f"**Refused.** `dp-sgd` {covers}{': ' + text(reason) if reason else ''}."


def _batchnorm(declared: str) -> str:
    level, _, reason = declared.partition(": ")
    says = {
        "yes": "Any of `--buffers aggregate`, `local` and `frozen`.",
        "local": "`--buffers local` or `frozen`; `aggregate` is refused",
        "no": "`--buffers frozen` alone; others are refused",
    }[level]
    return says + (f": {text(reason)}." if reason else "")


def _attack(name: str) -> list[str]:
    needs = registry.load("attacks", name).needs
    rows = [[code(need.value), text(WORDS[need])] for need in Knows if need in needs]
    after = "Settings that use more (`--labels known`, `--hidden log`, `--hidden oracle`) need more."
    return [
        "## What it must know", "", *table(["flag", "grants"], rows), "",
        f"What is not granted is refused: see [threat models](../../threat-models.md). {after}", "",
    ]  # fmt: skip


def _defense(name: str) -> list[str]:
    seam = registry.load("defenses", name).seam
    where = {
        "step": "inside local training, at each gradient",
        "uplink": "on the client, on what it sends, before it is captured: attacks see the result",
        "aggregate": "on the server, on what it makes of the accepted uploads: the server itself sees the uploads as they are",
    }[seam]
    return ["## Where it acts", "", f"Seam `{seam}`: {where}. What it claims and what not: "
            "[choose a defense](../../howto/choose-a-defense.md).", ""]  # fmt: skip


def _model(name: str) -> list[str]:
    rows = []
    if "vocabulary" in inspect.signature(registry.load("models", name)).parameters:
        sizes: list[tuple[tuple[int, ...], int, int | None]] = [((32,), 4, 2000)]
    else:
        sizes = [((1, 8, 8), 10, None), ((1, 28, 28), 10, None), ((3, 32, 32), 10, None)]
    for shape, classes, vocabulary in sizes:
        net = catalogue.build(name, shape, classes, vocabulary=vocabulary)
        inputs = " x ".join(map(str, shape)) if vocabulary is None else f"{shape[0]} tokens of {vocabulary:,} words"
        rows.append([inputs, classes, f"{net.size():,}", net.feature_dim])
    return ["## Size", "", *table(["input", "classes", "parameters", "features"], rows), ""]


def _settings(card: registry.Card) -> list[str]:
    if not card.settings:
        return []
    cited = sorted({source for s in card.settings for source in s.cited}, key=lambda s: (s != "paper", s))
    header = ["setting", "default", "allowed", *(SOURCE.get(s, s) for s in cited), "meaning"]
    rows = [
        [
            *(code(s.name), code(s.default), text(s.rule or allowed(s.type))),
            *(text(s.cited.get(source, "")) for source in cited),
            text(s.about),
        ]
        for s in card.settings
    ]
    how = f"`--defense {card.key}:NAME=VALUE,...`" if card.group == "defenses" else "`--set NAME=VALUE`"
    return ["## Settings", "", f"Given as {how}.", "", *table(header, rows), ""]


def _presets(name: str, card: registry.Card) -> list[str]:
    if not (presets := card.attributes.get("presets")):
        return []
    lines = ["## Presets", "", "Published settings, with those of the common options that the source names.", ""]
    rows = [
        [code(f"--preset {p}"), code(", ".join(f"{k}={v}" for k, v in values.items()))] for p, values in presets.items()
    ]
    return [*lines, *table(["preset", "sets"], rows), ""]


def _measurements(name: str) -> list[str]:
    found = measured(name)
    if not found:
        return []
    lines = ["## What the tables say", ""]
    for one in found:
        lines += [
            f"{text(one.caption)} ([whole table](../../tables/{one.file}))",
            "",
            *table(one.header, [one.row]),
            "",
        ]
    return [*lines, "How these were made: [accuracy](../../accuracy.md), [leakage](../../leakage.md). What a low number does "
            "and does not mean: [reading low numbers](../../low-numbers.md).", ""]  # fmt: skip


def measured(name: str) -> list[Measured]:
    """Return the rows of all tables of docs/tables that are about a method or an attack, in the order of the files."""
    return [one for path in sorted(TABLES.glob("*.md")) for one in _rows(path) if one.row[_subject(one.header)] == name]


def _subject(header: Sequence[str]) -> int:
    return next((i for i, cell in enumerate(header) if cell in ("method", "attack")), 0)


def _rows(path: Path) -> Iterator[Measured]:
    """Yield the rows of the tables in a Markdown file. The caption of a table is the line above it, else the file's name."""
    caption, header = "", []
    for line in path.read_text(encoding="utf8").splitlines():
        if not line.startswith("|"):
            header = []
            caption = line.lstrip("# ").strip() or caption
        elif not header:
            header = cells(line)
        elif set(line) - set("|-: "):
            yield Measured(path.name, CAPTIONS.get(path.stem, "{}").format(caption), header, cells(line))


CAPTIONS = {
    "leakage-digits": "Leakage, digits, inverting-gradients, median PSNR in dB, {} (images, steps)",
    "accuracy-digits": "Accuracy and traffic, digits, 20 clients, 20 rounds",
    "accuracy-mnist300": "Accuracy and traffic, MNIST (300 rows a client), 10 rounds",
    "rounds-digits": "Seconds a round, digits",
    "memory-digits": "What a client keeps between rounds, digits",
    "attack-baselines": "Beside the reference code, PSNR in dB",
}
"""Captions by file; {} is the line above the table, which is the caption of any other file's."""


def cells(line: str) -> list[str]:
    """Return the cells of one line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def commands() -> str:
    """Return the page of all commands with their options, as `--help` says."""
    lines = ["# Commands", "", "What `pflsec COMMAND --help` prints.", ""]
    program: Any = get_command(app)
    for path, command in _leaves("pflsec", program.commands):
        lines += [f"## {path}", "", *_help(inspect.cleandoc(command.help or "")), ""]
        rows = [
            [
                code(" ".join(p.opts) if p.opts[0].startswith("-") else p.metavar or p.name),
                text(getattr(p, "help", "") or ""),
            ]
            for p in command.params
        ]
        lines += [*table(["argument or option", "meaning"], rows), ""]
    return "\n".join(lines)


def _leaves(path: str, commands: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, command in commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(f"{path} {name}", command.commands)
        else:
            yield f"{path} {name}", command


def _help(said: str) -> Iterator[str]:
    """Yield a command's help as Markdown: what is indented in it, commands and contents of files, becomes a block."""
    for indented, paragraphs in groupby(said.split("\n\n"), lambda paragraph: paragraph.startswith("  ")):
        if indented:
            yield from ("```text", *(paragraph.strip() for paragraph in paragraphs), "```", "")
        else:
            yield from (f"{text(paragraph)}\n" for paragraph in paragraphs)


def table(header: Sequence[str], rows: Any) -> list[str]:
    """Return a Markdown table; cells are Markdown."""
    lines = [[*header], ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def text(value: str) -> str:
    """Return text as Markdown that shows it as it is, but what stands between two backticks as code."""
    parts = re.split(r"`([^`]+)`", " ".join(str(value).split()))
    return "".join(code(part) if i % 2 else _literal(part) for i, part in enumerate(parts))


def _literal(value: str) -> str:
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", html.escape(value, quote=False))


def code(value: str) -> str:
    """Return text as code, also within a cell of a table."""
    shown = html.escape(str(value), quote=False)
    for sign in "|*_`[]\\":
        shown = shown.replace(sign, f"&#{ord(sign)};")
    return f"<code>{shown}</code>"


def words(family: str) -> str:
    """Return a family's name in words."""
    return family.replace("_", " ").capitalize()


def allowed(annotation: str) -> str:
    """Return what a type annotation allows, for readers who do not read Python."""
    names = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}
    inner = annotation.removeprefix("Literal[").removesuffix("]").replace("'", "")
    return inner.replace(", ", " or ") if annotation.startswith("Literal") else names.get(annotation, annotation)
