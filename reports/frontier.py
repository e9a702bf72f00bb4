"""The privacy-utility frontier: a point for each method, the methods that no other beats in both, and the controls."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any, Literal

from pflsec.core.errors import ConfigError, unknown
from pflsec.reports import controls, tables, words
from pflsec.reports.commands import undefended
from pflsec.reports.groups import Group, by_seed
from pflsec.reports.load import AttackData, RunData
from pflsec.reports.tables.headline import VOID, unseen

Kind = Literal["defended", "undefended", "nothing on the wire"]
Row = Mapping[str, Any]
NOTHING: Kind = "nothing on the wire"


@dataclass(frozen=True)
class Axis:
    """What x can be: its words, the table with its rows and their column, that of the blind guess, and how it is written."""

    about: str
    rows: Callable[[Sequence[RunData]], Any]
    column: str
    blind: str
    written: Callable[[float], str]


def _decibel(value: float) -> str:
    return words.number(value)


def _ratio(value: float) -> str:
    return words.number(value, 2)


X = {
    "leakage": Axis("median PSNR of the worst attack in dB", tables.leakage_table, "psnr_median", "psnr_blind", _decibel),
    "recall": Axis("share of the words of texts that the worst attack recovers", tables.tokens_table, "recall",
                   "recall_blind", words.percent),
    "ssim": Axis("mean SSIM of the attack with the highest", tables.leakage_table, "ssim", "", _ratio),
    "identified": Axis("share of victims identified by the attack with the highest", tables.leakage_table, "identified", "",
                       words.percent),
    "epsilon": Axis("epsilon of the guarantee, the largest over clients; no guarantee: infinite", tables.accuracy_table,
                    "epsilon", "", _ratio),
}  # fmt: skip
Y = {
    "accuracy": "mean personal accuracy",
    "global": "accuracy of the global model",
    "worst10": "accuracy of the worst tenth of the clients",
}


@dataclass(frozen=True)
class Point:
    """A method in the plane: less x is more private, more y more useful. Several runs: means over seeds, sample SD as spread.

    attack, naive, knowledge  what x comes from: the strongest attack of each run; naive: it ignores the defense
    n              attacked victims over all runs
    blind          x of the guess made without any message
    untrained      x of the attacks on the captures of round 0: what the architecture alone gives away
    epsilon, unit  what is guaranteed, for whom; None: nothing
    """

    name: str
    runs: str
    seeds: int
    algo: str
    defense: str
    kind: Kind
    x: float
    y: float
    x_spread: float | None = None
    y_spread: float | None = None
    attack: str = ""
    naive: bool = False
    adversary: str = ""
    knowledge: str = ""
    controls: str = ""
    n: int = 0
    blind: float | None = None
    untrained: float | None = None
    epsilon: float | None = None
    unit: str = ""
    pareto: bool = False


@dataclass(frozen=True)
class Unseen:
    """A method with an accuracy but no leakage, because no single upload of it can be seen."""

    name: str
    runs: str
    algo: str
    defense: str
    y: float
    reason: str


@dataclass(frozen=True)
class Frontier:
    """All points; for each run that has none the reason; what the controls are; why runs may not be set against each other."""

    x: str
    y: str
    points: list[Point]
    unseen: list[Unseen] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    controls: list[str] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)

    @property
    def blind(self) -> float | None:
        """The median over methods of what no message at all gives; PSNR and recovered words have one."""
        levels = [p.blind for p in self.points if p.blind is not None]
        return median(levels) if levels else None


@dataclass(frozen=True)
class _Seed:
    """One run's share of a point. x is NaN where nothing is sent and no blind guess was measured."""

    x: float
    y: float
    worst: Row = field(default_factory=dict)
    blind: float | None = None
    untrained: float | None = None
    epsilon: float | None = None


