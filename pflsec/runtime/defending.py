"""The defenses of a run: made from their texts, and refused where they do not go together or not with the run."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from pflsec.config.train import TrainConfig, parse_assignments, split_assignments
from pflsec.core import registry
from pflsec.core.config import build as build_config
from pflsec.core.contract import Contract, kind_of
from pflsec.core.defense import (
    AggregateDefense,
    Defense,
    InputDefense,
    ModelDefense,
    ReleaseDefense,
    ShapingDefense,
    StepDefense,
    UserDefense,
    of_kind,
)
from pflsec.core.errors import ConfigError
from pflsec.core.network import Net
from pflsec.models.network import Network
from pflsec.runtime import cohort as cohorts
from pflsec.training.local import LocalWork

SEAMS = ("step", "uplink", "aggregate")
"""In the order in which they act."""


def make_defenses(config: TrainConfig, contract: Contract) -> tuple[Defense[Any], ...]:
    """Return a run's defenses in their order. Raises ConfigError for unknown names and settings, and for defenses that do
    not go together or not with the network."""
    made = [parse_defense(text) for text in config.defense]
    _check_together(made)
    rides = [name for name, text in contract.items("up").items() if kind_of(text) == "buffers"]
    if rides and (found := next((d for d in made if d.seam != "step"), None)):
        raise ConfigError(
            f"{found.key} does not act on running statistics of BatchNorm layers, which {config.algo} sends (first: {rides[0]}). "
            "Use --buffers local or frozen, or a model with GroupNorm, such as resnet18-gn."
        )
    most = cohorts.size(config.clients, config.participation)
    if few := next((d for d in made if isinstance(d, AggregateDefense) and d.least > most), None):
        raise ConfigError(
            f"{few.key} adds up {few.least} uploads or more; a cohort has {most}. Raise --participation or --clients, or lower "
            "least."
        )
    return tuple(_planned(d, config) if isinstance(d, UserDefense) else d for d in made)


def _planned(found: UserDefense[Any], config: TrainConfig) -> UserDefense[Any]:
    rate = cohorts.rate(found.sampling, config.clients, config.participation)
    return found.planned(config.clients, rate, config.rounds)


def _check_together(made: list[Defense[Any]]) -> None:
    """Raise ConfigError where defenses cannot be combined, or stand in another order than they act."""
    keys = [d.key for d in made]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"--defense {twice} is given twice; give it once, with the settings that are meant.")
    _check_accounts(made)
    _check_steps(made, of_kind(made, StepDefense))
    _check_inputs(made, of_kind(made, StepDefense))
    for one in made:
        if both := next((key for key in one.excludes if key in keys), None):
            raise ConfigError(
                f"--defense {one.key} cannot be combined with --defense {both}: its account knows nothing of that noise. Drop "
                "one of them."
            )
    ordered = sorted(made, key=lambda d: (SEAMS.index(d.seam), not isinstance(d, InputDefense)))
    if ordered != made:
        right = " ".join(f"--defense {d.key}" for d in ordered)
        mixed = ", what mixes inputs before all others" if of_kind(made, InputDefense) else ""
        raise ConfigError(
            f"defenses act in the order of their seams ({', '.join(SEAMS)}){mixed}; write them so: {right}."
        )


def _check_accounts(made: Sequence[Defense[Any]]) -> None:
    """Raise ConfigError where two defenses keep accounts, or one is on an account that nobody keeps."""
    accounts = [d.key for d in made if isinstance(d, StepDefense | UserDefense)]
    if len(accounts) > 1:
        raise ConfigError(
            f"--defense {accounts[0]} and --defense {accounts[1]} would each state an epsilon of its own; choose one of them."
        )
    if (alone := of_kind(made, ReleaseDefense)) and of_kind(made, StepDefense) is None:
        raise ConfigError(
            f"--defense {alone.key} guarantees nothing by itself: what is released has passed a model that was fitted to the "
            "same records. Add --defense dp-sgd."
        )


def _check_steps(made: Sequence[Defense[Any]], private: StepDefense[Any] | None) -> None:
    """Raise ConfigError where defenses that change what a step descends cannot be combined."""
    shaped = [d.key for d in made if isinstance(d, ShapingDefense)]
    if len(shaped) > 1:
        raise ConfigError(
            f"--defense {shaped[0]} and --defense {shaped[1]} would both change every step's gradient; choose one of them."
        )
    if shaped and private is not None:
        raise ConfigError(
            f"--defense {shaped[0]} cannot be combined with --defense {private.key}: what it changes in a gradient follows the "
            "raw batch, which the account knows nothing of. Drop one of them."
        )
    if (longer := of_kind(made, ModelDefense)) and private is not None:
        raise ConfigError(
            f"--defense {longer.key} cannot be combined with --defense {private.key}: that takes the gradients of all examples "
            "in one pass (torch.func.vmap), in which a layer cannot draw noise of its own. Drop one of them."
        )


def _check_inputs(made: Sequence[Defense[Any]], private: StepDefense[Any] | None) -> None:
    """Raise ConfigError where a defense that mixes inputs cannot be combined with another one."""
    fed = [d.key for d in made if isinstance(d, InputDefense)]
    if len(fed) > 1:
        raise ConfigError(
            f"--defense {fed[0]} and --defense {fed[1]} would both change what every step trains on; choose one of them."
        )
    if fed and private is not None:
        raise ConfigError(
            f"--defense {fed[0]} cannot be combined with --defense {private.key}: a record that is mixed into others has a share "
            "in several gradients, so that clipping each of them bounds no record. Drop one of them."
        )


def check_feedback(config: TrainConfig, defenses: Sequence[Defense[Any]], increments: Collection[str]) -> None:
    """Raise ConfigError where a defense would make good what it has left out of changes that do not add up."""
    if not increments and (found := next((d for d in defenses if d.feedback), None)):
        raise ConfigError(
            f"{found.key} cannot make good what it has left out of the uploads of {config.algo}: no item of them is what one "
            "round's work adds to the server's (means are made anew, and models of the clients' own hold it already). Use "
            "feedback=false."
        )


def shaping(defenses: Sequence[Defense[Any]], net: Net) -> ShapingDefense[Any] | None:
    """Return what changes every gradient of the clients' local work on a network, or None."""
    found = of_kind(defenses, ShapingDefense)
    return None if found is None else found.at(net)


