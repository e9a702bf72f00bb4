"""The configuration of a training run."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pflsec.core import registry
from pflsec.core.config import Config, above, at_least, between, build, option
from pflsec.core.errors import ConfigError, unknown
from pflsec.core.files import safe_name

ROUNDS_HELP = "use first, last, numbers such as 0,10,20, every:10, or none"
CLIENTS_HELP = "use numbers such as 0,1,2 or random:4"
TRACKERS = ("tensorboard", "mlflow")
MANY = 1_000_000
"""More clients, rounds or victims than this are a slip of the keyboard."""


class TrainConfig(Config):
    """All options of `pflsec train`, by their names on the command line."""

    algo: str = option(default="fedavg", about="key of the method")
    data: str = option(default="digits", about="dataset: a name, npz:PATH, pfllib:PATH or text:PATH")
    download: bool = Field(default=False, exclude=True)
    """May the dataset be fetched from the internet? Changes no result, so it is not recorded."""
    model: str = option(default="auto", about="network: a name, or auto")
    split: str | None = option(default=None, about="layer with which the head begins; none: the last one")
    partition: Literal["iid", "pathological", "dirichlet", "natural", "pfllib-compat"] = option(default="dirichlet")
    alpha: float = above(0, default=0.1, about="Dirichlet concentration: small is heterogeneous")
    classes_per_client: int = at_least(1, default=2, about="classes of a client with partition=pathological")
    test: Literal["split", "given"] = option(
        default="split", about="split: a stratified quarter of each client; given: the dataset's own test rows"
    )
    clients: int = between(1, MANY, default=20)
    rounds: int = between(1, MANY, default=50)
    local_epochs: int = at_least(0, default=1, about="epochs of the phase that produces what is sent")
    batch_size: int = at_least(1, default=10)
    lr: float = above(0, default=0.05)
    lr_decay: float = Field(default=1.0, gt=0, le=1)
    """Round t trains with lr * lr_decay^t, for every participant."""
    participation: float = Field(default=1.0, gt=0, le=1)
    drop_rate: float = between(0, 1, default=0.0, about="share of a cohort whose upload is lost after training")
    settings: dict[str, Any] = Field(default_factory=dict)
    defense: list[str] = Field(default_factory=list)
    capture_rounds: str = option(default="first,last", about=ROUNDS_HELP)
    capture_clients: str = option(default="0,1,2,3", about=CLIENTS_HELP)
    victims: int = between(1, MANY, default=4, about="victim batches per captured client and round")
    victim_batch: int = at_least(1, default=1, about="images in a victim batch")
    victim_steps: int = at_least(1, default=1, about="local steps on a victim batch")
    kind: Literal["probe", "update", "both"] = option(
        default="probe", about="probe: local work on a small victim batch; update: the real uploads; both"
    )
    dp_seed: int | None = at_least(0, default=None, about="fixes the privacy noise; for tests only, and marks the run")
    buffers: Literal["aggregate", "local", "frozen"] = option(
        default="aggregate",
        about="running statistics of BatchNorm layers. aggregate: sent and averaged like weights; local: never sent; frozen: "
        "constants, 0 and 1",
    )
    seed: int = at_least(0, default=0)
    eval_every: int = at_least(1, default=1)
    executor: Literal["auto", "serial", "processes", "ray"] = option(
        default="auto", about="auto: processes where that pays; ray: a Ray cluster; the results are the same bits"
    )
    workers: int | None = at_least(1, default=None, about="worker processes; none: one per core")
    device: str = option(default="auto")
    track: list[str] = Field(default_factory=list)
    """Trackers of experiments that follow the training; see pflsec.tracking."""

    @field_validator("track", mode="before")
    @classmethod
    def _split_trackers(cls, value: Any) -> Any:
        return [word.strip() for word in value.split(",")] if isinstance(value, str) else value

    @field_validator("track")
    @classmethod
    def _known_trackers(cls, value: list[str]) -> list[str]:
        if strange := [name for name in value if name not in TRACKERS]:
            raise ConfigError(unknown("tracker", strange[0], TRACKERS))
        return list(dict.fromkeys(value))

    @field_validator("algo")
    @classmethod
    def _known_method(cls, value: str) -> str:
        return registry.find("algorithms", value)

    @field_validator("model")
    @classmethod
    def _known_model(cls, value: str) -> str:
        return value if value == "auto" else registry.find("models", value)

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if value not in ("auto", "cpu"):
            raise ValueError("only the CPU is supported so far; use cpu or auto")
        return value

    @field_validator("defense")
    @classmethod
    def _known_defenses(cls, value: list[str]) -> list[str]:
        for text in value:
            registry.find("defenses", text.partition(":")[0])
        return value

    @model_validator(mode="after")
    def _captures_exist(self):
        self.captured_rounds()
        self.captured_clients()
        return self

    def rate(self, t: int) -> float:
        """Return the learning rate of round t."""
        return self.lr * self.lr_decay**t

    def captured_rounds(self) -> list[int]:
        """Return the rounds at whose start probes are taken."""
        if self.capture_rounds == "none":
            return []
        found: set[int] = set()
        for word in self.capture_rounds.split(","):
            if word.startswith("every:"):
                if not (step := _number(word[6:], "capture_rounds", ROUNDS_HELP)):
                    raise ValueError(f"capture_rounds has 'every:0'; {ROUNDS_HELP}")
                found |= set(range(0, self.rounds, step))
            else:
                t = {"first": 0, "last": self.rounds - 1}.get(word)
                found.add(_number(word, "capture_rounds", ROUNDS_HELP) if t is None else t)
        if late := [t for t in found if t >= self.rounds]:
            raise ValueError(f"capture_rounds names round {late[0]}; the run has rounds 0 to {self.rounds - 1}")
        return sorted(found)

    def captured_clients(self) -> list[int]:
        """Return the clients that are probed. The default (0,1,2,3) is cut to the clients that there are."""
        from pflsec.core.streams import numpy_stream

        if self.capture_clients.startswith("random:"):
            wanted = _number(self.capture_clients[7:], "capture_clients", CLIENTS_HELP)
            if not 1 <= wanted <= self.clients:
                raise ValueError(f"capture_clients asks for {wanted} clients; the federation has {self.clients}")
            draw = numpy_stream(self.seed, "captured clients").permutation(self.clients)
            return sorted(int(c) for c in draw[:wanted])
        found = {_number(word, "capture_clients", CLIENTS_HELP) for word in self.capture_clients.split(",")}
        if "capture_clients" not in self.model_fields_set:
            return sorted(c for c in found if c < self.clients)
        if late := [c for c in found if c >= self.clients]:
            raise ValueError(
                f"capture_clients names client {late[0]}; the federation has clients 0 to {self.clients - 1}"
            )
        return sorted(found)


def whole(word: str) -> int | None:
    """Return the number that the word is, or None where it is none of at most nine digits."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 10 else None