def measure(runs: Sequence[RunData], x: str = "leakage", y: str = "accuracy") -> Frontier:
    """Return the frontier of runs; the leakage of runs on texts alone is the share of recovered words.

    Raises ConfigError for an x or y that is not one of X and Y.
    """
    for what, name, known in (("--x", x, X), ("--y", y, Y)):
        if name not in known:
            raise ConfigError(unknown(what, name, known))
    if x == "leakage" and runs and all(run.holds_texts for run in runs):
        x = "recall"
    groups, missing = by_seed(runs), {}
    points, hidden = [], []
    for group in groups:
        seeds = {run.name: _seed(run, x, y) for run in group.runs}
        good = [seed for seed in seeds.values() if isinstance(seed, _Seed)]
        reasons = {name: seed for name, seed in seeds.items() if isinstance(seed, str)}
        if good:
            points.append(_point(group, good, len(good)))
        elif x != "epsilon" and unseen(group.runs[0]) and (heights := _heights(group, y)):
            hidden.append(
                Unseen(group.name, group.run_names, group.algo, group.defense, fmean(heights), unseen(group.runs[0]))
            )
            continue
        missing |= reasons
    found = Frontier(x, y, points, hidden, missing, _control_sentences(groups, points), _cautions(runs, groups))
    cautions = [*found.cautions, *_reference_cautions(found, groups), *_unit_cautions(found)]
    return replace(found, points=_marked(found), cautions=cautions)


def _marked(found: Frontier) -> list[Point]:
    """Return the points in order, those that no other beats marked; below a guess nothing is more private than a guess."""
    level = found.blind
    floor = -math.inf if level is None else level
    placed = [replace(p, x=level or 0.0) if math.isnan(p.x) else p for p in found.points]
    best = pareto([(max(p.x, floor), p.y) for p in placed])
    marked = [replace(p, pareto=i in best) for i, p in enumerate(placed)]
    return sorted(marked, key=lambda p: (p.x, -p.y, p.name))


def pareto(places: Sequence[tuple[float, float]]) -> set[int]:
    """Return which places no other beats: none has as little x and as much y, and more of one. Equals stay together."""
    return {i for i, (x, y) in enumerate(places) if not any(a <= x and b >= y and (a < x or b > y) for a, b in places)}


def _point(group: Group, seeds: Sequence[_Seed], count: int) -> Point:
    """Return the point of a group: the mean over its seeds, and their spread from two on."""
    rows = [seed.worst for seed in seeds if seed.worst]
    said: Callable[[str], str] = lambda name: ", ".join(dict.fromkeys(str(row[name]) for row in rows))  # noqa: E731
    kind: Kind = "undefended" if group.defense == "none" else "defended"
    epsilons = [seed.epsilon for seed in seeds if seed.epsilon is not None]
    return Point(
        name=group.name,
        runs=group.run_names,
        seeds=count,
        algo=group.algo,
        defense=group.defense,
        kind=kind if group.runs[0].sends else NOTHING,
        x=fmean(seed.x for seed in seeds),
        y=fmean(seed.y for seed in seeds),
        x_spread=_spread([seed.x for seed in seeds]),
        y_spread=_spread([seed.y for seed in seeds]),
        attack=said("attack"),
        naive=any(row["naive"] for row in rows),
        adversary=said("adversary"),
        knowledge=said("knowledge"),
        controls=said("controls"),
        n=sum(int(row["victims" if "victims" in row else "texts"]) for row in rows),
        blind=_mean(seed.blind for seed in seeds),
        untrained=_mean(seed.untrained for seed in seeds),
        epsilon=max(epsilons, default=None),
        unit=tables.epsilon_unit(group.runs[0]) if epsilons else "",
    )


