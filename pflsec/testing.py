"""Checks for authors of methods: what must hold for every method, on a small federation of real digits.

    exchange = pflsec.testing.exchange("mymethod.py:MyMethod")
    pflsec.testing.check_pure(exchange)

Each check raises AssertionError with a sentence. They need no more than a second or two each.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pflsec.config.train import resolve
from pflsec.core.algorithm import Done
from pflsec.core.items import Items, cast
from pflsec.runtime.replay import relative_distance
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup, prepare
from pflsec.training.local import Driver, LocalWork, Training, Unrolled

ROWS = 12
"""A client's rows in the checks: three batches of four."""
CLOSE = 1e-9
"""Relative distance in float64 below which two results are the same computation."""
CLIENT = 1


@dataclass(frozen=True)
class Exchange:
    """One client's next exchange in a federation that has trained for some rounds; all floats are float64."""

    setup: Setup
    round: int
    state: Items
    down: Items
    x: Tensor
    y: Tensor

    def local(self, driver: type[Driver] = Training, rows: int = ROWS) -> Done:
        """Return what the client's local work gives on its first rows, under one of the two interpreters."""
        config = self.setup.config
        ctx = LocalWork(
            net=self.setup.net,
            x=self.x[:rows],
            y=self.y[:rows],
            lr=config.lr,
            epochs=config.local_epochs,
            batch_size=config.batch_size,
            seed=config.seed,
            round=self.round,
            client=CLIENT,
            driver=driver(),
        )
        return self.setup.algorithm.local(ctx, self.state, self.down)


def exchange(method: str, rounds: int = 2, **settings: Any) -> Exchange:
    """Return a client's exchange after so many rounds of a method: a registered name, or FILE.py:Class."""
    common = {"model": "mlp", "clients": 3, "partition": "iid", "batch_size": 4, "capture_rounds": "none"}
    setup = prepare(resolve({"algo": method, "rounds": rounds + 1, "settings": settings, **common}))
    federated = Federated(setup)
    for _ in range(rounds):
        federated.advance()
    x, y = setup.federation.train(CLIENT)
    down = setup.algorithm.downlink(federated.server, CLIENT)
    wide = cast(federated.states[CLIENT], torch.float64), cast(down, torch.float64)
    return Exchange(setup, rounds, *wide, x.double(), y)


def check_pure(found: Exchange) -> None:
    """Local work repeats itself bit for bit, leaves its inputs alone, and keeps nothing in the method's object."""
    inputs = {"state": found.state, "downlink": found.down, "data": {"x": found.x, "y": found.y}}
    before = {what: {k: v.clone() for k, v in items.items()} for what, items in inputs.items()}
    kept = dict(vars(found.setup.algorithm))
    first, second = found.local(), found.local()
    for what, items in inputs.items():
        assert _same(items, before[what]), f"local work changes its {what} in place; return new tensors."
    for what, a, b in (("upload", first.up, second.up), ("state", first.state, second.state)):
        assert _same(a, b), f"local work gives another {what} when it is done again; draw from ctx.rng alone."
    now = vars(found.setup.algorithm)
    changed = [name for name in now if name not in kept or now[name] is not kept[name]]
    assert not changed, f"the method keeps {', '.join(changed)} between calls; keep it in the state or on the server."


def check_contract(found: Exchange) -> None:
    """Both messages hold the declared items in the declared shapes. Raises WireError, naming the item."""
    contract = found.setup.algorithm.contract
    contract.check("down", found.down, "the downlink")
    contract.check("up", found.local().up, "the upload")


def check_state(found: Exchange) -> None:
    """The state keeps the names and shapes with which a newcomer begins, or an attacker could not guess it."""
    setup = found.setup
    fresh = setup.algorithm.init_client(setup.client_fresh(CLIENT), setup.server_first)
    kept = {k: v.shape for k, v in found.local().state.items()}
    assert kept == {k: v.shape for k, v in fresh.items()}, "the state has other names or shapes than init_client gives."


def check_interpreters(found: Exchange) -> None:
    """Fast training and the differentiable interpreter, which attacks use, give the same upload and state."""
    fast, slow = found.local(Training), found.local(Unrolled)
    for what, a, b in (("upload", fast.up, slow.up), ("state", fast.state, slow.state)):
        distance = relative_distance(b, a)
        assert distance < CLOSE, (
            f"the two interpreters differ in the {what} by {distance:.2g}: detach or no_grad in local?"
        )


def check_replay(found: Exchange) -> None:
    """One step on one image, done again by an attacker who knows all, gives the upload: the residual is nothing."""
    sent, again = found.local(Training, rows=1).up, found.local(Unrolled, rows=1).up
    distance = relative_distance(again, sent)
    assert distance < CLOSE, (
        f"the replay of the true image misses the upload by {distance:.2g}; attacks would mean nothing."
    )


CHECKS = (check_pure, check_contract, check_state, check_interpreters, check_replay)


def _same(a: Items, b: Items) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
