"""What is to be done: trainings, and the attacks on each of them; and what that costs. Nothing here writes anything."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pflsec import api
from pflsec.config.attack import AttackConfig, make_attack
from pflsec.config.train import TrainConfig
from pflsec.core import methodfile, registry
from pflsec.core.config import build
from pflsec.core.errors import PflsecError, PrivacyError, UnfitError
from pflsec.core.files import plain
from pflsec.runtime.defending import why_unseen

REFUSALS = (PrivacyError, UnfitError)
"""With these a method says that it cannot be trained so. That is a result, and no mistake."""
EXECUTION = ("executor", "workers", "device", "track")
"""Options that change no result."""
CONTROLS = 2
"""Attacks beside the victims', where the controls are on."""


@dataclass(frozen=True)
class Training:
    """A training of the grid.

    options  as `pflsec train` takes them, and perhaps `preset`
    axes     what tells it from the others, as text
    """

    name: str
    options: Mapping[str, Any]
    axes: Mapping[str, str] = field(default_factory=dict)

    def setup(self, dataset: Any = None) -> api.Setup:
        """Return its setup. Every mistake in its options shows here, and every refusal (REFUSALS) of its method.

        Where its defenses hide the clients it captures nothing: the grid's other trainings may have rounds to capture.
        """
        options = dict(self.options)
        if why_unseen(options.get("defense", [])):
            options["capture_rounds"] = "none"
        return api.plan_training(options, preset=options.pop("preset", None), dataset=dataset)


@dataclass(frozen=True)
class Attack:
    """An attack on every training, with its options by their names on the command line. `label` tells it from the others."""

    name: str
    label: str
    options: Mapping[str, Any]

    def config(self, **how: Any) -> AttackConfig:
        """Return its options, checked; `how` it is executed changes no result."""
        return build(AttackConfig, {"executor": "serial"} | dict(self.options) | how, f"attack {self.name}")

    def make(self) -> Any:
        """Return the attack itself. Raises ConfigError for its settings, KnowledgeError for what its adversary does not know."""
        return make_attack(self.name, self.config())

    def victims(self, config: TrainConfig) -> int:
        """Return how many captures of such a training it attacks."""
        wanted = self.config()
        if config.kind not in ("both", wanted.kind) or not config.captured_rounds():
            return 0
        rounds = [t for t in config.captured_rounds() if wanted.rounds is None or t in wanted.rounds]
        clients = [c for c in config.captured_clients() if wanted.clients is None or c in wanted.clients]
        return len(rounds) * len(clients) * (config.victims if wanted.kind == "probe" else 1)


@dataclass(frozen=True)
class Cell:
    """A training that was checked: what it costs, or why its method refuses it (`refused`).

    config       with all defaults; None where it is refused
    fingerprint  of all that its result depends on
    seconds, bytes  of the training, roughly; 0 where it could not be measured, because the method raises
    """

    training: Training
    config: TrainConfig | None = None
    fingerprint: str = ""
    refused: str = ""
    seconds: float = 0.0
    bytes: float = 0.0

    @property
    def name(self) -> str:
        return self.training.name

    def units(self, attacks: Iterable[Attack]) -> int:
        """Return its units of progress: rounds, and victims and controls of each attack."""
        if self.config is None:
            return 1
        victims = [(n, attack.config().controls) for attack in attacks if (n := attack.victims(self.config))]
        return self.config.rounds + sum(n + CONTROLS * controls for n, controls in victims)


def fingerprint(config: Mapping[str, Any], file: Mapping[str, Any] | None, partition: str) -> str:
    """Return what identifies a training's result: its options, the text of its method's file, and who holds which rows."""
    decisive = {name: value for name, value in config.items() if name not in EXECUTION}
    facts = [decisive, file and file.get("sha256"), partition]
    return hashlib.sha256(json.dumps(plain(facts), sort_keys=True).encode()).hexdigest()


class Checker:
    """Checks trainings one after the other; datasets are read once, and seeds of one training are timed once."""

    def __init__(self) -> None:
        self._datasets: dict[Any, Any] = {}
        self._costs: dict[str, tuple[float, float]] = {}

    def check(self, training: Training) -> Cell:
        """Return a training's cell. Raises PflsecError for a mistake in its options."""
        key = training.options.get("data", "digits")
        try:
            setup = training.setup(self._datasets.get(key))
        except REFUSALS as refusal:
            return Cell(training, refused=str(refusal))
        self._datasets[key] = setup.federation.dataset
        config = setup.config
        file = methodfile.facts(registry.load("algorithms", config.algo))
        mark = fingerprint(config.model_dump(), file, setup.federation.fingerprint())
        return Cell(training, config, mark, "", *self._cost(setup))

    def _cost(self, setup: api.Setup) -> tuple[float, float]:
        key = setup.config.model_copy(update={"seed": 0}).model_dump_json()
        if key not in self._costs:
            try:
                one = api.estimate(setup)
                self._costs[key] = one.seconds, one.bytes
            except Exception as error:
                if not isinstance(error, PflsecError) and methodfile.blame(error) is None:
                    raise
                self._costs[key] = 0.0, 0.0
        return self._costs[key]


@dataclass(frozen=True)
class Price:
    """What cells cost, roughly: units of progress, seconds of training, bytes on disk, and seconds of the attacks.

    paces     seconds for a victim of each attack, timed on one training; None where that was not possible
    timed_on  that training's name; "" without any
    """

    units: int
    seconds: float
    bytes: float
    attacking: float
    paces: Mapping[str, float | None]
    timed_on: str


def price(cells: Sequence[Cell], attacks: Sequence[Attack]) -> Price:
    """Return what cells cost. The attacks are timed over a few iterations on the first training that can be run."""
    live = [cell for cell in cells if cell.config is not None]
    paces: dict[str, float | None] = dict.fromkeys((a.label for a in attacks), None)
    if live and attacks:
        setup = live[0].training.setup()
        paces = {attack.label: _pace(setup, attack) for attack in attacks}
    attacking = sum(
        (paces[a.label] or 0.0) * (n + CONTROLS * a.config().controls)
        for cell in live
        for a in attacks
        if cell.config and (n := a.victims(cell.config))
    )
    units = sum(cell.units(attacks) for cell in cells)
    timed_on = live[0].name if any(pace is not None for pace in paces.values()) else ""
    return Price(units, sum(c.seconds for c in live), sum(c.bytes for c in live), attacking, paces, timed_on)


def _pace(setup: api.Setup, attack: Attack) -> float | None:
    """Return seconds for a victim; None on real uploads, and where the method raises: that is for its cells to report."""
    try:
        return api.estimate_attack(setup, attack.name, attack.options)
    except Exception as error:
        if not isinstance(error, PflsecError) and methodfile.blame(error) is None:
            raise
        return None


def slug(text: str) -> str:
    """Return the text as part of a folder's name."""
    word = "".join(c if (c.isalnum() and c.isascii()) or c in "._-" else "-" for c in text.replace("+", ""))
    return word.replace("..", "-").strip("-.")
