"""Runs that differ by their seed alone, taken together: the spread over seeds says how much of a number is chance."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pflsec.core.files import to_json
from pflsec.reports.load import RunData

CHANGE_NOTHING = ("seed", "executor", "workers")
"""Options in which the runs of a group may differ: the seed, and what has no influence on results."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one configuration, each with another seed; often a single one, whose name the group has."""

    name: str
    runs: Sequence[RunData]

    @property
    def algo(self) -> str:
        """The key of the method."""
        return self.runs[0].key

    @property
    def defense(self) -> str:
        """The defenses in their order, joined by +, or none."""
        return self.runs[0].defense

    @property
    def run_names(self) -> str:
        """The names of the runs, joined by commas."""
        return ", ".join(run.name for run in self.runs)


def by_seed(runs: Sequence[RunData]) -> list[Group]:
    """Return the runs in groups, in order of appearance. A second run with the same seed is no other seed: it stands apart."""
    found: dict[tuple[str, int], list[RunData]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for run in runs:
        configuration, seed = _configuration(run), str(run.config.get("seed"))
        found.setdefault((configuration, seen[configuration, seed]), []).append(run)
        seen[configuration, seed] += 1
    names = _names(list(found.values()))
    return [Group(name, members) for name, members in zip(names, found.values(), strict=True)]


def _configuration(run: RunData) -> str:
    """Return everything that defines a run but its seed, as text."""
    algorithm, options = run.manifest["algorithm"], dict(sorted(run.config.items()))
    fixed = {name: value for name, value in options.items() if name not in CHANGE_NOTHING}
    network = [run.manifest["model"].get(name) for name in ("name", "parameters")]
    return to_json([algorithm["key"], algorithm["settings"], fixed, network, run.manifest["data"]["name"]], indent=None)


def _names(groups: Sequence[Sequence[RunData]]) -> list[str]:
    """Return a name for each group: its run's, or the method with its defenses; the runs are listed where that is ambiguous."""
    short = [runs[0].name if len(runs) == 1 else _method(runs[0], len(runs)) for runs in groups]
    twice = {name for name, count in Counter(short).items() if count > 1}
    return [
        f"{name}: {', '.join(run.name for run in runs)}" if name in twice else name
        for name, runs in zip(short, groups, strict=True)
    ]


def _method(run: RunData, seeds: int) -> str:
    defense = "" if run.defense == "none" else f" + {run.defense}"
    return f"{run.key}{defense} ({seeds} seeds)"
