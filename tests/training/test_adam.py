"""Adam as a pure function, against torch's own."""

import pytest
import torch

from pflsec.training import adam
from tests import toys

pytestmark = pytest.mark.usefixtures("doubles")


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_are_torchs(decay: float):
    x, y = toys.batch()
    params = toys.tiny().fresh(0)
    memory = adam.begin(params)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    optimiser = torch.optim.Adam(leaves.values(), lr=0.05, weight_decay=decay)
    for _ in range(20):
        params, memory = adam.step(params, memory, toys.hand_gradient(params, x, y), lr=0.05, weight_decay=decay)
        optimiser.zero_grad()
        toys.hand_loss(leaves, x, y).backward()
        optimiser.step()
    assert toys.distance(params, leaves) < 1e-12


def test_a_step_leaves_its_inputs_alone():
    params = toys.tiny().fresh(0)
    memory = adam.begin(params)
    before = toys.snapshot(params | memory)
    adam.step(params, memory, params, lr=0.1)
    assert toys.same(params | memory, before)


def test_the_first_step_is_the_sign_of_the_gradient():
    """m / sqrt(s) is g / |g| after the corrections."""
    params = {"w": torch.tensor([1.0, 1.0, 1.0])}
    moved, _ = adam.step(params, adam.begin(params), {"w": torch.tensor([3.0, -0.2, 0.0])}, lr=0.1)
    assert moved["w"].tolist() == pytest.approx([0.9, 1.1, 1.0])
