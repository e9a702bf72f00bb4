"""The verdict of an audit: what its runs say about a method and its baselines, in words, from run folders alone.

Differences of leakage are paired: the same victim image, round and seed under both methods. Their interval resamples
whole clients (with several seeds: seeds first). No sentence claims more than its interval allows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from pflsec.core.statistics import FEWEST, TOO_FEW, paired_difference, summary
from pflsec.reports import controls, tables, threats, words
from pflsec.reports.load import RunData
from pflsec.reports.words import number, percent

NONE = "none"
Key = tuple[int, int, int, int, str]
"""A victim: seed, round, client, place among its client's victims, and the dataset's row numbers."""


@dataclass(frozen=True, eq=False)
class CellRun:
    """A finished run of an audit, and what the audit knows it as."""

    label: str
    role: str
    defense: str
    seed: int
    data: RunData

    @property
    def sends(self) -> bool:
        """Whether clients send anything at all."""
        return any(row["direction"] == "up" for row in self.data.manifest["wire"])


@dataclass(frozen=True)
class Victim:
    """One attacked victim batch: its client, its capped PSNR, and that of the blind guess."""

    client: int
    psnr: float
    blind: float


Group = Sequence[CellRun]
"""The runs of one method under one defense, one for each seed."""


def judge(label: str, runs: Group) -> dict[str, Any]:
    """Return the verdict on the audited method (`label`) as plain values; statements have a sentence in `words`."""
    groups: dict[tuple[str, str], list[CellRun]] = {}
    for run in runs:
        groups.setdefault((run.label, run.defense), []).append(run)
    data = [run.data for run in runs]
    leakage = tables.leakage_table(data)
    own = {defense: group for (name, defense), group in groups.items() if name == label}
    return {
        "method": label,
        "comparisons": [compare(*pair) for pair in _pairs(label, groups)],
        "defended": [compare(group, own[NONE]) for d, group in own.items() if d != NONE and NONE in own],
        "alone": [alone(group) for group in groups.values()],
        "privacy": [privacy(group) for (_, defense), group in groups.items() if defense != NONE],
        "controls": _controls(data),
        "not_applicable": _not_applicable(leakage),
        "threats": _threats(data, leakage),
        "untested": _untested(data, leakage),
        "cautions": _cautions(runs, leakage),
    }


def _pairs(label: str, groups: Mapping[tuple[str, str], Group]) -> list[tuple[Group, Group]]:
    """Return the audited method with each other method under the same defense; the control has none."""
    return [
        (groups[label, defense], other)
        for (name, defense), other in groups.items()
        if name != label and (label, defense) in groups
    ]


def compare(method: Group, baseline: Group) -> dict[str, Any]:
    """Return differences of accuracy and leakage, method minus baseline; attacks are those that both underwent."""
    same = method[0].label == baseline[0].label
    against = f"{baseline[0].label} undefended" if same else baseline[0].label
    attacks = [a for a in attack_names(method) if a in attack_names(baseline)]
    silent = next((g[0].label for g in (baseline, method) if not g[0].sends), None)
    leaks = [] if silent else [difference(method, baseline, attack) | {"attack": attack} for attack in attacks]
    accuracy = accuracies(method, baseline)
    who, under = method[0].label, _under(method[0].defense)
    head = f"{who}{under} against {against}" if same else f"{who} against {against}{under}"
    said = [f"{head}: {accuracy['words']}"] + [leak_words(one, against) for one in leaks]
    if silent:
        said.append(f"{silent} sends nothing, so there is no leakage to compare")
    result = {"method": method[0].label, "against": against, "defense": method[0].defense}
    return result | {"accuracy": accuracy, "leakage": leaks, "words": said}


def accuracies(method: Group, baseline: Group) -> dict[str, Any]:
    """Return the mean personal accuracies of the last tested round, averaged over the seeds that both have."""
    ours, theirs = ({run.seed: final_accuracy(run.data) for run in group} for group in (method, baseline))
    pairs = [(a, b) for seed, a in ours.items() if a is not None and (b := theirs.get(seed)) is not None]
    if not pairs:
        return {"method": None, "baseline": None, "difference": None, "seeds": 0, "words": "no accuracy to compare"}
    a, b = (float(np.mean(side)) for side in zip(*pairs, strict=True))
    each = "" if len(pairs) == 1 else f"; by seed {', '.join(f'{100 * (x - y):+.1f}' for x, y in pairs)}"
    seeds = f"{_seeds(len(pairs))}{each}"
    said = f"mean personal accuracy {percent(a)} and {percent(b)}, {100 * (a - b):+.1f} points ({seeds})"
    return {"method": a, "baseline": b, "difference": a - b, "seeds": len(pairs), "words": said}


def final_accuracy(run: RunData) -> float | None:
    """Return the mean personal accuracy of the last tested round, in [0, 1]."""
    tested = run.metrics["personal_accuracy_mean"].dropna()
    return None if tested.empty else float(tested.iloc[-1])


def attack_names(group: Group) -> list[str]:
    """Return the attacks that all runs of a group underwent, in the order of the first."""
    names = [[attack.name for attack in run.data.attacks] for run in group]
    return [name for name in dict.fromkeys(names[0]) if all(name in other for other in names)] if names else []


def victims(group: Group, attack: str) -> dict[Key, Victim]:
    """Return what an attack found of each victim. Victims without a score, and invalid ones, are left out."""
    found: dict[Key, Victim] = {}
    for run in group:
        for data in (a for a in run.data.attacks if a.name == attack):
            for row in tables.records(data.scores):
                if row["psnr_capped"] is None or row["attack_valid"] is False:
                    continue
                key = (run.seed, row["round"], row["client"], row["victim"], str(row["dataset_index"]))
                found[key] = Victim(row["client"], row["psnr_capped"], row["psnr_blind"])
    return found


def difference(method: Group, baseline: Group, attack: str) -> dict[str, Any]:
    """Return the paired difference of capped PSNR in dB, method minus baseline, over the victims that both have.

    n      pairs; `alone` counts victims with a score under one of the two only
    """
    ours, theirs = victims(method, attack), victims(baseline, attack)
    keys = [key for key in ours if key in theirs]
    clusters = [_cluster(key, ours[key], method) for key in keys]
    found = paired_difference([ours[k].psnr for k in keys], [theirs[k].psnr for k in keys], clusters)
    low, high = (None, None) if isinstance(found["ci"], str) else found["ci"]
    above = [v.psnr > v.blind for side in (ours, theirs) for k in keys for v in [side[k]]]
    equal = bool(keys) and all(ours[k].psnr == theirs[k].psnr for k in keys)
    one_sided = len(ours.keys() ^ theirs.keys())
    return {
        "mean": found["mean"], "low": low, "high": high, "n": found["n"], "alone": one_sided,
        "equal": equal, "above_blind": any(above), "verdict": found["verdict"],
    }  # fmt: skip


def leak_words(found: Mapping[str, Any], against: str) -> str:
    """Return the sentence for a difference of leakage."""
    under, n = f"under {found['attack']}", found["n"]
    rest = f"; {found['alone']} more victims have a score on one side only" if found["alone"] else ""
    rest += (
        "" if found["above_blind"] or not n else "; nothing on either side is above a blind guess, so this says little"
    )
    if not n:
        return f"no victim has a score on both sides {under}, so leakage cannot be compared{rest}"
    if found["low"] is None:
        why = "n too small for an interval" if found["verdict"] == TOO_FEW else f"{found['verdict']}, so no interval"
        return f"{found['mean']:+.1f} dB against {against} {under}, n = {n}: {why}{rest}"
    numbers = f"{found['mean']:+.1f} dB [{found['low']:.1f}, {found['high']:.1f}], n = {n}{rest}"
    if found["equal"]:
        return f"leaks exactly as much as {against} {under}, for every victim: {numbers}"
    word = {"lower": f"leaks less than {against}", "higher": f"leaks more than {against}"}
    return f"{word.get(found['verdict'], f'not distinguishable from {against}')} {under}: {numbers}"


def alone(group: Group) -> dict[str, Any]:
    """Return a method's accuracy, and its worst attack with the excess over a blind guess."""
    first = group[0]
    values = [a for run in group if (a := final_accuracy(run.data)) is not None]
    accuracy = float(np.mean(values)) if values else None
    result = {"label": first.label, "defense": first.defense, "accuracy": accuracy, "sends": first.sends}
    attacks = {name: list(found.values()) for name in attack_names(group) if (found := victims(group, name))}
    head = f"{first.label}{_under(first.defense)}: accuracy {percent(accuracy)}"
    if not first.sends:
        return result | {"attack": None, "words": f"{head}; sends nothing, so nothing can leak this way"}
    if not attacks:
        return result | {"attack": None, "words": f"{head}; no attack gave a score"}
    medians = {name: float(np.median([v.psnr for v in found])) for name, found in attacks.items()}
    name = max(medians, key=lambda a: medians[a])
    worst = victims(group, name)
    excess = summary([v.psnr - v.blind for v in worst.values()], [_cluster(k, v, group) for k, v in worst.items()])
    most, by = max((v.psnr, attack) for attack, found in attacks.items() for v in found)
    exposed = f"the victim rebuilt best: {number(most)} dB ({by})"
    said = f"{head}; worst attack {name}, median PSNR {number(medians[name])} dB, {_excess_words(excess)}; {exposed}"
    return result | {"attack": name, "psnr_max": most, "psnr_median": medians[name], "excess": excess, "words": said}


