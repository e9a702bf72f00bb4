"""Victims whose batch, private items and upload are known, to hold attacks against."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pflsec.core import registry
from pflsec.core.attack import Reconstruction
from pflsec.core.config import build
from pflsec.core.items import Items
from pflsec.core.streams import stream
from pflsec.leakage.images import psnr
from pflsec.models.network import Network
from pflsec.runtime.replay import capture, local_work
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup
from pflsec.training.local import Training
from pflsec.wire.capture import Capture, Record
from tests import toys


@dataclass(frozen=True)
class Victim:
    """One client's exchange with a victim batch, and the truth about it."""

    setup: Setup
    record: Record
    x: Tensor
    y: Tensor
    state: Items

    def capture(self, *, history: bool = True, **granted: Any) -> Capture:
        """Return what an attack is given; `labels=True` and `state=True` grant the truth."""
        truth = {"labels": self.y, "state": self.state}
        given = {name: truth[name] for name, wanted in granted.items() if wanted}
        return capture(self.setup.algorithm, self.setup.net, self.record, history=history, seed=0, **given)

    def with_upload(self, up: Items) -> "Victim":
        """Return the same victim with another upload on the wire."""
        return replace(self, record=replace(self.record, up=up))

    def psnr(self, x: Tensor | None) -> float:
        """Return how alike a reconstruction and the truth are, in dB over the batch as it stands."""
        assert x is not None
        true, found = (self.record.input.pixels(v.double()).clamp(0, 1) for v in (self.x, x))
        return psnr(true.flatten(0, 1), found.flatten(0, 1))


def victim(
    key: str = "fedavg",
    *,
    client: int = 3,
    first: int = 0,
    batch: int = 1,
    steps: int = 1,
    after: int = 0,
    net: Network | None = None,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> Victim:
    """Return a victim on the toy federation.

    first, batch  which of the client's images; steps: local steps on them; after: rounds played before
    """
    made = toys.setup(key, net=net, settings=settings, rounds=9, capture_rounds="8", **options)
    federated = Federated(made)
    for _ in range(after):
        federated.advance()
    x, y = (values[first : first + batch] for values in made.federation.train(client))
    record = Record(
        id=f"r{after:03d}-c{client:02d}-v{first}-probe",
        algorithm=key,
        round=after,
        client=client,
        victim=first,
        kind="probe",
        down=made.algorithm.downlink(federated.server, client),
        up={},
        memory=federated.memories[client],
        input=made.federation.input,
        batch=batch,
        epochs=steps,
        batch_size=batch,
        lr=0.1,
        personal_equals_public=False,
    )
    state = federated.states[client]
    ctx = local_work(made.net, record, x, y, made.config.seed, driver=Training)
    up = made.algorithm.local(ctx, state, record.down).up
    return Victim(made, replace(record, up=up), x, y, state)


def attack(name: str, cap: Capture, seed: int = 0, **settings: Any) -> Reconstruction:
    """Return what an attack makes of a capture."""
    kind = registry.load("attacks", name)
    return kind(build(kind.Config, settings, name)).reconstruct(cap, stream(seed, name, cap.record.id))


def distance(victim: Victim, found: Reconstruction) -> float:
    """Return how far a reconstruction is from the truth, as the largest difference of a pixel."""
    assert found.x is not None
    return float((victim.record.input.pixels(found.x) - victim.record.input.pixels(victim.x)).abs().max())


def gradient_norm(items: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of all items as one vector."""
    return float(torch.stack([v.double().square().sum() for v in items.values()]).sum().sqrt())
