"""What the tables say, in sentences: headlines, threat models, gaps, and the commands that repeat a run."""

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from pflsec.core import registry
from pflsec.core.files import plain
from pflsec.core.knowledge import ADVERSARIES, LETTERS, WHO, WORDS, Knows, letter_words
from pflsec.core.statistics import verdict
from pflsec.reports import controls
from pflsec.reports.load import AttackData, RunData
from pflsec.reports.tables import CLAIM, SUCCESS, records, tokens_table

Row = Mapping[str, Any]
DASH = "–"
HIDDEN = {
    "none": "the method keeps no private items",
    "public": "private items equal the public start, so they are known",
    "log": "private items are computed from earlier messages",
    "guess": "private items are drawn as a newcomer would draw them",
    "joint": "private items are unknowns, optimised together with the data",
    "cotangent": "the unknown gradient at the features is optimised in place of the hidden head",
    "oracle": "private items are given: an upper bound",
}
LABELS = {
    "restore": "labels are worked out by rule from the message",
    "wire": "labels come from a label set that is itself on the wire",
    "optimise": "labels are optimised together with the image",
    "known": "labels are given: an upper bound",
    "counts": "the number of images of each class is given: an upper bound",
    "none": "labels are not needed, and none are found",
}
OWN_FLAGS = ("iterations", "restarts", "labels", "hidden")
LPIPS = re.compile(r"lpips_([a-z]+)")


def percent(value: float | None) -> str:
    """Return a share in [0, 1] as per cent with one decimal, on one line; a dash when it is missing."""
    return DASH if value is None or math.isnan(value) else f"{100 * value:.1f}\u00a0%"


def number(value: float | None, digits: int = 1) -> str:
    """Return a number with fixed decimals, a dash when it is missing."""
    return DASH if value is None or math.isnan(value) else f"{value:.{digits}f}"


def with_interval(value: str, low: str, high: str, note: str) -> str:
    """Return "value [low, high]", or "value (why there is no interval)"; low is a dash when there is none."""
    if value == DASH:
        return value
    return f"{value} ({note})" if low == DASH and note else value if low == DASH else f"{value} [{low}, {high}]"


def accuracy_sentences(run: RunData, final: Row | None) -> list[str]:
    """Return how the run ended and how accurate it is; `final` is its row of the accuracy table."""
    state, reason = run.manifest["state"], run.manifest.get("reason") or "no reason was recorded"
    ended = {
        "running": "The run has not been closed: its numbers are those of the rounds written so far.",
        "interrupted": "The run was interrupted, and can go on.",
        "failed": f"The run failed: {reason}. To train it again, see How to repeat.",
    }
    sentences = [ended[state]] if state in ended else []
    if final is None or final["mean"] is None:
        return [*sentences, "No round has been tested, so there is no accuracy."]
    common = "" if final["global"] == "none" else f", the global model {percent(final['global'])}"
    return [
        *sentences,
        f"Mean personal accuracy is {percent(final['mean'])} after {final['rounds']} of "
        f"{final['rounds_planned']} rounds; the worst tenth of the clients has {percent(final['worst10'])}"
        f"{common}.",
    ]


def batchnorm_sentences(run: RunData) -> list[str]:
    """Return what became of running statistics, where the model has BatchNorm layers."""
    policy = run.manifest["model"].get("bn_buffers", "n/a")
    if policy == "n/a":
        return []
    if policy == "frozen":
        return [
            "The model has BatchNorm layers. Their running statistics are frozen at 0 and 1, in training as in testing."
        ]
    if any(row["direction"] == "up" and row["kind"] == "buffers" for row in run.manifest["wire"]):
        return [
            "The model has BatchNorm layers. Their running statistics are sent and averaged like weights, which gives away the "
            "moments of a batch in every such layer; a global model is tested with the averaged ones."
        ]
    return [
        "The model has BatchNorm layers. Their running statistics never leave a client, which is tested with its own; so "
        "there is no global model."
    ]


def place(row: Row) -> str:
    """Return whose batch a row of the headlines is about."""
    kind = "" if row["kind"] == "probe" else f", {row['kind']}"
    return f"round {row['round']}, client {row['client']}, victim {row['victim']}{kind}"