def _excess_words(excess: Mapping[str, Any]) -> str:
    numbers = f"{excess['mean']:+.1f} dB over a blind guess"
    if isinstance(excess["ci"], str):
        return f"{numbers}, n = {excess['n']}: {excess['ci']}, so nothing follows from this number alone"
    low, high = excess["ci"]
    tail = f"{numbers} [{low:.1f}, {high:.1f}], n = {excess['n']}"
    if low > 0:
        return f"{tail}: its messages leak"
    more = "a stronger attack may find more"
    return f"{tail}: {'below' if high < 0 else 'not distinguishable from'} a blind guess; {more}"


def privacy(group: Group) -> dict[str, Any]:
    """Return what a defended method's guarantee is, in words from its run.json."""
    first = group[0]
    head = f"{first.label}{_under(first.defense)}"
    dp = first.data.manifest.get("dp") or {}
    if not dp.get("enabled"):
        return {"label": first.label, "defense": first.defense, "words": f"{head}: no formal guarantee"}
    spent = [float(run.data.metrics["epsilon"].max()) for run in group]
    epsilon = max(spent, default=float("nan"))
    noise, delta = dp["noise_multiplier"], dp["delta"]
    uncovered = [f"{item} ({word})" for item, word in dp["coverage"].items() if word != "covered"]
    said = (
        f"{head}: epsilon {number(epsilon, 2)} (the largest over clients), delta {_range(delta)}, noise multiplier "
        f"{_range(noise)}; guarantee {dp['guarantee']}, against {dp['adversary']}"
        + (f"; apart from what it covers: {', '.join(uncovered)}" if uncovered else "")
        + ("; the noise was fixed by --dp-seed, so there is no guarantee" if dp.get("test_seed") else "")
    )
    facts = {"epsilon": epsilon, "delta": delta, "noise_multiplier": noise, "guarantee": dp["guarantee"]}
    return {"label": first.label, "defense": first.defense, **facts, "words": said}


