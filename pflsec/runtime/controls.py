"""Controls of an attack: one exchange that must leak, and one that says nothing about its victim.

An attack that finds nothing is evidence of privacy only where the same attack, with the same settings, finds what must leak;
and one that finds something only where it finds nothing in numbers that say nothing.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm
from pflsec.core.items import floating
from pflsec.models.network import Network
from pflsec.runtime.replay import local_work
from pflsec.runtime.setup import make_algorithm
from pflsec.training.local import Training, for_method
from pflsec.wire.capture import Record

LEARNING_RATE = 0.05
"""Of the positive control: a difference of float32 weights is as good as the gradient there."""


@dataclass(frozen=True)
class Control:
    """What is attacked in the place of a capture.

    positive  one step of plain FedAvg on the victim's batch (x, y), from a network drawn afresh, all of it on the wire
    negative  the capture, with the numbers of each item of what the upload changes in another order
    """

    name: Literal["positive", "negative"]
    x: Tensor | None = None
    y: Tensor | None = None

    def instead(self, algorithm: Algorithm[Any], net: Network, record: Record) -> tuple[Algorithm[Any], Record]:
        """Return the method and the record that are attacked in the place of these."""
        if self.x is None or self.y is None:
            return algorithm, shuffled(record)
        return plain_exchange(net, record, self.x, self.y)


def plain_exchange(net: Network, record: Record, x: Tensor, y: Tensor) -> tuple[Algorithm[Any], Record]:
    """Return FedAvg, and the record of one full-batch step of it on (x, y) [B, C, H, W], [B] from a new network."""
    algorithm = make_algorithm("fedavg", {}, net, 1)
    down = algorithm.downlink(algorithm.init_server(net.fresh("control")), 0)
    plain = replace(
        record,
        id="control-positive",
        algorithm="fedavg",
        down=down,
        memory={},
        batch=len(y),
        epochs=1,
        batch_size=len(y),
        lr=LEARNING_RATE,
        personal_equals_public=False,
        facts={},
    )
    ctx = local_work(net, plain, x, y, 0, Training)
    return algorithm, replace(plain, up=algorithm.local(for_method(ctx), {}, down).up)


def shuffled(record: Record) -> Record:
    """Return the record with the numbers of each float item permuted: those of its change where it came down too."""
    rng = torch.Generator().manual_seed(0)

    def mix(sent: Tensor, came: Tensor | None) -> Tensor:
        base = torch.zeros_like(sent) if came is None or came.shape != sent.shape else came
        change = (sent - base).flatten()
        return base + change[torch.randperm(len(change), generator=rng)].reshape(sent.shape)

    mixed = {name: mix(sent, record.down.get(name)) for name, sent in floating(record.up).items()}
    return replace(record, id="control-negative", up=record.up | mixed)
