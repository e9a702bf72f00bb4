"""Input defenses in a run: what feeds a client's local work, and which methods they are of use to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.algorithm import Done
from pflsec.core.defense import Mixture, together
from pflsec.core.items import Items, first_unlike
from pflsec.core.streams import numpy_stream
from pflsec.runtime.setup import Setup
from pflsec.training.feed import Feed
from pflsec.training.local import LocalWork

Log = list[tuple[str, Mixture]]


def feed(
    setup: Setup,
    t: int,
    client: int,
    *key: int | str,
    train: tuple[Tensor, Tensor] | None = None,
    places: Sequence[int] | np.ndarray | None = None,
    log: Log | None = None,
) -> Feed | None:
    """Return what feeds a client's local work in round t, or None where it trains on its rows as they are.

    key     tells the draws of this work from those of others in that round
    train   the client's training rows, where they are at hand
    places  which of the rows the work is on; None: all
    log     gets what each step was given
    """
    if (defense := setup.mixing) is None:
        return None
    x, y = setup.federation.train(client) if train is None else train
    every = torch.arange(len(y))
    rows = every if places is None else torch.as_tensor(places)
    shares = F.one_hot(y, setup.federation.input.classes).to(x.dtype)
    rng = numpy_stream(setup.config.seed, "defense", defense.key, t, client, *key)
    return Feed(defense, x, shares, rows, every, rng, log)


def stored(log: Log, train: Tensor, rows: np.ndarray) -> Items:
    """Return what the vault keeps of what each step was given (see pflsec.core.vault).

    train  the client's training rows as the network sees them      rows  their dataset rows, int64
    """
    parts, weights = together([(made.parts, made.weights) for _, made in log])
    index = torch.as_tensor(rows)
    sizes = torch.tensor([len(made.x) for _, made in log])
    return {
        "x": torch.cat([made.x for _, made in log]),
        "y": torch.cat([made.y for _, made in log]),
        "step": torch.repeat_interleave(torch.arange(len(log)), sizes),
        "main": torch.repeat_interleave(torch.tensor([phase == "main" for phase, _ in log]), sizes),
        "parts": index[parts],
        "weights": weights,
        "images": train[parts.unique()],
        "dataset_index": index[parts.unique()],
    }


def why_not(setup: Setup) -> str | None:
    """Return what a client says of its images that no gradient says, or None: found by doing two rounds of local work on two
    rows, on which gradients of a loss count as zero, and on their negatives."""
    if setup.federation.input.vocabulary is not None:
        return "its inputs are texts, which cannot be mixed"
    algorithm, server = setup.algorithm, setup.server_first
    clients = range(min(2, algorithm.clients))
    states = {c: algorithm.init_client(setup.client_fresh(c), server) for c in clients}
    rows = {c: tuple(values[:2] for values in setup.federation.train(c)) for c in clients}

    def done(kind: type[LocalWork], t: int, client: int, sign: int = 1) -> Done:
        (x, y), rate = rows[client], setup.config.rate(t)
        ctx = kind(setup.net, sign * x, y, rate, 1, len(y), setup.config.seed, t, client, fixed_epochs=True)
        return algorithm.local(ctx, states[client], algorithm.downlink(server, client))

    with torch.random.fork_rng(devices=[]):
        for t in range(2):
            if odd := first_unlike(done(Still, t, 0).up, done(Still, t, 0, sign=-1).up):
                return f"{odd} says something of the client's own images by another way than gradients"
            turn = {c: done(LocalWork, t, c) for c in clients}
            states = {c: one.state for c, one in turn.items()}
            server = algorithm.aggregate(server, {c: one.up for c, one in turn.items()})
    return None


class Still(LocalWork):
    """Local work in which nothing is learnt: gradients are zero, and running statistics stay as they are."""

    def _step_gradient(self, *args: Any, **more: Any) -> list[Tensor]:
        found = super()._step_gradient(*args, **more)
        self._statistics = {}
        return found

    def _gradient(self, loss: Tensor, params: Items) -> list[Tensor]:
        return [torch.zeros_like(p) for p in params.values()]