def _spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation, from two finite values on."""
    return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _seed(run: RunData, x: str, y: str) -> _Seed | str:
    """Return a run's place, or why it has none."""
    final = next(row for row in tables.records(tables.accuracy_table([run])) if row["at"] == "final")
    height = final["mean" if y == "accuracy" else y]
    if not isinstance(height, float):
        return "its method has no global model" if height == "none" else "no round has been tested"
    epsilon = None if final["epsilon"] is None or tables.no_guarantee(run) else float(final["epsilon"])
    if x == "epsilon":
        return _Seed(0.0 if not run.sends else math.inf if epsilon is None else epsilon, height, epsilon=epsilon)
    if x in ("leakage", "recall") and (x == "recall") != run.holds_texts:
        return (
            "its data are texts, of which words leak: --x recall"
            if run.holds_texts
            else "its data are images: --x leakage"
        )
    axis = X[x]
    if not run.sends:
        level = _blind_level(run, axis)
        return _Seed((math.nan if level is None else level) if axis.blind else 0.0, height, blind=level)
    rows = tables.records(axis.rows([run]))
    found = _worst(rows, axis.column)
    if found is None:
        return unseen(run) or _unscored(run, rows)
    start = _worst(tables.records(axis.rows([_untrained(run)])), axis.column)
    return _Seed(
        x=float(found[axis.column]),
        y=height,
        worst=found,
        blind=found[axis.blind] if axis.blind else None,
        untrained=start[axis.column] if start else None,
        epsilon=epsilon,
    )


def _worst(rows: Iterable[Row], name: str) -> Row | None:
    """Return the row with the highest value: of attacks on what the wire shows, or of all where there is none such.

    An attack that rebuilds from numbers which say nothing (the negative control) is no evidence of a leak.
    """
    scored = [row for row in rows if row[name] is not None and not controls.void(row["controls"])]
    wire = [row for row in scored if row["knowledge"] == "wire"]
    return max(wire or scored, key=lambda row: row[name], default=None)


def _unscored(run: RunData, rows: Sequence[Row]) -> str:
    if not run.attacks:
        return "it has not been attacked"
    if any(controls.void(row["controls"]) for row in rows):
        return VOID
    table = tables.records(tables.leakage_table([run]))
    reasons = "; ".join(sorted({row[why] for row in table for why in ("reasons", "not_valid_reasons")} - {""}))
    return f"no attack gave a score{': ' + reasons if reasons else ''}"


def _untrained(run: RunData) -> RunData:
    """Return the run with nothing but what was found of round 0, before anybody had trained."""
    return replace(run, attacks=[_of_round_0(attack) for attack in run.attacks])


def _of_round_0(attack: AttackData) -> AttackData:
    first = attack.tokens["capture"].astype(str).str.startswith("r000-")
    return replace(attack, scores=attack.scores[attack.scores["round"] == 0], tokens=attack.tokens[first])


def _blind_level(run: RunData, axis: Axis) -> float | None:
    """Return what the guess without any message reaches on a run's victims, None where it was not measured."""
    if axis.column == "recall":
        levels = [attack.tokens["recall_blind"].astype(float).dropna() for attack in run.attacks]
    else:
        levels = [tables.victims_table([run])["psnr_blind"].dropna()] if axis.blind else []
    values = [float(value) for part in levels for value in part]
    return median(values) if values else None


def _heights(group: Group, y: str) -> list[float]:
    final = [row for row in tables.records(tables.accuracy_table(group.runs)) if row["at"] == "final"]
    heights = [row["mean" if y == "accuracy" else y] for row in final]
    return [height for height in heights if isinstance(height, float)]


def _cautions(runs: Sequence[RunData], groups: Sequence[Group]) -> list[str]:
    unequal = [
        f"The seeds of {group.name} were not all attacked by the same attacks."
        for group in groups
        if len({frozenset(attack.id for attack in run.attacks) for run in group.runs}) > 1
    ]
    return [*words.cautions(runs, tables.leakage_table(runs)), *unequal]


def _reference_cautions(found: Frontier, groups: Sequence[Group]) -> list[str]:
    """Return for each method that has defended runs here, but no point without a defense, why, and how to get one."""
    said, placed = [], {p.algo for p in found.points if p.defense == "none"}
    defended = {group.algo: group for group in reversed(groups) if group.defense != "none"}
    for algo in sorted(defended.keys() - placed):
        bare = [run.name for group in groups if group.algo == algo and group.defense == "none" for run in group.runs]
        reasons = [f"{name}: {found.missing[name]}" for name in bare if name in found.missing]
        how = "; ".join(reasons) or f"train it with: {undefended(defended[algo].runs[0])}"
        said.append(f"The point of {algo} without a defense is missing, so its defended ones have no reference; {how}.")
    return said


