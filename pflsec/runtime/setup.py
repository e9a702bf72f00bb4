"""From a configuration to the things a run is made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pflsec.config.train import TrainConfig
from pflsec.core import registry
from pflsec.core.algorithm import Algorithm
from pflsec.core.buffers import LocalBuffers
from pflsec.core.change import increments
from pflsec.core.config import build as build_config
from pflsec.core.defense import Defense, InputDefense, ShapingDefense
from pflsec.core.errors import ConfigError, UnfitError
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.data.datasets import Dataset, load
from pflsec.data.federation import Federation
from pflsec.data.federation import build as build_federation
from pflsec.models import catalogue
from pflsec.models.network import Network
from pflsec.runtime.defending import (
    check_feedback,
    lengthened,
    make_defenses,
    mixing,
    parse_defense,
    shaping,
    without_hidden_captures,
)
from pflsec.wire.channel import Channel


@dataclass(frozen=True)
class Setup:
    """Everything that stands still during a run."""

    config: TrainConfig
    federation: Federation
    net: Network
    algorithm: Algorithm[Any]
    channel: Channel
    defenses: tuple[Defense[Any], ...] = ()
    own_dataset: Dataset | None = None
    """The dataset that was passed in place of the configured one."""

    @property
    def shaping(self) -> ShapingDefense[Any] | None:
        """What changes every gradient of the clients' local work, or None."""
        return shaping(self.defenses, self.net)

    @property
    def mixing(self) -> InputDefense[Any] | None:
        """What gives every step of the clients' local work other inputs than its rows, or None."""
        return mixing(self.defenses)

    @property
    def server_fresh(self) -> Items:
        """The public draw of the network: what the server starts from, and clients whose start is shared."""
        return self.net.fresh(self.config.seed, "init", "server")

    @property
    def server_first(self) -> Items:
        """The server's items before the first round."""
        return self.algorithm.enrol(self.algorithm.init_server(self.server_fresh), self.federation.sizes())

    def client_fresh(self, client: int) -> Items:
        """A client's own draw of the network, or the public one where private items start shared."""
        shared = getattr(self.algorithm.cfg, "private_start", "apart") == "shared"
        return self.server_fresh if shared else self.net.fresh(self.config.seed, "init", client)


def prepare(config: TrainConfig, dataset: Dataset | None = None) -> Setup:
    """Return the setup of a run; every mistake in the configuration shows here, before anything is written.

    dataset  takes the place of the one that the configuration names
    """
    as_many_as_there_are = config.partition == "natural" and "clients" not in config.model_fields_set
    federation = build_federation(
        dataset or load(config.data, download=config.download),
        partition=config.partition,
        clients=None if as_many_as_there_are else config.clients,
        seed=config.seed,
        alpha=config.alpha,
        classes_per_client=config.classes_per_client,
        test=config.test,
    )
    config = config.model_copy(update={"clients": federation.clients})
    net, algorithm = rebuild(config, federation.input)
    _check_victims(config, federation)
    defenses = make_defenses(config, algorithm.contract)
    config = without_hidden_captures(config, defenses)
    check_feedback(config, defenses, added := increments(algorithm))
    channel = Channel(algorithm.contract, defenses, config.seed, added)
    return Setup(config, federation, net, algorithm, channel, defenses, dataset)


def rebuild(config: TrainConfig, spec: InputSpec) -> tuple[Network, Algorithm[Any]]:
    """Return network and method of a run, without its data."""
    frozen = config.buffers == "frozen"
    net = catalogue.build(
        config.model, spec.shape, spec.classes, config.split, frozen=frozen, vocabulary=spec.vocabulary
    )
    net = lengthened(net, [parse_defense(text) for text in config.defense])
    _check_buffers(config, net, registry.load("algorithms", config.algo))
    algorithm = make_algorithm(config.algo, config.settings, net, config.clients)
    return net, LocalBuffers(algorithm) if net.buffers and config.buffers == "local" else algorithm


def make_algorithm(name: str, settings: Mapping[str, Any], net: Network, clients: int) -> Algorithm[Any]:
    """Return a method with its settings. Raises ConfigError for settings that it does not have."""
    kind = registry.load("algorithms", name)
    return kind(build_config(kind.Config, settings, name), net, clients)


def _check_buffers(config: TrainConfig, net: Network, kind: type[Algorithm[Any]]) -> None:
    """Refuse running statistics where the method would corrupt them."""
    fit, _, reason = kind.batchnorm.partition(": ")
    policies = {"yes": ("aggregate", "local", "frozen"), "local": ("local", "frozen")}.get(fit, ("frozen",))
    if net.buffers and config.buffers not in policies:
        remedies = " or ".join(f"--buffers {policy}" for policy in policies)
        raise UnfitError(
            f"{config.algo} cannot train the BatchNorm layers of {config.model} (first: {net.batchnorms[0]}) with --buffers "
            f"{config.buffers}: {reason}. Use {remedies}, or a model with GroupNorm, such as resnet18-gn."
        )


def _check_victims(config: TrainConfig, federation: Federation) -> None:
    if not config.captured_rounds():
        return
    sizes = federation.sizes()
    for client in config.captured_clients():
        if sizes[client] < config.victim_batch:
            raise ConfigError(
                f"client {client} has {sizes[client]} training images; a victim batch of {config.victim_batch} does not fit. "
                "Lower --victim-batch, choose other --capture-clients, or a less skewed partition."
            )
