"""Cases T11: what is held and copied does not grow with the number of clients."""

import gc
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pflsec.core.items import weighted_mean
from pflsec.runtime.rounds import Federated
from tests import toys


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that operations make anew."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and all(found is not a for a in args):
            self.bytes += found.numel() * found.element_size()
        return found


def held(clients: int) -> int:
    """Return the bytes of all tensors that a run of FedAvg keeps from one round to the next."""
    federated = Federated(toys.setup("fedavg", data=toys.dataset([3] * clients), rounds=2))
    federated.advance()
    gc.collect()
    state = federated.state()
    kept = [
        *state.server.values(),
        *(v for s in [*state.states.values(), *state.memories.values()] for v in s.values()),
    ]
    return sum({v.untyped_storage().data_ptr(): v.untyped_storage().nbytes() for v in kept}.values())


def test_u129_what_is_kept_between_rounds_does_not_grow_with_the_clients():
    """FedAvg's clients keep nothing: ten times as many of them cost no model more."""
    assert held(4) == held(40) > 0


def test_u130_a_mean_over_uploads_makes_one_copy_however_many_there_are():
    value = torch.ones(1000)

    def copied(count: int) -> int:
        many = [{"w": (i + 1) * value} for i in range(count)]
        with Allocations() as seen:
            mean = weighted_mean(many, [1.0] * count)
        assert torch.allclose(mean["w"], torch.full((1000,), (count + 1) / 2))
        assert all(torch.equal(m["w"], (i + 1) * value) for i, m in enumerate(many))
        return seen.bytes

    assert copied(2) == copied(50) == 4000