def _unit_cautions(found: Frontier) -> list[str]:
    """Return that an axis of epsilons has several units, where it does."""
    units = {p.unit for p in found.points if p.epsilon is not None}
    if found.x != "epsilon" or len(units) < 2:
        return []
    return [f"Epsilons per {' and per '.join(sorted(units))} stand on one axis, and are not comparable."]


def _control_sentences(groups: Sequence[Group], points: Sequence[Point]) -> list[str]:
    """Return for each kind of control what it is here, or that it is missing and how to get it."""
    silent = [group.name for group in groups if not group.runs[0].sends]
    alone = (
        f"No communication: {', '.join(silent)}. What is accurate without sending anything needs no defense."
        if silent
        else "No communication: no run of local is among these; make one with: pflsec train --algo local."
    )
    early = [p.name for p in points if p.untrained is not None]
    architecture = (
        "Architecture only: attacks on round 0, before anybody has trained, of "
        f"{', '.join(early)}; drawn at the accuracy of the trained method, which an untrained one does not have."
        if early
        else "Architecture only: no capture of round 0 was attacked; capture it with --capture-rounds first,last."
    )
    return [alone, *_undefended(groups), architecture]


def _undefended(groups: Sequence[Group]) -> list[str]:
    """Return for each defended method which run of it has no defense, or that there is none."""
    bare: dict[str, list[str]] = {}
    for group in groups:
        if group.defense == "none":
            bare.setdefault(group.algo, []).append(group.name)
    defended = dict.fromkeys(group.algo for group in groups if group.defense != "none")
    if not defended:
        return ["No defense: no run here has a defense, so each is its own control."]
    return [
        f"No defense: {algo} without one is {', '.join(bare[algo])}."
        if algo in bare
        else f"No defense: no run of {algo} without one is among these, so what its defense costs and hides is not known."
        for algo in defended
    ]


def table(found: Frontier) -> list[list[str]]:
    """Return a row of text for each point and each method of which nothing is seen, the header first."""
    header = ["method", "pareto", "defense", "epsilon", found.x, found.y, "n", "attack", "mark"]
    rows = [
        [
            p.name,
            "*" if p.pareto else "",
            p.defense,
            epsilon_text(p),
            x_text(found, p),
            spread(words.percent(p.y), p.y_spread, words.percent),
            str(p.n) if p.attack else words.DASH,
            attack_text(p),
            p.kind,
        ]
        for p in found.points
    ]
    dash = words.DASH
    hidden = [[u.name, "", u.defense, dash, u.reason, words.percent(u.y), dash, "", "defended"] for u in found.unseen]
    return [header, *rows, *hidden]


def spread(value: str, deviation: float | None, written: Callable[[float], str]) -> str:
    """Return "value ± SD over seeds", or the value alone where there is a single seed."""
    return value if deviation is None else f"{value} ± {written(deviation)}"


def epsilon_text(point: Point) -> str:
    """Return a point's epsilon with the unit it protects."""
    return words.DASH if point.epsilon is None else f"{point.epsilon:.2f} per {point.unit}"


def attack_text(point: Point) -> str:
    """Return which attack x comes from, and what is particular about it."""
    granted = [] if point.knowledge in ("wire", "") else [f"knowledge: {point.knowledge}"]
    marks = granted + (["naive"] if point.naive else [])
    return f"{point.attack} ({', '.join(marks)})" if marks else point.attack


def x_text(found: Frontier, point: Point) -> str:
    """Return a point's x as text."""
    written = X[found.x].written
    return "infinite" if math.isinf(point.x) else spread(written(point.x), point.x_spread, written)
