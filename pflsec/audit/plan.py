"""What an audit will run: every method under every defense with every seed, on the same splits."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from pflsec.core import methodfile, registry
from pflsec.core.errors import ConfigError, RunError
from pflsec.sweep import plan as sweep

BASELINES = ("fedavg", "fedrep", "ditto")
ATTACKS = ("dlg", "idlg", "inverting-gradients")
CONTROL = "local"
"""The method without any federation: it shows what accuracy is worth sending anything for."""
NONE = "none"

Role = Literal["method", "baseline", "control"]


@dataclass(frozen=True)
class Cell:
    """One run of an audit. `label` is what the verdict calls its method, `algo` what the registry does."""

    name: str
    label: str
    algo: str
    role: Role
    defense: str
    seed: int


@dataclass(frozen=True)
class Plan:
    """An audit that may be run, and everything that defines it.

    file       path and SHA-256 of the audited method's text; None for a registered one
    training   options of every cell, by their names on the command line
    settings   the audited method's own settings
    attacking  options of every attack
    """

    method: str
    file: dict[str, str] | None
    baselines: list[str]
    attacks: list[str]
    defenses: list[str]
    seeds: list[int]
    training: dict[str, Any]
    settings: dict[str, Any]
    attacking: dict[str, Any]

    @property
    def label(self) -> str:
        """The audited method's key, marked where a baseline has the same."""
        key = registry.card("algorithms", self.method).key
        return f"{key}-file" if key in [*self.baselines, CONTROL] else key

    def cells(self) -> list[Cell]:
        """Return all cells: the method before its baselines; the control undefended, since it sends nothing."""
        control = [CONTROL] if CONTROL in registry.names("algorithms") and self.method != CONTROL else []
        found = []
        for defense in self.defenses:
            for seed in self.seeds:
                found.append(_cell(self.label, self.method, "method", defense, seed))
                found += [_cell(key, key, "baseline", defense, seed) for key in self.baselines]
        return found + [_cell(key, key, "control", NONE, seed) for key in control for seed in self.seeds]

    def options(self, cell: Cell) -> dict[str, Any]:
        """Return the training options of a cell."""
        defense = [] if cell.defense == NONE else [cell.defense]
        settings = self.settings if cell.role == "method" else {}
        return {**self.training, "algo": cell.algo, "seed": cell.seed, "defense": defense, "settings": settings}

    def attack_options(self, name: str) -> dict[str, Any]:
        """Return the options that this attack has: analytic ones have neither iterations nor restarts."""
        own = registry.load("attacks", name).Config.model_fields
        return {k: v for k, v in self.attacking.items() if k in own or k not in ("iterations", "restarts")}

    def as_training(self, cell: Cell) -> sweep.Training:
        """Return a cell as a sweep runs it."""
        return sweep.Training(cell.name, self.options(cell))

    def assaults(self) -> list[sweep.Attack]:
        """Return the attacks as a sweep makes them."""
        return [sweep.Attack(name, name, self.attack_options(name)) for name in self.attacks]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as audit.json holds it."""
        return asdict(self)

    @staticmethod
    def from_dict(values: Any, where: str) -> "Plan":
        """Return the plan that audit.json holds. Raises RunError when it is damaged."""
        names = {f.name for f in fields(Plan)}
        if not isinstance(values, Mapping) or set(values) != names:
            raise RunError(f"{where} is damaged: its plan should have {', '.join(sorted(names))}.")
        return Plan(**values)


def make(
    method: str,
    *,
    against: Sequence[str] | None = None,
    attacks: Sequence[str] = ATTACKS,
    defenses: Sequence[str] = (NONE,),
    seeds: int = 1,
    seed: int = 0,
    training: Mapping[str, Any] = {},
    settings: Mapping[str, Any] = {},
    attacking: Mapping[str, Any] = {},
) -> Plan:
    """Return the plan of an audit.

    against  baselines; None: those of BASELINES that are installed. The audited method is never its own baseline
    seeds    how many trainings of each cell, from `seed` on
    Raises ConfigError for names that are not known and for lists that are empty.
    """
    found = registry.find("algorithms", method)
    chosen = _once(registry.find("attacks", a) for a in attacks)
    if not chosen or not defenses:
        raise ConfigError(f"an audit needs at least one {'defense (none counts)' if chosen else 'attack'}.")
    if seeds < 1:
        raise ConfigError(f"--seeds is {seeds}; it must be at least 1.")
    plan = Plan(
        method=found,
        file=methodfile.facts(registry.load("algorithms", found)),
        baselines=_baselines(against, found),
        attacks=chosen,
        defenses=_once(_known_defense(text) for text in defenses),
        seeds=list(range(seed, seed + seeds)),
        training=dict(training),
        settings=dict(settings),
        attacking=dict(attacking),
    )
    _check_names(plan)
    for attack in plan.assaults():  # mistakes in their options show now, not after the trainings
        attack.make()
    return plan


def split_names(text: str) -> list[str]:
    """Return the names in 'a,b', without the empty ones."""
    return [word.strip() for word in text.split(",") if word.strip()]


def split_defenses(text: str) -> list[str]:
    """Return the defenses in 'none,dp-sgd:epsilon=8,delta=1e-5': NAME=VALUE belongs to the defense before it."""
    found: list[str] = []
    for word in split_names(text):
        if "=" in word.partition(":")[0]:
            if not found or ":" not in found[-1]:
                raise ConfigError(f"--defenses has '{word}' without a defense before it; write NAME:{word}.")
            found[-1] += f",{word}"
        else:
            found.append(word)
    return found


def _baselines(against: Sequence[str] | None, method: str) -> list[str]:
    wanted = [b for b in BASELINES if b in registry.names("algorithms")] if against is None else against
    return [key for key in _once(registry.find("algorithms", b) for b in wanted) if key not in (method, CONTROL)]


def _known_defense(text: str) -> str:
    """Return the text. Raises ConfigError where no defense is called so."""
    if text != NONE:
        registry.find("defenses", text.partition(":")[0])
    return text


def _once(names: Any) -> list[str]:
    return list(dict.fromkeys(names))


def _cell(label: str, algo: str, role: Role, defense: str, seed: int) -> Cell:
    word = sweep.slug(f"{label}-{defense}")[:80]
    return Cell(f"{word}-s{seed}", label, algo, role, defense, seed)


def _check_names(plan: Plan) -> None:
    twice = [name for name, count in Counter(cell.name for cell in plan.cells()).items() if count > 1]
    if twice:
        raise ConfigError(f"two cells would be called {twice[0]}: the defenses are too much alike; drop one.")
