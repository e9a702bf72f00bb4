"""Small federations and networks, rounds with everything that crossed the wire, and gradients worked out by hand."""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.config.train import TrainConfig
from pflsec.core import registry
from pflsec.core.algorithm import Algorithm
from pflsec.core.buffers import LocalBuffers
from pflsec.core.change import increments
from pflsec.core.config import build
from pflsec.core.defense import Defense
from pflsec.core.items import Items
from pflsec.core.network import Net
from pflsec.data.datasets import Dataset, from_arrays
from pflsec.data.federation import Federation
from pflsec.models import catalogue
from pflsec.models.network import Network
from pflsec.runtime.defending import lengthened
from pflsec.runtime.executor import learning_rate
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup, prepare
from pflsec.training.local import Driver, LocalWork, Training
from pflsec.wire.channel import Channel, Ledger, Sent

SHAPE, CLASSES = (1, 4, 4), 3
TRAIN = (5, 8, 3, 8)
"""Training rows of the four clients."""
HELD = ((0, 1), (1, 2), (0,), (0, 1, 2))
"""Classes of the four clients."""

Method = str | type[Algorithm[Any]]
Loss = Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor]


def tiny_module() -> nn.Module:
    """Return 16 -> 5 -> 3 with tanh: smooth, so that finite differences are accurate."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(), fc1=nn.Linear(16, 5), act=nn.Tanh(), fc=nn.Linear(5, CLASSES)
    )
    return nn.Sequential(layers)


def tiny() -> Network:
    """Return the functional view of `tiny_module`, in torch's default dtype."""
    return Network(tiny_module, SHAPE, CLASSES)


def cut(all_in: Literal["body", "head"]) -> Network:
    """Return the tiny network with all its parameters in one part."""

    def with_an_end() -> nn.Module:
        module = tiny_module()
        module.add_module("end", nn.Identity())
        return module

    return Network(with_an_end, SHAPE, CLASSES, "fc1" if all_in == "head" else "end")


def normed_module() -> nn.Module:
    """Return a 2x2 convolution, torch's BatchNorm, 36 -> 5, BatchNorm once more, and 5 -> 3, with tanh in between."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv=nn.Conv2d(1, 4, 2), bn=nn.BatchNorm2d(4), act=nn.Tanh(), flatten=nn.Flatten(),
        fc1=nn.Linear(36, 5), bn1=nn.BatchNorm1d(5), act1=nn.Tanh(), fc=nn.Linear(5, CLASSES),
    )  # fmt: skip
    return nn.Sequential(layers)


def normed(split: str | None = None, frozen: bool = False) -> Network:
    """Return the functional view of `normed_module`."""
    return Network(normed_module, SHAPE, CLASSES, split, frozen=frozen)


def dataset(train: Sequence[int] = TRAIN, held: Sequence[Sequence[int]] = HELD, test: int = 3) -> Dataset:
    """Return 4x4 images with one bright row, the row being the class, for natural clients of exactly these sizes."""
    rng = np.random.default_rng(7)
    rows = [
        (client, held[client % len(held)][i % len(held[client % len(held)])], i >= size)
        for client, size in enumerate(train)
        for i in range(size + test)
    ]
    clients, labels, is_test = (np.array(column) for column in zip(*rows, strict=True))
    images = rng.integers(0, 90, (len(rows), *SHAPE), dtype=np.uint8)
    images[np.arange(len(rows)), 0, labels] += 150
    return from_arrays(images, labels, client_ids=clients, is_test=is_test, class_names=["a", "b", "c"], name="toy")


def texts(rows: int = 48, words: int = 30, length: int = 8) -> Dataset:
    """Return texts of 3 to 8 words, some of them twice and one that is the class's own; the first client's are `rows` / 4."""
    rng = np.random.default_rng(11)
    tokens, labels = np.zeros((rows, length), dtype=np.int64), np.arange(rows) % CLASSES
    for text, label in zip(tokens, labels, strict=True):
        size = rng.integers(3, length + 1)
        text[:size] = rng.integers(5, words, size)
        text[0], text[1] = 2 + label, text[2]
    names = ("<pad>", "<unk>", "alpha", "beta", "gamma", *(f"w{i}" for i in range(5, words)))
    clients, is_test = np.arange(rows) // (rows // 4), np.arange(rows) % 6 == 5
    return Dataset("toy texts", tokens, labels, CLASSES, ("a", "b", "c"), clients, is_test, "made up", names)


def bag(data: Dataset) -> Network:
    """Return the bag of embeddings for these texts."""
    assert data.words is not None
    return catalogue.build("bag", data.images.shape[1:], data.classes, vocabulary=len(data.words))


@dataclass(frozen=True, eq=False)
class Typed(Federation):
    """A federation whose images are of a given dtype."""

    dtype: torch.dtype

    def _tensors(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        x, y = super()._tensors(rows)
        return x.to(self.dtype) if x.is_floating_point() else x, y


class Recorder(Channel):
    """A channel that keeps what came out of it: {(direction, round, client): message}."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.log: dict[tuple[str, int, int], Items] = {}

    def send_down(self, message: Items, t: int, client: int, ledger: Ledger | None = None) -> Items:
        self.log["down", t, client] = super().send_down(message, t, client, ledger)
        return self.log["down", t, client]

    def send_up(self, message: Items, reference: Items, t: int, client: int, *rest: Any, **more: Any) -> Sent:
        sent = super().send_up(message, reference, t, client, *rest, **more)
        self.log["up", t, client] = sent.up
        return sent


