"""Whether the sum of a round's changes is all that a method's server step needs, and the defenses that give it no more."""

from typing import Any

import torch

from pflsec.core.change import reference
from pflsec.core.contract import kind_of
from pflsec.core.defense import UserDefense
from pflsec.core.errors import PrivacyError
from pflsec.core.items import Items, floating
from pflsec.core.streams import stream
from pflsec.runtime.setup import Setup
from pflsec.training.local import LocalWork

SUMMABLE = ("weights", "weights-delta", "gradient", "control variate")
TRIED = 3  # clients whose uploads differ in the trial of the server step
STEP = 0.01  # standard deviation of what they differ by


def check(setup: Setup) -> None:
    """Raise PrivacyError where a defense of the aggregate seam would take from the server step what it needs."""
    if setup.channel.at_server and (reason := why_not(setup)):
        key = setup.channel.at_server[0].key
        raise PrivacyError(
            f"{setup.config.algo} cannot be trained under {key}, which gives the server the sum of a round's changes alone: "
            f"{reason}. Choose another method, or no {key}."
        )


def why_not(setup: Setup) -> str | None:
    """Return why a sum is not enough, or None where it is: found by playing the server step, not by asking the method."""
    algorithm, server = setup.algorithm, setup.server_first
    down, up = algorithm.downlink(server, 0), blank(setup)
    if not up:
        return "its clients send nothing"
    declared = algorithm.contract.items("up")
    for name, value in up.items():
        kind = kind_of(declared[name])
        if kind not in SUMMABLE and not (kind == "counts" and not value.dim()):
            return f"it needs each client's own {name} ({kind})"
        if kind == "weights" and (name not in down or down[name].shape != value.shape):
            return f"{name} does not count from what the server has sent"
    weights = [name for name in up if kind_of(declared[name]) == "weights"]
    if any(
        not torch.equal(algorithm.downlink(server, c)[k], down[k]) for c in range(algorithm.clients) for k in weights
    ):
        return "each client is sent a model of its own"
    tried = range(min(TRIED, algorithm.clients))
    many = {c: up | {k: v + _step(v, c, k) for k, v in floating(up).items()} for c in tried}
    mean = up | {k: torch.stack([m[k] for m in many.values()]).mean(0) for k in floating(up)}
    added = algorithm.aggregate(server, dict.fromkeys(many, mean))
    if not _alike(algorithm.aggregate(server, many), added):
        return "it does more with its clients' uploads than add them up"
    others = [algorithm.clients - 1 - c for c in many]
    secret = any(isinstance(d, UserDefense) for d in setup.channel.at_server)
    if secret and not _alike(added, algorithm.aggregate(server, dict.fromkeys(others, mean))):
        return "its server keeps a record of who took part, which must stay secret"
    return None


def _alike(a: Items, b: Items) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(v.double(), b[k].double(), 1e-4, 1e-6) for k, v in a.items())


def blank(setup: Setup) -> Items:
    """Return the upload of a client whose change is zero, with counts of 1: names and shapes are those of real ones."""
    algorithm, server = setup.algorithm, setup.server_first
    down, state = algorithm.downlink(server, 0), algorithm.init_client(setup.client_fresh(0), server)
    x, y = (t[:2] for t in setup.federation.train(0))
    ctx = LocalWork(setup.net, x, y, setup.config.lr, setup.config.local_epochs, len(y), 0, 0, 0)
    with torch.random.fork_rng(devices=[]):
        up = algorithm.local(ctx, state, down).up
    return still(setup, up, down)


def still(setup: Setup, like: Items, down: Items) -> Items:
    """Return an upload with the names of this one that changes nothing of what was sent down, with counts of 1."""
    contract = setup.algorithm.contract
    counts = {k: torch.ones_like(v) for k, v in like.items() if contract.kind("up", k) == "counts"}
    return like | counts | reference(contract, like, down, {})


def _step(value: torch.Tensor, client: int, name: str) -> Any:
    return STEP * torch.randn(value.shape, generator=stream("sums", client, name), dtype=value.dtype)