def headline_sentence(row: Row) -> str:
    """Return the worst case of one run in words, with what must stand beside it; `row` is one of the headline table."""
    lost = [f"{row[name]} {word}" for name, word in (("not_valid", "not valid"), ("not_applicable", "not applicable"))
            if row[name]]  # fmt: skip
    without = f" Victims in no number: {', '.join(lost)}." if lost else ""
    if not row["attack"]:
        return f"There is no worst case: {row['note']}.{without}"
    low, high = number(row["psnr_low"]), number(row["psnr_high"])
    mean = with_interval(f"{number(row['psnr_mean'])} dB", low, high, row["psnr_note"])
    low, high = percent(row["success_low"]), percent(row["success_high"])
    share = with_interval(percent(row["success"]), low, high, row["note"])
    note = f" {row['note'].capitalize()}: this supports no claim." if row["note"] else ""
    return (
        f"Worst case over rounds and victims, on what the wire shows: {number(row['psnr_max'])} dB by {row['attack']} "
        f"({place(row)}; a blind guess: {number(row['psnr_blind'])} dB). Over the {row['n']} victims of that attack: mean "
        f"{mean}; {share} reach {SUCCESS:.0f} dB.{note}{without}"
    )


def control_sentences(run: RunData) -> list[str]:
    """Return what the controls of a run's attacks say, one sentence for all that say the same."""
    said: dict[str, list[str]] = {}
    for attack in run.attacks:
        said.setdefault(controls.sentence(attack.meta), []).append(attack.name)
    return [f"{', '.join(dict.fromkeys(names))}: {text}." for text, names in said.items()]


def worst(rows: Iterable[Row]) -> Row | None:
    """Return the row of the leakage table with the highest median PSNR, or None where none has one."""
    scored = [row for row in rows if row["psnr_median"] is not None]
    return max(scored, key=lambda row: (row["psnr_median"], row["psnr_mean"]), default=None)


def leakage_sentences(run: RunData, rows: Sequence[Row]) -> list[str]:
    """Return what the worst attacks found; `rows` are the run's rows of the leakage table."""
    if not run.attacks and not run.manifest["captures"].get("rounds"):
        again = "Train it again with --capture-rounds first,last."
        return [f"The run captured no messages, so nothing can be attacked. {again}"]
    if not rows:
        return ["No attack has been run, so nothing is known of what the messages give away."]
    by_wire = [row for row in rows if row["knowledge"] == "wire"]
    granted = [row for row in rows if row["knowledge"] != "wire"]
    sentences = []
    if found := worst(by_wire):
        sentences += ["Worst attack on what the wire shows: " + _leak(found), _judgement(found)]
    elif run.input.vocabulary is not None:
        sentences += _word_sentences(run)
    elif by_wire:
        sentences.append("No attack on what the wire shows gave an image.")
    if found := worst(granted):
        sentences.append(f"With {found['knowledge']} knowledge, which goes beyond the wire: " + _leak(found))
    most = max(row["victims"] for row in rows)
    if 0 < most < CLAIM:
        sentences.append(f"Fewer than {CLAIM} victims: this illustrates, and supports no claim.")
    return sentences


def _word_sentences(run: RunData) -> list[str]:
    """Return what the attack that recovers most words finds of texts, on what the wire shows."""
    rows = [row for row in records(tokens_table([run])) if row["knowledge"] == "wire"]
    if not rows:
        return ["No attack on what the wire shows gave a text."]
    most = max(rows, key=lambda row: (row["recall"], row["precision"]))
    return [
        f"Worst attack on what the wire shows: {most['attack']} by the {most['adversary']} recovers {percent(most['recall'])} of "
        f"the words of {most['texts']} texts (a guess without any message: {percent(most['recall_blind'])}), and all words of "
        f"{percent(most['multiset'])} of them."
    ]


def _leak(row: Row) -> str:
    low, high = number(row["excess_low"]), number(row["excess_high"])
    interval = f"95 % interval {low} to {high}" if low != DASH else row["excess_note"]
    lost = f" ({row['not_valid']} more are not valid)" if row["not_valid"] else ""
    identified = "" if row["identified"] is None else f"; {percent(row['identified'])} of the victims identified"
    return (
        f"{row['attack']} by the {row['adversary']}, median PSNR {number(row['psnr_median'])} dB over "
        f"{row['victims']} victims{lost}, on average {number(row['excess_mean'])} dB above a blind guess "
        f"({interval}){identified}."
    )


