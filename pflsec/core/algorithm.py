"""A federated method: pure functions of items around one client's local work and one server step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from pflsec.core.config import Config, option
from pflsec.core.contract import Contract, kind_of
from pflsec.core.items import Items, floating, select, weighted_mean
from pflsec.core.local import Local
from pflsec.core.network import Net

C = TypeVar("C", bound=Config)
Settings = Config  # in the class below, Config names the attribute


class PrivateStart(Config):
    """Setting of methods with private items: where these start."""

    private_start: Literal["apart", "shared"] = option(
        default="apart",
        about="apart: each client draws its private items; shared: all start from one public draw, so the first exchange "
        "hides nothing",
    )


@dataclass(frozen=True)
class Done:
    """What local work returns: the state that the client keeps once the server has accepted its upload, and the upload."""

    state: Items
    up: Items


class Algorithm(Generic[C]):
    """Base of every method. A method is one file with one subclass and its Config, and inherits nothing else.

    Nothing here may keep anything between calls: server and client state are items, passed in and returned.
    """

    key: ClassVar[str]
    Config: ClassVar[type[Settings]] = Settings
    shared: ClassVar[tuple[str, ...]] = ()
    """Parts of the network (body, head) that the server holds and sends."""
    private: ClassVar[tuple[str, ...]] = ()
    """Parts of the network that a client keeps to itself."""
    down: ClassVar[Mapping[str, str]] = {}
    """Wire contract, server to client (see Contract)."""
    up: ClassVar[Mapping[str, str]] = {}
    """Wire contract, client to server."""
    dp_support: str = "none: the method does not say that its uplink follows from noised gradients alone"
    """Whether private training covers what is sent: "full"; "partial: what else, computed from raw data" where all of that
    passes `ctx.class_sums` or `ctx.class_counts`, so that it takes dp-release as well; or "none: reason", which refuses it."""
    batchnorm: ClassVar[str] = "no: the method does not say what it makes of running statistics"
    """Whether a network with BatchNorm layers fares well under it, its running statistics being items like weights: "yes";
    "local: reason", where they must stay on the client; or "no: reason", where they must be frozen."""
    batchable: ClassVar[bool] = True
    """Whether replays of several guesses may share one computation: not where a loop stops on the data."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Published settings by name (paper, pfllib): hyper-parameters of the method and common ones."""

    def __init__(self, cfg: C, net: Net, clients: int):
        self.cfg = cfg
        self.net = net
        self.clients = clients
        self.contract = Contract(self.key, self.down, self.up, net)

    def init_server(self, fresh: Items) -> Items:
        """Return the server's first items, from newly drawn network parameters."""
        return select(fresh, *self.shared)

    def enrol(self, server: Items, sizes: Sequence[int]) -> Items:
        """Return the server's first items once every client has said how many training rows it holds."""
        return server

    def init_client(self, fresh: Items, server: Items) -> Items:
        """Return a newcomer's state: from its own draw of the network, and from the server's first items."""
        return select(fresh, *self.private)

    def downlink(self, server: Items, client: int) -> Items:
        """Return what the server sends to one client."""
        return server

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        """Return the client's new state and its upload. Pure: inputs are left alone."""
        raise TypeError(f"{type(self).__name__} does not define local(); every method must.")

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        """Return the server's next items from the accepted uploads {client: items}, in client order; never called empty."""
        raise TypeError(f"{type(self).__name__} does not define aggregate(); every method must.")

    def serve(self, server: Items, client: int) -> Items:
        """Return what `deploy` is given of the server now: the downlink, unless the model to use is not the one to train."""
        return self.downlink(server, client)

    def deploy(self, state: Items, down: Items) -> Items:
        """Return the items of the model that is tested on the client's data; `down` is what `serve` gives now."""
        return select(down, *self.shared) | select(state, *self.private)

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        """Return the items of the client's model as local work left it, before aggregation."""
        return self.deploy(state, down | up)

    def personalise(self, ctx: Local, items: Items) -> Items:
        """Return the tested items once more fitted to the client's own training rows, for methods that do so before use.

        `ctx` is the context of the round that comes next. Nothing of this is sent.
        """
        return items

    @property
    def personalises(self) -> bool:
        """Whether `personalise` does anything."""
        return type(self).personalise is not Algorithm.personalise

    def scores(self, items: Items, x: Tensor) -> Tensor:
        """Return the class scores [B, classes] of the deployed model; the largest is its prediction."""
        return self.net.logits(items, x)

    def global_model(self, server: Items) -> Items | None:
        """Return the items of the one model that serves everybody, or None where the method has none."""
        return None

    def sampling_weights(self, sizes: Sequence[int]) -> Sequence[float] | None:
        """Return each client's chance to be in a cohort, up to scale; None means equal chances."""
        return None

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        """Fold one accepted exchange into what an observer of the whole wire log remembers of this client."""
        return memory

    def reconstruct_state(self, memory: Items) -> Items | None:
        """Return the client's private state as the log reveals it, all items or some, or None where it reveals none.

        The memory starts as the state of a newcomer with a public draw, and `observe` folds the exchanges into it.
        """
        return None

    def start(self, state: Items, down: Items) -> Items:
        """Return the parameters at which the local work that is sent begins. Not every method begins at the downlink."""
        return down

    @property
    def starts_at_downlink(self) -> bool:
        """Whether the local work that is sent begins at what comes down, whatever the client has kept."""
        return type(self).start is Algorithm.start

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """Return what an upload says about the data, by parameter name where it can be: the mean gradient that the
        weights or deltas amount to, by how much running statistics moved, and other float items (prototypes) as they are."""
        start, seen = self.start(state, down), {}
        for name, value in floating(up).items():
            kind = kind_of(self.contract.items("up")[name])
            if kind == "weights":
                seen[name] = (start[name] - value) / (lr * steps)
            elif kind == "weights-delta":
                seen[name.removeprefix("delta.")] = -value / (lr * steps)
            elif kind == "buffers" and name in start:
                seen[name] = value - start[name]
            elif value.dim():
                seen[name] = value
        return seen


def sample_count(ctx: Local) -> Items:
    """Return the item `num_samples`, 0-d int64: the weight of a client in a sample-weighted mean."""
    return {"num_samples": torch.tensor(ctx.num_samples)}


def mean_of_uploads(ups: Mapping[int, Items], *parts: str, weighting: Literal["samples", "uniform"]) -> Items:
    """Return the mean over the accepted uploads of the items in `parts`: equal weights, or by `num_samples`."""
    weights = [float(up["num_samples"]) if weighting == "samples" else 1.0 for up in ups.values()]
    return weighted_mean([select(up, *parts) for up in ups.values()], weights)
