"""The grid that a sweep's file describes: every mistake in it shows here, with its line, before anything is run.

name = "frontier-digits"
[train]              # options of `pflsec train`; a list is an axis of the grid
algo = ["fedavg", "fedprox"]
defense = [[], ["dp-sgd:epsilon=8"]]
seed = [0, 1]
[settings.fedprox]   # a method's own settings; a list is an axis
mu = [0.01, 0.1]
[[attack]]           # options of `pflsec attack`; as many such tables as you like
name = "ig"
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from pflsec.config.attack import AttackConfig
from pflsec.config.train import TrainConfig
from pflsec.core import registry
from pflsec.core.config import Config, option, sentence
from pflsec.core.errors import PflsecError, did_you_mean, first_line
from pflsec.core.files import plain, safe_name
from pflsec.runtime.defending import why_unseen
from pflsec.sweep.plan import EXECUTION, Attack, Cell, Checker, Training, slug
from pflsec.sweep.toml import Key, TomlFile, read

MOST = 5_000
"""More trainings than this are a slip of the keyboard."""
ELSEWHERE = {
    "settings": "a method's settings stand in a table of their own, [settings.METHOD]",
    "executor": "say --executor on the command line",
    "workers": "say --workers on the command line",
    "name": "a sweep's name stands at the top of the file, and its runs are named by their place in the grid",
    "runs_dir": "say --runs-dir on the command line",
}


class SweepFile(Config):
    """What a sweep's file may hold."""

    name: str
    train: dict[str, Any] = option(default={})
    settings: dict[str, dict[str, Any]] = option(default={})
    attack: list[dict[str, Any]] = option(default=[])


@dataclass(frozen=True)
class Sweep:
    """A sweep that may be run: its name, the names of its axes, its cells and its attacks."""

    name: str
    axes: tuple[str, ...]
    cells: list[Cell]
    attacks: list[Attack]


@dataclass(frozen=True)
class Axis:
    """The values of one option, and where they stand. single: the file gives one value, and no list."""

    name: str
    key: Key
    values: list[Any]
    single: bool


def load(path: Path) -> Sweep:
    """Return the sweep that a file describes. Raises ConfigError with file, line, key, reason and remedy."""
    file = read(path)
    content = _built(SweepFile, file.values, file, (), "a sweep")
    try:
        safe_name(content.name, "sweep name")
    except PflsecError as error:
        raise file.mistake(("name",), str(error)) from None
    train = [_train_axis(file, name, value) for name, value in content.train.items()]
    own = {method: axes for name, table in content.settings.items() for method, axes in _settings(file, name, table)}
    trainings = list(_grid(file, train, own))
    attacks = _labelled([_attack(file, i, table) for i, table in enumerate(content.attack)])
    cells = _checked(file, trainings)
    _check_attacks(file, attacks, cells)
    return Sweep(content.name, _axis_names(train, own), cells, attacks)


# --- the axes


def _train_axis(file: TomlFile, name: str, value: Any) -> Axis:
    """Return an option's axis, each value checked by itself."""
    known = [n for n in (*TrainConfig.model_fields, "preset") if n not in ELSEWHERE]
    if name in ELSEWHERE:
        raise file.mistake(("train", name), f"[train] takes no '{name}': {ELSEWHERE[name]}.")
    if name not in known:
        raise file.mistake(("train", name), f"train has no option '{name}'{did_you_mean(name, known)}")
    axis = _axis(file, ("train", name), value, name != "preset" and _is_list(TrainConfig, name))
    for one in axis.values:
        if name != "preset":
            _check_value(TrainConfig, name, one, file, axis.key, "train")
        elif not isinstance(one, str):
            raise file.mistake(axis.key, f"train: preset is {_shown(one)}; it must be a name, such as paper.")
    return axis


def _settings(file: TomlFile, name: str, table: Mapping[str, Any]) -> Iterator[tuple[str, list[Axis]]]:
    """Yield a method's registered name, and the axes of its settings."""
    try:
        method = registry.find("algorithms", name)
        kind = registry.load("algorithms", method).Config
    except PflsecError as error:
        raise file.mistake(("settings", name), f"settings of {name}: {error}") from None
    axes = []
    for key, value in table.items():
        axis = _axis(file, ("settings", name, key), value, _is_list(kind, key))
        for one in axis.values:
            _check_value(kind, key, one, file, axis.key, name)
        axes.append(replace(axis, name=f"{name}.{key}"))
    yield method, axes