def mixing(defenses: Sequence[Defense[Any]]) -> InputDefense[Any] | None:
    """Return what gives every step of the clients' local work other inputs than its rows, or None."""
    found = of_kind(defenses, InputDefense)
    return None if found is None or found.idle else found


def lengthened(net: Network, defenses: Sequence[Defense[Any]]) -> Network:
    """Return the network of a run under these defenses: with the layer that one of them puts into it, if one does."""
    model = of_kind(defenses, ModelDefense)
    return net if model is None else net.lengthened(model.key, model.layer)


def inside(ctx: LocalWork, defenses: Sequence[Defense[Any]], *key: int | str) -> LocalWork:
    """Return the context of a client's local work with those defenses in it that keep no account; `key` names their noise."""
    model = of_kind(defenses, ModelDefense)
    if model is not None:
        model = model.at(ctx.net, ctx.seed, "defense", model.key, *key)
    return replace(ctx, shaping=shaping(defenses, ctx.net), model_defense=model)


def without_hidden_captures(config: TrainConfig, defenses: tuple[Defense[Any], ...]) -> TrainConfig:
    """Return the configuration without captures where the server sees no single upload."""
    hiding = _hiding(defenses)
    if hiding is None or config.capture_rounds == "none":
        return config
    if "capture_rounds" in config.model_fields_set:
        raise ConfigError(
            f"{_unseen(hiding)}, so that there is no upload of a client to capture in rounds {config.capture_rounds}. Use "
            "--capture-rounds none."
        )
    return config.model_copy(update={"capture_rounds": "none"})


def why_unseen(texts: Sequence[str]) -> str | None:
    """Return why a run under these defenses has no upload of a client to attack, and what shows what its server sees; None
    where it may have some."""
    hiding = _hiding([parse_defense(text) for text in texts])
    if hiding is None:
        return None
    return (
        f"{_unseen(hiding)}, so that there is no upload of a client to attack. What it sees is attacked on a run without "
        f"{hiding.key}: train one with --kind update, all clients of a cohort captured, and attack it with --kind update "
        "--adversary server-secagg"
    )


def _hiding(defenses: Sequence[Defense[Any]]) -> AggregateDefense[Any] | None:
    return next((d for d in defenses if isinstance(d, AggregateDefense) and d.hides_clients), None)


def _unseen(hiding: Defense[Any]) -> str:
    return f"under {hiding.key} the server sees sums over a cohort"


def parse_defense(text: str) -> Defense[Any]:
    """Return a defense from NAME or NAME:k=v,k=v. Raises ConfigError for unknown names and settings."""
    name, _, knobs = text.partition(":")
    values = parse_assignments(split_assignments([k for k in knobs.split(",") if k], f"--defense {name}"))
    kind = registry.load("defenses", name)
    return kind(build_config(kind.Config, values, f"defense {kind.key}"))
