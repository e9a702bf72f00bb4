"""The configuration of an attack on a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import Field, field_validator, model_validator

from pflsec.core import registry
from pflsec.core.attack import Attack
from pflsec.core.config import Config, at_least, build, option
from pflsec.core.errors import ConfigError, KnowledgeError, did_you_mean
from pflsec.core.knowledge import Knows, ThreatModel, letter


class AttackConfig(Config):
    """All options of `pflsec attack` that several attacks share, by their names on the command line."""

    rounds: list[int] | None = Field(default=None, description="captured rounds; none: all")
    clients: list[int] | None = Field(default=None, description="captured clients; none: all")
    kind: Literal["probe", "update"] = option(default="probe")
    iterations: int | None = at_least(1, default=None)
    restarts: int | None = at_least(1, default=None)
    adversary: str = option(default="server")
    knowledge: str = option(default="wire")
    threat_model: str | None = Field(default=None, description="a letter that stands for adversary and knowledge")
    labels: Literal["restore", "optimise", "known"] | None = option(default=None)
    hidden: Literal["auto", "guess", "joint", "cotangent", "log", "oracle"] | None = option(default=None)
    visible: list[str] | None = option(default=None, about="patterns of the upload's items that are seen; none: all")
    naive: bool = option(default=False, about="the attacker does not know of the run's defenses")
    settings: dict[str, Any] = Field(default_factory=dict)
    controls: bool = option(default=True)
    lpips: Literal["alex", "vgg", "squeeze", "none"] = option(default="alex")
    lpips_weights: str | None = None
    seed: int = at_least(0, default=0)
    executor: Literal["auto", "serial", "processes", "ray"] = option(default="auto")
    workers: int | None = at_least(1, default=None)
    device: Literal["auto", "cpu"] = option(default="auto")

    @field_validator("visible", mode="before")
    @classmethod
    def _patterns(cls, value: Any) -> Any:
        return [word.strip() for word in value.split(",")] if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _spelt_out(cls, values: Any) -> Any:
        """Put adversary and knowledge in the place of a letter. Raises ConfigError when one of them is given as well."""
        name = values.get("threat_model") if isinstance(values, Mapping) else None
        if name is None:
            return values
        if both := [f"--{k}" for k in ("adversary", "knowledge") if k in values]:
            raise ConfigError(f"--threat-model says who attacks, knowing what: leave {' and '.join(both)} out, or it.")
        found = letter(str(name))
        return {**values, "threat_model": str(name).upper(), "adversary": found.adversary, "knowledge": found.knowledge}

    @property
    def threat(self) -> ThreatModel:
        """Who attacks, knowing what."""
        return ThreatModel(self.adversary, self.knowledge)


OWN = ("iterations", "restarts", "labels", "hidden")
"""Options that an attack may have or not: they go to its settings of the same name."""


@dataclass(frozen=True)
class Ready:
    """An attack with its settings, and why this adversary cannot mount it ("" where it can)."""

    name: str
    attack: Attack[Any]
    refused: str = ""


def attack_names(text: str | Sequence[str]) -> list[str]:
    """Return registered attack names for 'dlg,ig', a list of names, or 'all'; each once, in order."""
    words = text.split(",") if isinstance(text, str) else list(text)
    if words == ["all"]:
        return registry.names("attacks")
    return list(dict.fromkeys(registry.find("attacks", word.strip()) for word in words))


def make_attacks(text: str | Sequence[str], config: AttackConfig) -> list[Ready]:
    """Return the attacks of 'dlg,ig', a list of names, or 'all'.

    An attack that is named must have every option, and all that it needs must be known. Of `all`, each takes the options
    that it has, and one that needs more than is known says so; an option that none has, or no attack at all, is an error.
    """
    names = attack_names(text)
    if text not in ("all", ["all"]):
        return [Ready(name, make_attack(name, config)) for name in names]
    _check_somebody_has(names, config)
    ready, refusals = [], []
    for name in names:
        attack, refused = _built(name, narrowed(name, config)), ""
        try:
            _check_knowledge(attack, config)
        except KnowledgeError as refusal:
            refused = str(refusal)
            refusals.append(refusal)
        ready.append(Ready(name, attack, refused))
    if len(refusals) == len(names):
        raise refusals[0]
    return ready


def narrowed(name: str, config: AttackConfig) -> AttackConfig:
    """Return the options without those that the attack does not have."""
    fields = registry.load("attacks", name).Config.model_fields
    asked = {k: v for k in OWN if (v := getattr(config, k)) is not None}
    settings = {k: v for k, v in config.settings.items() if k in fields}
    lacking = {k: None for k, v in asked.items() if not _has(fields, k, v)}
    return config.model_copy(update={**lacking, "settings": settings})


def make_attack(name: str, config: AttackConfig) -> Attack[Any]:
    """Return an attack with its settings, after checking that the adversary may know what it needs.

    Where knowledge grants labels or private items and nothing else was asked for, they are used.
    Raises ConfigError for settings the attack does not have, KnowledgeError for knowledge that is not granted.
    """
    attack = _built(name, config)
    _check_knowledge(attack, config)
    return attack


def _built(name: str, config: AttackConfig) -> Attack[Any]:
    kind = registry.load("attacks", name)
    values: dict[str, Any] = {k: v for k in OWN if (v := getattr(config, k)) is not None}
    for option_name in values:
        if option_name not in kind.Config.model_fields:
            raise ConfigError(f"attack {name} has no --{option_name}.")
        if option_name in config.settings:
            raise ConfigError(f"{option_name} is given twice: as --{option_name} and among the settings (--set).")
    values = {**_granted(kind.Config.model_fields, config.threat.knows), **values, **config.settings}
    return kind(build(kind.Config, values, f"attack {name}"))


def _check_knowledge(attack: Attack[Any], config: AttackConfig) -> None:
    for what, needs in attack.requirements().items():
        config.threat.require(needs, what)


def _check_somebody_has(names: Sequence[str], config: AttackConfig) -> None:
    """Raise ConfigError for an option or a setting that no attack has."""
    every = [registry.load("attacks", name).Config.model_fields for name in names]
    for option_name in OWN:
        value = getattr(config, option_name)
        if value is not None and not any(_has(fields, option_name, value) for fields in every):
            raise ConfigError(f"no attack has --{option_name} {value}.")
    known = {name for fields in every for name in fields}
    for setting in config.settings:
        if setting not in known:
            raise ConfigError(f"no attack has a setting '{setting}'{did_you_mean(setting, known)}")


def _has(fields: Mapping[str, Any], name: str, value: Any) -> bool:
    """Return whether an attack with these fields has an option, and, where it is a choice, this value of it."""
    if name not in fields:
        return False
    kind = fields[name].annotation
    return get_origin(kind) is not Literal or value in get_args(kind)


def _granted(fields: Mapping[str, Any], knows: frozenset[Knows]) -> dict[str, Any]:
    use = {("labels", "known"): Knows.LABELS, ("hidden", "oracle"): Knows.PRIVATE}
    return {name: value for (name, value), flag in use.items() if flag in knows and _has(fields, name, value)}