def _range(values: Mapping[str, float]) -> str:
    low, high = values["least"], values["most"]
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _controls(data: Sequence[RunData]) -> list[str]:
    """Return what the controls say of each attack: whether it finds what must leak, and nothing where nothing can be found."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for run in data:
        for attack in run.attacks:
            said = controls.sentence(attack.meta).removeprefix("controls: ")
            found.setdefault((attack.name, controls.state(attack.meta)), []).append((run.name, said))
    return [
        f"{name}: {ones[0][1]}; on {', '.join(run for run, _ in ones) if len(ones) < len(data) else 'every run'}"
        for (name, _), ones in found.items()
    ]


def _not_applicable(leakage: pd.DataFrame) -> list[str]:
    rows = [row for row in tables.records(leakage) if row["not_applicable"]]
    return [f"{r['attack']} on {r['run']}: {r['not_applicable']} victims: {r['reasons']}" for r in rows]


def _threats(data: Sequence[RunData], leakage: pd.DataFrame) -> list[str]:
    found = threats.threats(data, leakage) if data else []
    return [f"{one.title}: the attacker is {one.who}. It knows {'; '.join(one.knows)}." for one in found]


def _untested(data: Sequence[RunData], leakage: pd.DataFrame) -> list[str]:
    """Return what the audit leaves open: the report's gaps, once, and the size of what was attacked."""
    if not data:
        return ["No cell was finished, so everything is open."]
    gaps, captured = threats.untested(data[:1], leakage), data[0].manifest["captures"]
    batch, steps = captured.get("batch"), captured.get("steps")
    size = f"Victim batches of {batch} with {steps} local steps: larger ones were not tried."
    code = (
        "Defenses are not proof against code that copies its data on purpose: read a method's file before you trust it."
    )
    return [*gaps, size, *([code] if any(run.config.get("defense") for run in data) else [])]


