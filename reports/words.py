"""What the tables say, in sentences: headlines, findings, and what must stand beside them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import pandas as pd

from pflsec.core.statistics import verdict
from pflsec.reports import controls
from pflsec.reports.commands import command
from pflsec.reports.groups import by_seed
from pflsec.reports.load import RunData
from pflsec.reports.tables import CLAIM, SUCCESS, mixed_table, records, tokens_table
from pflsec.reports.tables.headline import unseen

Row = Mapping[str, Any]
DASH = "–"


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


def accuracy_of(means: Sequence[float | None]) -> str:
    """Return the mean accuracy over seeds, with the sample standard deviation from two on; a dash where one is missing."""
    known = [value for value in means if value is not None]
    if len(known) < len(means):
        return DASH
    return percent(fmean(known)) + (f" ± {percent(stdev(known))}" if len(known) > 1 else "")


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
    whole = f", in {of_clients(row['summed'])}" if row["summed"] > 1 else ""
    return f"round {row['round']}, client {row['client']}, victim {row['victim']}{kind}{whole}"


def of_clients(count: int) -> str:
    """Return what an adversary saw who saw no single upload."""
    return f"a sum over {count} clients"


def measured(row: Row, name: str) -> str:
    """Return a number of a headline in its measure: PSNR in dB, or a share of words."""
    return percent(row[name]) if row["measure"] == "recall" else f"{number(row[name])} dB"


def headline_sentence(row: Row) -> str:
    """Return the worst case of one method in words, with what must stand beside it; `row` is one of the headline table."""
    lost = [f"{row[name]} {word}" for name, word in (("not_valid", "not valid"), ("not_applicable", "not applicable"))
            if row[name]]  # fmt: skip
    without = f" Victims in no number: {', '.join(lost)}." if lost else ""
    if not row["attack"]:
        return f"There is no worst case: {row['note']}.{without}"
    words = row["measure"] == "recall"
    worst = f"{measured(row, 'worst')} of the words" if words else measured(row, "worst")
    low, high = percent(row["success_low"]), percent(row["success_high"])
    share = with_interval(percent(row["success"]), low, high, row["note"])
    whole = "have all their words recovered" if words else f"reach {SUCCESS:.0f} dB"
    where = place(row) if row["seeds"] == 1 else f"{row['run']}, {place(row)}"
    naive = " The attacker ignores the defense (naive): one who does not may find more." if row["naive"] else ""
    note = f" {row['note'].capitalize()}: this supports no claim." if row["note"] else ""
    return (
        f"Worst case over rounds and victims, on what the wire shows: {worst} by {row['attack']} ({where}; a blind guess: "
        f"{measured(row, 'blind')}). Over the {row['n']} victims of that attack: mean {mean(row)}; {share} {whole}."
        f"{naive}{note}{without}"
    )


def mean(row: Row) -> str:
    """Return a headline's mean with its interval, or with the reason why there is none."""
    ends = [number(row[name]) if row["measure"] == "psnr" else percent(row[name]) for name in ("low", "high")]
    return with_interval(measured(row, "mean"), ends[0], ends[1], row["interval_note"])


def control_sentences(run: RunData) -> list[str]:
    """Return what the controls of a run's attacks say, one sentence for all that say the same."""
    said: dict[str, list[str]] = {}
    for attack in run.attacks:
        said.setdefault(controls.sentence(attack.meta), []).append(attack.name)
    return [f"{', '.join(dict.fromkeys(names))}: {text}." for text, names in said.items()]


def worst(rows: Iterable[Row]) -> Row | None:
    """Return the row of the leakage table with the highest median PSNR that is evidence, or None where none has one."""
    scored = [row for row in rows if row["psnr_median"] is not None and not controls.void(row["controls"])]
    return max(scored, key=lambda row: (row["psnr_median"], row["psnr_mean"]), default=None)