def _judgement(row: Row) -> str:
    """Return what the interval of the excess allows to say."""
    if row["excess_low"] is None:
        return "There is no interval, so nothing follows from this number alone."
    found = verdict((row["excess_low"], row["excess_high"]))
    more = "a stronger attack may find more."
    return {
        "higher": "That is above what can be guessed without any message: the messages leak.",
        "lower": "That is below what can be guessed without any message; " + more,
    }.get(
        found,
        "That is not distinguishable from a guess without any message; " + more,
    )


def cautions(runs: Sequence[RunData], leakage: pd.DataFrame) -> list[str]:
    """Return why numbers of these runs may not be set against each other."""
    facts = {
        "dataset": {run.manifest["data"]["name"] for run in runs},
        "partition": {str(run.manifest["data"].get("partition")) for run in runs},
        "network": {(run.manifest["model"].get("name"), run.manifest["model"].get("parameters")) for run in runs},
        "running statistics": {run.manifest["model"].get("bn_buffers", "n/a") for run in runs},
        "seed": {run.config.get("seed") for run in runs},
        "number of rounds": {len(run.metrics) for run in runs},
        "size of the victim batches": set(leakage["batch"].dropna()),
        "local steps on them": set(leakage["steps"].dropna()),
    }
    unequal = [name for name, values in facts.items() if len(values) > 1]
    return [f"Not everything is equal here: {', '.join(unequal)}. Compare with care."] if unequal else []


def next_steps(run: RunData) -> list[str]:
    """Return the commands that make what the run still lacks."""
    state, name = run.manifest["state"], run.path.name
    steps = [command("pflsec train --resume", name)] if state == "interrupted" else []
    if not run.attacks and run.manifest["captures"].get("rounds"):
        steps.append(command("pflsec attack dlg", name))
    return steps


def keeps(run: RunData) -> str:
    """Return whether the method keeps a part of the model from the wire."""
    parts = [row["item"] for row in run.manifest["wire"] if row["direction"] == "private"]
    return f"Never sent: {', '.join(parts)}." if parts else "No part of the model stays private."


def lpips_remedies(runs: Iterable[RunData]) -> list[str]:
    """Return how to get LPIPS, once for each distinct remedy; nothing where it was measured or off."""
    notes = [attack.meta.get("lpips") or {} for run in runs for attack in run.attacks]
    missing = [note for note in notes if note.get("status") not in (None, "ok", "off")]
    return list(dict.fromkeys(f"{n.get('name', 'LPIPS')} ({n['status']}): {n.get('remedy') or ''}" for n in missing))


@dataclass(frozen=True)
class Threat:
    """One adversary with one level of knowledge, and what was tried with it."""

    title: str
    who: str
    knows: list[str]
    tried: list[str]


def threats(runs: Sequence[RunData], leakage: pd.DataFrame) -> list[Threat]:
    """Return the threat models of all attacks, each once, with the treatment of labels and private items."""
    granted: dict[tuple[str, str], set[str]] = {}
    letters: dict[tuple[str, str], set[str]] = {}
    for attack in (attack for run in runs for attack in run.attacks):
        model = attack.meta["threat_model"]
        pair = model["adversary"], model["knowledge"]
        granted.setdefault(pair, set()).update(map(str, model.get("knows", [])))
        letters.setdefault(pair, set()).update(filter(None, [model.get("letter")]))
    return [
        Threat(
            title=f"{adversary}, knowledge: {knowledge}{_lettered(letters[adversary, knowledge])}",
            who=WHO.get(adversary, adversary),
            knows=[WORDS[k] for k in Knows if k in knows] + sorted(knows - set(Knows)),
            tried=_treatments(leakage[(leakage["adversary"] == adversary) & (leakage["knowledge"] == knowledge)]),
        )
        for (adversary, knowledge), knows in granted.items()
    ]


def _lettered(letters: Iterable[str]) -> str:
    """Return the letters of a survey under which a threat model was asked for, with what they stand for here."""
    return "".join(f"; threat model {name}: {letter_words(name)}" for name in sorted(set(letters) & set(LETTERS)))


def _treatments(rows: pd.DataFrame) -> list[str]:
    """Return one line for each treatment of labels and private items, with the attacks that used it."""
    used: dict[str, list[str]] = {}
    for row in records(rows):
        if row["victims"]:
            keys: list[tuple[dict[str, str], str]]
            keys = [(HIDDEN, row["hidden"]), *((LABELS, word) for word in row["labels"].split(", "))]
            words = "; ".join(known.get(key, key) for known, key in keys if key)
            used.setdefault(words or "nothing is recorded", []).append(f"{row['attack']} on {row['run']}")
    return [f"{', '.join(dict.fromkeys(names))}: {words}." for words, names in used.items()]


