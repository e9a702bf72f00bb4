"""Threat models in words: who attacked, knowing what, how private items were treated, and what was not tried."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd

from pflsec.core import registry
from pflsec.core.knowledge import ADVERSARIES, LETTERS, WHO, WORDS, Knows, letter_words
from pflsec.reports.load import RunData
from pflsec.reports.tables import records

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