def _axis(file: TomlFile, key: Key, value: Any, takes_list: bool) -> Axis:
    """Return the axis of a value: a list is one, of lists where the option itself takes a list."""
    name = str(key[-1])
    listed = isinstance(value, list)
    several = listed and (not takes_list or (bool(value) and all(isinstance(one, list) for one in value)))
    if takes_list and listed and not several and any(isinstance(one, list) for one in value):
        raise file.mistake(key, f'{name} has lists and single values: as an axis it is a list of lists, [[], ["..."]].')
    values = value if several else [value]
    if not values:
        raise file.mistake(
            key, f"{name} is an empty axis, so there is nothing to run: give it a value, or leave it out."
        )
    twice = [one for i, one in enumerate(values) if one in values[:i]]
    if twice:
        raise file.mistake(key, f"{name} has {_shown(twice[0])} twice, so cells would be the same: drop one.")
    return Axis(name, key, values, not several)


def _is_list(model: type[BaseModel], name: str) -> bool:
    """Return whether an option's own value is a list."""
    if name not in model.model_fields:
        return False
    kind = model.model_fields[name].annotation
    return list in {get_origin(one) or one for one in (kind, *get_args(kind))}


# --- the grid


def _grid(file: TomlFile, train: Sequence[Axis], own: Mapping[str, Sequence[Axis]]) -> Iterator[Training]:
    """Yield the trainings: every combination of the axes, with those of the method's own settings."""
    algos = next((axis for axis in train if axis.name == "algo"), Axis("algo", ("train",), ["fedavg"], True))
    used = {algo: registry.find("algorithms", algo) for algo in algos.values}
    for method, axes in own.items():
        if method not in used.values():
            name = axes[0].key[1] if axes else method
            raise file.mistake(
                ("settings", name), f"settings of {name}, which is no method of [train] algo: add it there."
            )
    many = sum(_product(train, own.get(method, ())) for method in used.values()) // len(used)
    if many > MOST:
        raise file.mistake(
            ("train",), f"the grid has {many:,} trainings; at most {MOST:,} make a sweep. Shorten the axes."
        )
    found = [_training(combination, own) for combination in _combinations(train, own, used)]
    twice = Counter(training.name for training in found)
    seen: Counter[str] = Counter()
    for training in found:
        seen[training.name] += 1
        number = f"-{seen[training.name]}" if twice[training.name] > 1 else ""
        yield replace(training, name=training.name + number)


def _product(train: Sequence[Axis], own: Sequence[Axis]) -> int:
    total = 1
    for axis in (*train, *own):
        total *= len(axis.values)
    return total


def _combinations(
    train: Sequence[Axis], own: Mapping[str, Sequence[Axis]], used: Mapping[str, str]
) -> Iterator[list[tuple[Axis, Any]]]:
    for values in itertools.product(*(axis.values for axis in train)):
        common = list(zip(train, values, strict=True))
        algo = next((value for axis, value in common if axis.name == "algo"), "fedavg")
        axes = own.get(used[algo], ())
        for more in itertools.product(*(axis.values for axis in axes)):
            yield [*common, *zip(axes, more, strict=True)]


def _training(combination: Sequence[tuple[Axis, Any]], own: Mapping[str, Sequence[Axis]]) -> Training:
    options = {axis.name: value for axis, value in combination if axis.key[0] == "train"}
    options["settings"] = {str(axis.key[-1]): value for axis, value in combination if axis.key[0] == "settings"}
    axes = {axis.name: _shown(value) for axis, value in combination if not axis.single}
    algo = registry.card("algorithms", registry.find("algorithms", options.get("algo", "fedavg"))).key
    shown = {**axes, "algo": algo, "seed": f"s{options.get('seed', 0)}"}
    words = [shown.pop("algo"), *(v for k, v in shown.items() if k != "seed"), shown["seed"]]
    name = "-".join(word for text in words if (word := slug(text)))
    return Training(name if len(name) <= 80 else f"{name[:70].rstrip('-.')}-{shown['seed']}", options, axes)


def _shown(value: Any) -> str:
    """Return a value of the file as one line of text."""
    if isinstance(value, list):
        return "+".join(map(_shown, value)) or "none"
    return value if isinstance(value, str) else json.dumps(plain(value), default=str)


def _axis_names(train: Sequence[Axis], own: Mapping[str, Sequence[Axis]]) -> tuple[str, ...]:
    return tuple(axis.name for axis in (*train, *itertools.chain(*own.values())) if not axis.single)