def _number(word: str, name: str, allowed: str) -> int:
    if (found := whole(word)) is None:
        raise ValueError(f"{name} has '{word}', which is no number >= 0; {allowed}")
    return found


def resolve(
    options: Mapping[str, Any],
    *,
    preset: str | None = None,
    file: Path | None = None,
    assignments: Mapping[str, str] = {},
) -> TrainConfig:
    """Return the validated configuration of a run.

    Priority, highest first: options (explicit ones only) and assignments, the preset, the file, the defaults.
    assignments  {name: value as text} of the method's own hyper-parameters (`--set`)
    Raises ConfigError naming the option, its value, the rule and where it came from.
    """
    from_file = read_toml(file) if file else {}
    source = " or ".join([*([str(file)] if file else []), *(["the command line"] if options or not file else [])])
    algo = registry.find("algorithms", str(options.get("algo", from_file.get("algo", "fedavg"))))
    common, own = _preset(algo, preset)
    settings: dict[str, Any] = {}
    for given in (from_file.get("settings", {}), own, options.get("settings", {}), parse_assignments(assignments)):
        if not isinstance(given, Mapping):
            raise ConfigError(f"train: settings is {given!r}; it must be a table of names and values. From {source}.")
        settings |= given
    values = {**from_file, **common, **options, "algo": algo, "settings": settings}
    config = build(TrainConfig, values, "train", source)
    _refuse_idle(config, {**from_file, **options}, source)
    return config


def _refuse_idle(config: TrainConfig, given: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError for options of another partition: who reads them would take the data for what they are not.

    Defaults say nothing: the configuration in run.json lists all of them, and may be given back as it is.
    """
    uses = {"alpha": ("dirichlet", "pfllib-compat"), "classes_per_client": ("pathological",)}
    for name, schemes in uses.items():
        default = TrainConfig.model_fields[name].default
        if given.get(name, default) != default and config.partition not in schemes:
            raise ConfigError(
                f"train: {name} is {given[name]!r}, but partition {config.partition} does not use it; leave it out, or choose "
                f"partition {' or '.join(schemes)}. From {source}."
            )


def parse_assignments(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return values for NAME=VALUE texts: true/false, none and numbers are understood; everything else is text."""
    return {name: _value(text) for name, text in texts.items()}


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def split_assignments(pairs: list[str], where: str = "--set") -> dict[str, str]:
    """Return {name: text} for a list of NAME=VALUE. Raises ConfigError for anything else, and for a name given twice."""
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip() or not text.strip():
            raise ConfigError(f"{where} '{pair}' is not of the form NAME=VALUE.")
        if name.strip() in found:
            raise ConfigError(f"{where} gives {name.strip()} twice.")
        found[name.strip()] = text.strip()
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file's content. Raises ConfigError naming file and line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ConfigError(f"the configuration file {path} does not exist.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}.") from error


def _preset(algo: str, preset: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the preset's values: (common options, the method's own settings)."""
    if preset is None:
        return {}, {}
    presets = registry.load("algorithms", algo).presets
    if preset not in presets:
        raise ConfigError(unknown(f"preset of {algo}", preset, presets))
    common = {k: v for k, v in presets[preset].items() if k in TrainConfig.model_fields}
    return common, {k: v for k, v in presets[preset].items() if k not in common}


def run_name(config: TrainConfig, name: str | None) -> str:
    """Return the run folder's name: the given one, checked, or one made of method, data and seed."""
    if name is not None:
        return safe_name(name, "run name")
    data = config.data.partition(":")[0]
    key = registry.card("algorithms", config.algo).key
    return safe_name(f"{key}-{data}-s{config.seed}", "run name")