class Stop(Exception):
    """Ends a run from outside."""


def stopping(at: int) -> Callable[[int, Mapping[str, Any]], None]:
    """Return what to call after each round, so that the run is stopped after this one."""

    def stop(t: int, metrics: Mapping[str, Any]) -> None:
        if t == at:
            raise Stop

    return stop


def method(kind: Method, net: Network | None = None, clients: int = 4, **settings: Any) -> Algorithm[Any]:
    """Return a method, by key or by class, with these settings."""
    found = registry.load("algorithms", kind) if isinstance(kind, str) else kind
    return found(build(found.Config, settings, found.key), net or tiny(), clients)


def setup(
    kind: Method,
    *,
    data: Dataset | None = None,
    net: Network | None = None,
    defenses: Sequence[Defense[Any]] = (),
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Setup:
    """Return the setup of a run on the toy federation, whose channel remembers its messages.

    options  of TrainConfig; two local epochs of batches of 4 at lr 0.1, no captures, unless given
    """
    key = kind if isinstance(kind, str) else kind.key
    common: dict[str, Any] = {
        "partition": "natural", "test": "given", "model": "mlp", "capture_rounds": "none",
        "settings": dict(settings or {}),
        "rounds": 3, "local_epochs": 2, "batch_size": 4, "lr": 0.1,
        "algo": key if key in registry.names("algorithms") else "fedavg",
    }  # fmt: skip
    made = prepare(TrainConfig(**(common | options)), data or dataset())
    algorithm = method(kind, net or lengthened(tiny(), made.defenses), made.federation.clients, **(settings or {}))
    if made.config.buffers == "local" and algorithm.net.buffers:
        algorithm = LocalBuffers(algorithm)
    channel = Recorder(algorithm.contract, [*made.defenses, *defenses], made.config.seed, increments(algorithm))
    federation = Typed(**vars(made.federation), dtype=torch.get_default_dtype())
    return replace(made, federation=federation, net=algorithm.net, algorithm=algorithm, channel=channel)


@dataclass(frozen=True)
class Round:
    """One round: items before it, messages in it, items after it."""

    t: int
    server: Items
    states: Mapping[int, Items]
    downs: Mapping[int, Items]
    ups: Mapping[int, Items]
    next_server: Items
    next_states: Mapping[int, Items]
    metrics: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]