def _checked(file: TomlFile, trainings: Sequence[Training]) -> list[Cell]:
    """Return the cells. A combination that its method refuses is one, and says so; any other error is a mistake."""
    checker, cells = Checker(), []
    for training in trainings:
        try:
            cells.append(checker.check(training))
        except PflsecError as error:
            reason = first_line(error).removesuffix(" From the command line.")
            raise file.mistake(_blamed(training, reason), f"training {training.name}: {reason}") from None
    first: dict[str, Cell] = {}
    for cell in cells:
        if cell.config and (same := first.setdefault(cell.fingerprint, cell)) is not cell:
            raise file.mistake(("train",), f"the trainings {same.name} and {cell.name} are the same: shorten an axis.")
    if all(cell.refused for cell in cells):
        raise file.mistake(("train",), f"no training of the grid can be run; the first: {cells[0].refused}")
    return cells


def _blamed(training: Training, reason: str) -> Key:
    """Return the option that an error speaks of, as far as its words tell."""
    words = re.findall(r"[a-z_]+", reason.replace("--", "").replace("-", "_"))
    named = [word for word in words if word in training.options and word != "settings"]
    return ("train", named[0]) if named else ("train",)


# --- the attacks


def _attack(file: TomlFile, place: int, table: Mapping[str, Any]) -> Attack:
    key, options = ("attack", place), dict(table)
    if not isinstance(name := options.pop("name", None), str):
        raise file.mistake((*key, "name"), 'an [[attack]] needs the name of one attack, such as name = "ig".')
    known = [n for n in AttackConfig.model_fields if n not in EXECUTION]
    if wrong := next((option for option in options if option not in known), None):
        raise file.mistake((*key, wrong), f"attack has no option '{wrong}'{did_you_mean(wrong, known)}")
    try:
        name = registry.find("attacks", name)
    except PflsecError as error:
        raise file.mistake((*key, "name"), str(error)) from None
    _built(AttackConfig, options, file, key, f"attack {name}")
    attack = Attack(name, name, options)
    try:
        attack.make()
    except PflsecError as error:
        reason = str(error).removesuffix(" From the command line.")
        named = [option for option in options if option.replace("_", "-") in reason.replace("_", "-")]
        raise file.mistake((*key, named[0] if named else "name"), reason) from None
    return attack


def _labelled(attacks: Sequence[Attack]) -> list[Attack]:
    """Return the attacks, those of one name told apart by their options."""
    count = Counter(attack.name for attack in attacks)
    return [
        replace(a, label=" ".join([a.name, *(f"{k}={_shown(v)}" for k, v in sorted(a.options.items()))]))
        if count[a.name] > 1
        else a
        for a in attacks
    ]


def _check_attacks(file: TomlFile, attacks: Sequence[Attack], cells: Sequence[Cell]) -> None:
    """Refuse an attack that is given twice, or that no training has a capture for: unless a defense is the reason, which is a
    result."""
    measures = {"lpips": None, "lpips_weights": None, "controls": True}
    made: list[Any] = []
    for place, attack in enumerate(attacks):
        identity = (attack.make().cfg, attack.config().model_copy(update=measures))
        if (attack.name, identity) in made:
            raise file.mistake(
                ("attack", place), f"the attack {attack.name} is given twice with the same settings: drop one."
            )
        made.append((attack.name, identity))
        live = [cell.config for cell in cells if cell.config]
        if not any(attack.victims(config) or why_unseen(config.defense) for config in live):
            reason = "no training has a capture of this kind in these rounds and of these clients"
            raise file.mistake(
                ("attack", place), f"attack {attack.name}: {reason}; see kind and capture_rounds in [train]."
            )


# --- checking values


def _built(model: type[Config], values: Mapping[str, Any], file: TomlFile, key: Key, what: str) -> Any:
    """Return model(**values); its first mistake is said with its line."""
    try:
        return model(**values)
    except ValidationError as error:
        problem = min(error.errors(), key=lambda one: one["type"] != "extra_forbidden")
        lacking = f"{what} needs a {problem['loc'][-1]}." if problem["type"] == "missing" else ""
        raise file.mistake((*key, *problem["loc"]), lacking or sentence(model, dict(problem), what)) from None
    except PflsecError as error:
        raise file.mistake(key, str(error)) from None


def _check_value(model: type[BaseModel], name: str, value: Any, file: TomlFile, key: Key, what: str) -> None:
    """Check one option by itself. What only others make wrong shows when the trainings are checked."""
    try:
        model(**{name: value})
    except ValidationError as error:
        if own := [dict(problem) for problem in error.errors() if problem["loc"][:1] == (name,)]:
            raise file.mistake(key, sentence(model, own[0], what)) from None
    except PflsecError as error:
        raise file.mistake(key, f"{what}: {name} is {_shown(value)}; {error}") from None
