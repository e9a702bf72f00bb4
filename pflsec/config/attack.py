"""The configuration of an attack on a run."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from pflsec.core import registry
from pflsec.core.attack import Attack
from pflsec.core.config import Config, at_least, build, option
from pflsec.core.errors import ConfigError
from pflsec.core.knowledge import Knows, ThreatModel


class AttackConfig(Config):
    """All options of `pflsec attack` that several attacks share, by their names on the command line."""

    rounds: list[int] | None = Field(default=None, description="captured rounds; none: all")
    clients: list[int] | None = Field(default=None, description="captured clients; none: all")
    kind: Literal["probe", "update"] = option(default="probe")
    iterations: int | None = at_least(1, default=None)
    restarts: int | None = at_least(1, default=None)
    adversary: str = option(default="server")
    knowledge: str = option(default="wire")
    labels: Literal["restore", "optimise", "known"] | None = option(default=None)
    hidden: Literal["auto", "guess", "joint", "cotangent", "log", "oracle"] | None = option(default=None)
    naive: bool = option(default=False, about="the attacker does not know of the run's defenses")
    settings: dict[str, Any] = Field(default_factory=dict)
    lpips: Literal["alex", "vgg", "squeeze", "none"] = option(default="alex")
    lpips_weights: str | None = None
    seed: int = at_least(0, default=0)
    executor: Literal["auto", "serial", "processes"] = option(default="auto")
    workers: int | None = at_least(1, default=None)
    device: Literal["auto", "cpu"] = option(default="auto")

    @property
    def threat(self) -> ThreatModel:
        """Who attacks, knowing what."""
        return ThreatModel(self.adversary, self.knowledge)


def attack_names(text: str | Sequence[str]) -> list[str]:
    """Return registered attack names for 'dlg,ig', a list of names, or 'all'; each once, in order."""
    words = text.split(",") if isinstance(text, str) else list(text)
    if words == ["all"]:
        return registry.names("attacks")
    return list(dict.fromkeys(registry.find("attacks", word.strip()) for word in words))


def make_attack(name: str, config: AttackConfig) -> Attack[Any]:
    """Return an attack with its settings, after checking that the adversary may know what it needs.

    Where knowledge grants labels or private items and nothing else was asked for, they are used.
    Raises ConfigError for settings the attack does not have, KnowledgeError for knowledge that is not granted.
    """
    kind = registry.load("attacks", name)
    asked = {k: getattr(config, k) for k in ("iterations", "restarts", "labels", "hidden")}
    values: dict[str, Any] = {k: v for k, v in asked.items() if v is not None}
    for option_name in values:
        if option_name not in kind.Config.model_fields:
            raise ConfigError(f"attack {name} has no --{option_name}.")
        if option_name in config.settings:
            raise ConfigError(f"{option_name} is given twice: as --{option_name} and among the settings (--set).")
    values = {**_granted(kind.Config.model_fields, config.threat.knows), **values, **config.settings}
    attack = kind(build(kind.Config, values, f"attack {name}"))
    for what, needs in attack.requirements().items():
        config.threat.require(needs, what)
    return attack


def _granted(fields: Mapping[str, Any], knows: frozenset[Knows]) -> dict[str, Any]:
    use = {("labels", "known"): Knows.LABELS, ("hidden", "oracle"): Knows.PRIVATE}
    return {name: value for (name, value), flag in use.items() if flag in knows and name in fields}