def rounds(made: Setup, count: int | None = None) -> list[Round]:
    """Play a run's rounds and return each of them."""
    federated, played = Federated(made), []
    channel = made.channel
    assert isinstance(channel, Recorder)
    for t in range(made.config.rounds if count is None else count):
        server, states = federated.server, dict(federated.states)
        metrics, rows = federated.advance()
        downs, ups = (
            {c: m for (way, s, c), m in channel.log.items() if (way, s) == (direction, t)}
            for direction in ("down", "up")
        )
        played.append(Round(t, server, states, downs, ups, federated.server, dict(federated.states), metrics, rows))
    return played


def play(kind: Method, count: int = 3, **options: Any) -> list[Round]:
    """Play rounds of a method on the toy federation (see `setup` for the options)."""
    return rounds(setup(kind, rounds=count, **options))


def context(made: Setup, t: int, client: int, driver: type[Driver] = Training, **changes: Any) -> LocalWork:
    """Return the context that the runtime gives to a client in a round, with changes."""
    x, y = made.federation.train(client)
    work = LocalWork(
        net=made.net,
        x=x,
        y=y,
        lr=learning_rate(made, t),
        epochs=made.config.local_epochs,
        batch_size=made.config.batch_size,
        seed=made.config.seed,
        round=t,
        client=client,
        driver=driver(),
    )
    return replace(work, **changes)


def work(x: Tensor, y: Tensor, net: Net | None = None, **changes: Any) -> LocalWork:
    """Return the context of one full-batch step at lr 0.1 on this data, with changes."""
    settled: dict[str, Any] = {
        "net": net or tiny(), "x": x, "y": y, "lr": 0.1, "epochs": 1, "batch_size": len(y),
        "seed": 0, "round": 0, "client": 0,
    }  # fmt: skip
    return LocalWork(**(settled | changes))


def batch(count: int = 6, classes: Sequence[int] = (0, 1, 2), seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random inputs [count, 1, 4, 4], and labels that go through the classes."""
    x = torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(seed))
    return x, torch.tensor([classes[i % len(classes)] for i in range(count)])


# --- the tiny network and its loss once more, by hand


def hand_features(items: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the features [B, 5] of the tiny network."""
    return torch.tanh(F.linear(x.flatten(1), items["body.fc1.weight"], items["body.fc1.bias"]))


def hand_loss(items: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy of the tiny network: mean over the batch of logsumexp(z) - z_y."""
    z = F.linear(hand_features(items, x), items["head.weight"], items["head.bias"])
    return (z.logsumexp(1) - z.gather(1, y[:, None]).squeeze(1)).mean()


def hand_gradient(items: Mapping[str, Tensor], x: Tensor, y: Tensor, loss: Loss = hand_loss) -> Items:
    """Return the gradient of a loss of these items at (x, y)."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in items.items()}
    found = torch.autograd.grad(loss(leaves, x, y), list(leaves.values()), allow_unused=True)
    return {k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(leaves.items(), found, strict=True)}


def hand_step(items: Mapping[str, Tensor], gradient: Mapping[str, Tensor], lr: float) -> Items:
    """Return items - lr * gradient."""
    return {k: v - lr * gradient[k] for k, v in items.items()}


# --- comparing items


def snapshot(items: Mapping[str, Tensor]) -> Items:
    """Return copies, to see later whether the originals have changed."""
    return {k: v.detach().clone() for k, v in items.items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether names, dtypes, shapes and every bit agree."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return the largest absolute difference; infinity where names or shapes differ; NaN, which is neither small nor large,
    where any difference is."""
    if a.keys() != b.keys() or any(a[k].shape != b[k].shape for k in a):
        return float("inf")
    gaps = [float((a[k].detach().double() - b[k].detach().double()).abs().max()) for k in a if a[k].numel()]
    return next(filter(math.isnan, gaps), max(gaps, default=0.0))  # max alone passes over a NaN that is not the first