def untested(runs: Sequence[RunData], leakage: pd.DataFrame) -> list[str]:
    """Return what these attacks leave open."""
    if leakage.empty:
        return ["Nothing was attacked, so everything is open.", *map(_uncaptured, runs)]
    tried = {name: set(leakage[name]) for name in ("attack", "adversary", "knowledge", "kind")}
    others = [WHO[a] for a in ADVERSARIES if a not in tried["adversary"]]
    attacks = [name for name in registry.names("attacks") if name not in tried["attack"]]
    gaps = [f"Adversaries that were not tried: {'; '.join(others)}."] if others else []
    if "oracle" not in tried["knowledge"]:
        gaps.append("The upper bound (oracle knowledge) was not measured: --knowledge oracle.")
    if "wire" not in tried["knowledge"]:
        gaps.append("No attack was limited to what the wire shows: --knowledge wire.")
    if attacks:
        gaps.append(f"Attacks of this installation that were not run: {', '.join(attacks)}.")
    if "update" not in tried["kind"]:
        gaps.append("Probes were attacked (small batches), not the real uploads after whole local epochs.")
    return [
        *gaps,
        *map(_uncaptured, runs),
        "A low number bounds these attacks, not stronger ones.",
    ]


def _uncaptured(run: RunData) -> str:
    captured, clients = run.manifest["captures"], run.config.get("clients")
    rounds = ", ".join(map(str, captured.get("rounds", []))) or "none"
    count = len(captured.get("clients", []))
    return f"{run.name}: messages of {count} of {clients} clients were captured, in rounds {rounds}."


def command(begin: str, *arguments: str) -> str:
    """Return a command line with quoted arguments."""
    return " ".join([begin, *map(shlex.quote, arguments)])


def commands(run: RunData) -> str:
    """Return the command lines that train and attack the run again, every setting spelt out."""
    options = {k: v for k, v in run.config.items() if k not in ("settings", "defense")}
    words = [_flag(name, value) for name, value in options.items() if value is not None]
    words += [command("--defense", str(text)) for text in run.config.get("defense") or []]
    words += _assignments(run.manifest["algorithm"]["settings"])
    lines = [_folded("pflsec train", [*words, command("--name", run.path.name)])]
    lines += [_attack_command(run, attack) for attack in run.attacks]
    return "\n".join([*lines, command("pflsec report", run.path.name)])


def _attack_command(run: RunData, attack: AttackData) -> str:
    meta, captures = attack.meta, attack.captures
    config, threat = meta["config"], meta["threat_model"]
    words = [command(f"--{name}", threat[name]) for name in ("adversary", "knowledge")]
    for flag, values in (
        ("--rounds", {c.round for c in captures}),
        ("--clients", {c.client for c in captures}),
    ):
        words += [f"{flag} {','.join(map(str, sorted(values)))}"] if values else []
    words += [command("--kind", kind) for kind in sorted({c.kind for c in captures})]
    words += [_flag(name, config[name]) for name in OWN_FLAGS if config.get(name) is not None]
    words += _assignments({k: v for k, v in config.items() if k not in OWN_FLAGS})
    if net := LPIPS.match(str((meta.get("lpips") or {}).get("name"))):
        words.append(f"--lpips {net[1]}")
    if "switched off" in controls.sentence(meta):
        words.append("--no-controls")
    if meta.get("seed") is not None:
        words.append(f"--seed {meta['seed']}")
    return _folded(command("pflsec attack", attack.name, run.path.name), words)


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return command(flag, ",".join(map(str, value)) if isinstance(value, list) else str(plain(value)))


def _assignments(settings: Mapping[str, Any]) -> list[str]:
    """Return a method's or attack's own settings as --set NAME=VALUE."""
    said = {None: "none", True: "true", False: "false"}
    return [
        command("--set", f"{name}={said[value] if value is None or isinstance(value, bool) else value}")
        for name, value in settings.items()
    ]


def _folded(begin: str, words: Sequence[str], width: int = 100) -> str:
    """Return a command on lines of about `width` characters, continued with backslashes."""
    lines = [begin]
    for word in words:
        if len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)