def leakage_sentences(run: RunData, rows: Sequence[Row]) -> list[str]:
    """Return what the worst attacks found; `rows` are the run's rows of the leakage table."""
    if not rows and (reason := unseen(run)):
        return [f"{reason[0].upper()}{reason[1:]}."]
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
    elif run.holds_texts:
        sentences += _word_sentences(run)
    elif by_wire:
        sentences.append("No attack on what the wire shows gave an image.")
    sentences += _mixed_sentences(run)
    if found := worst(granted):
        sentences.append(f"With {found['knowledge']} knowledge, which goes beyond the wire: " + _leak(found))
    most = max(row["victims"] for row in rows)
    if 0 < most < CLAIM:
        sentences.append(f"Fewer than {CLAIM} victims: this illustrates, and supports no claim.")
    return sentences


def _mixed_sentences(run: RunData) -> list[str]:
    """Return how well the mixed images were rebuilt that clients trained on, on what the wire shows; nothing without such."""
    rows = [row for row in records(mixed_table([run])) if row["knowledge"] == "wire"]
    rows = [row for row in rows if not controls.void(row["controls"])]
    if not rows:
        return []
    most = max(rows, key=lambda row: row["psnr_mixed"])
    naive = " (naive)" if most["naive"] else ""
    images = "1 mixed image at" if most["images"] == 1 else f"{most['images']} mixed images at a median of"
    return [
        f"Clients trained on mixtures of their images: a low PSNR against a single one is no privacy. {most['attack']}{naive} "
        f"rebuilt {images} {number(most['psnr_mixed'])} dB (blind guess "
        f"{number(most['psnr_mixed_blind'])} dB); the part of each that shows best, after scale and shift, at "
        f"{number(most['psnr_part'])} dB (blind guess {number(most['psnr_part_blind'])} dB)."
    ]


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
        f"{row['attack']}{' (naive)' if row['naive'] else ''} by the {row['adversary']}, median PSNR "
        f"{number(row['psnr_median'])} dB over "
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
    """Return why numbers of these runs may not be set against each other; seeds of one configuration are as one run."""
    groups = [group.runs for group in by_seed(runs)]
    facts: dict[str, set[Any]] = {
        "dataset": {run.manifest["data"]["name"] for run in runs},
        "partition": {frozenset(str(run.manifest["data"].get("partition")) for run in group) for group in groups},
        "network": {(run.manifest["model"].get("name"), run.manifest["model"].get("parameters")) for run in runs},
        "running statistics": {run.manifest["model"].get("bn_buffers", "n/a") for run in runs},
        "seed": {frozenset(run.config.get("seed") for run in group) for group in groups},
        "number of rounds": {len(run.metrics) for run in runs},
        "size of the victim batches": set(leakage["batch"].dropna()),
        "local steps on them": set(leakage["steps"].dropna()),
        "adversary": _by_run(leakage, "adversary"),
        "kind of captures": _by_run(leakage, "kind"),
    }
    unequal = [name for name, values in facts.items() if len(values) > 1]
    said = [f"Not everything is equal here: {', '.join(unequal)}. Compare with care."] if unequal else []
    return said + _mixed_cautions(runs) + _sum_cautions(leakage)


def _by_run(leakage: pd.DataFrame, name: str) -> set[frozenset[str]]:
    """Return what the attacks on each run have in a column of the leakage table; equal runs are one."""
    return {frozenset(values) for _, values in leakage.groupby("run")[name]}


def _mixed_cautions(runs: Sequence[RunData]) -> list[str]:
    """Return that the PSNR of runs whose clients train on mixed images is not about what the network saw, if there are any."""
    names = [run.name for run in runs if any(len(attack.mixed) for attack in run.attacks)]
    if not names:
        return []
    return [
        f"The clients of {', '.join(names)} train on mixtures of their images. Worst cases and frontier compare with single "
        "images, and a low number there is no privacy: see Mixed images."
    ]


def _sum_cautions(leakage: pd.DataFrame) -> list[str]:
    """Return that sums and single uploads, or sums of other sizes, stand side by side, where they do."""
    scored = leakage[leakage["victims"] > 0]
    counts = sorted(set(scored["summed"]))
    if len(counts) < 2:
        return []
    sums = "; ".join(
        f"{', '.join(dict.fromkeys(scored[scored['summed'] == count]['run']))}: "
        f"{of_clients(count) if count > 1 else 'single uploads'}"
        for count in counts
    )
    return [f"What was attacked holds other numbers of clients, and its numbers are not comparable: {sums}."]


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