def _cautions(runs: Group, leakage: pd.DataFrame) -> list[str]:
    seeds = {run.seed for run in runs}
    few = leakage["victims"].max() if not leakage.empty else 0
    found = words.cautions([run.data for run in runs if run.seed == runs[0].seed], leakage) if runs else []
    if 0 < few * len(seeds) < tables.CLAIM:
        found.append(f"Fewer than {tables.CLAIM} victims: this illustrates, and supports no claim.")
    clients = leakage["clients"].max() if not leakage.empty else 0
    if 1 < clients < FEWEST and len(seeds) == 1:
        found.append(f"Only {clients} clients were attacked: an interval that resamples so few says little.")
    if len(seeds) == 1:
        found.append("One seed: differences of accuracy have no interval. Use --seeds.")
    return found


def _cluster(key: Key, victim: Victim, group: Group) -> Any:
    """Return what is resampled as a whole: the client, under its seed where there are several."""
    return (key[0], victim.client) if len({run.seed for run in group}) > 1 else victim.client


def _under(defense: str) -> str:
    return "" if defense == NONE else f" under {defense}"


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def lines(found: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the verdict as titled lists of sentences, empty ones left out."""
    compared = [_listed(one["words"]) for one in [*found["comparisons"], *found["defended"]]]
    parts = {
        "Verdict": compared or ["nothing to compare: no baseline was finished beside the method"],
        "Each method alone": [one["words"] for one in found["alone"]],
        "Guarantees": [one["words"] for one in found["privacy"]],
        "Controls of the attacks": found["controls"],
        "Refused": [f"{cell}: {reason}" for cell, reason in found.get("refused", {}).items()],
        "Failed": [f"{cell}: {reason}" for cell, reason in found.get("failed", {}).items()],
        "Not applicable": found["not_applicable"],
        "Threat model": found["threats"],
        "What was not tested": found["untested"],
        "Take care": found["cautions"],
    }
    return [(title, rows) for title, rows in parts.items() if rows]


def _listed(sentences: Sequence[str]) -> str:
    return "\n".join([sentences[0], *(f"  - {s}" for s in sentences[1:])])


def markdown(name: str, found: Mapping[str, Any]) -> str:
    """Return the verdict as a Markdown page."""
    body = [f"## {title}\n\n" + "\n".join(f"- {row}" for row in rows) for title, rows in lines(found)]
    unit = (
        f"Leakage is PSNR in dB, at most 100; differences are paired by victim and round, with the 95 % bootstrap "
        f"interval that resamples whole clients, from {FEWEST} pairs on."
    )
    return "\n\n".join([f"# Audit {name}: {found['method']}", unit, *body]) + "\n"
