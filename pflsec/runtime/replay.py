"""Replays: the client's own code on a guessed batch, differentiable, for attacks and for checking captures."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, cast, detached, floating
from pflsec.models.network import Network
from pflsec.train.local import Driver, LocalWork, Unrolled
from pflsec.wire.capture import Capture, Record


def local_work(
    net: Network, record: Record, x: Tensor, y: Tensor, seed: int, driver: Callable[[], Driver] = Unrolled
) -> LocalWork:
    """Return the context in which a captured exchange is done again with batch (x, y)."""
    return LocalWork(
        net=net,
        x=x,
        y=y,
        lr=record.lr,
        epochs=record.steps,
        batch_size=max(1, record.batch),
        seed=seed,
        round=record.round,
        client=record.client,
        driver=driver(),
    )


class Replay:
    """The method's own `local` on dummy data, as a differentiable function of data, labels and private items."""

    def __init__(self, algorithm: Algorithm[Any], net: Network, record: Record, seed: int):
        self.algorithm, self.net, self.record, self.seed = algorithm, net, record, seed
        self._down: dict[torch.dtype, Items] = {}

    def __call__(self, x: Tensor, y: Tensor, state: Items) -> Items:
        """Return Algorithm.change of the exchange that this batch would have caused."""
        state, down = cast(state, x.dtype), self._downlink(x.dtype)
        ctx = local_work(self.net, self.record, x, y, self.seed)
        done = self.algorithm.local(ctx, state, down)
        return self.algorithm.change(state, down, done.up, self.record.lr, self.record.steps)

    def _downlink(self, dtype: torch.dtype) -> Items:
        if dtype not in self._down:
            self._down[dtype] = cast(self.record.down, dtype)
        return self._down[dtype]


def capture(
    algorithm: Algorithm[Any],
    net: Network,
    record: Record,
    *,
    history: bool,
    seed: int,
    labels: Tensor | None = None,
    state: Items | None = None,
) -> Capture:
    """Return what an attack is given: the record, what the threat model grants, and the replay.

    history  the adversary has the client's earlier messages
    labels, state  the truth, where granted
    """
    known = _known_state(algorithm, net, record, history)
    reference = cast(known or {}, torch.float64)
    target = algorithm.change(
        reference, cast(record.down, torch.float64), cast(record.up, torch.float64), record.lr, record.steps
    )
    return Capture(
        record=record,
        target=detached(target),
        known=known,
        labels=labels,
        state=state,
        last_layer=net.last_layer,
        replay_fn=Replay(algorithm, net, record, seed),
        newcomer_fn=lambda rng: newcomer(algorithm, net, rng),
    )


def newcomer(algorithm: Algorithm[Any], net: Network, rng: torch.Generator) -> Items:
    """Return the private items of a client that draws its own network and has never taken part."""
    key = int(torch.randint(2**62, (1,), generator=rng))
    server = algorithm.init_server(net.fresh("newcomer", key, "server"))
    return algorithm.init_client(net.fresh("newcomer", key), server)


def residual(algorithm: Algorithm[Any], net: Network, record: Record, x: Tensor, y: Tensor, state: Items, up: Items, seed: int):
    """Return |replay - up| / |up| at the truth, over all float items of the upload as one vector.

    This is the consistency check of a capture: where it is not tiny, no attack on it means anything.
    """
    dtype = x.dtype
    ctx = local_work(net, record, x, y, seed)
    again = algorithm.local(ctx, cast(state, dtype), cast(record.down, dtype)).up
    return relative_distance(floating(again), floating(up))


def relative_distance(guess: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> float:
    """Return |guess - seen| / |seen| in float64; infinity when names or shapes differ."""
    if {k: v.shape for k, v in guess.items()} != {k: v.shape for k, v in seen.items()}:
        return float("inf")
    off = sum(float((guess[k].detach().double() - v.double()).square().sum()) for k, v in seen.items())
    size = sum(float(v.double().square().sum()) for v in seen.values())
    return (off / size) ** 0.5 if size else float(off > 0)


def _known_state(algorithm: Algorithm[Any], net: Network, record: Record, history: bool) -> Items | None:
    """Return the client's private items as far as the adversary can tell; {} if there are none, None if hidden."""
    if history and record.memory and (found := algorithm.reconstruct_state(record.memory)) is not None:
        return found
    if record.personal_equals_public:
        return record.memory
    example = newcomer(algorithm, net, torch.Generator().manual_seed(0))
    return None if floating(example) else {}
