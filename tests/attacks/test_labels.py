"""Labels that the wire gives away without any search."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.attacks import label_rules
from pflsec.wire.capture import Capture
from tests.attacks.victims import attack, victim

NETS = range(60)


def last_gradient(seed: int, classes: int, activation: nn.Module, scale: float) -> tuple[dict[str, Tensor], int]:
    """Return the last layer's gradient for one input in a random network, and the input's label."""
    rng = torch.Generator().manual_seed(seed)
    features = activation(torch.randn(20, generator=rng, dtype=torch.float64))
    weight = scale * torch.randn(classes, 20, generator=rng, dtype=torch.float64)
    bias = scale * torch.randn(classes, generator=rng, dtype=torch.float64)
    weight.requires_grad_()
    bias.requires_grad_()
    label = torch.randint(classes, (1,), generator=rng)
    loss = F.cross_entropy((weight @ features + bias)[None], label)
    slopes = torch.autograd.grad(loss, [weight, bias])
    return {"head.weight": slopes[0], "head.bias": slopes[1]}, int(label)


def seen(target: dict[str, Tensor], count: int = 1) -> Capture:
    """Return a capture of which nothing but the gradient is looked at."""

    class Seen:
        last_layer = "head"

    stand_in: Any = Seen()
    stand_in.target, stand_in.count = target, count
    return cast(Capture, stand_in)


def restored(cap: Capture) -> int | None:
    found = label_rules.of_one_image(cap)
    return None if found is None else int(found)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Identity()], ids=["relu", "tanh", "identity"])
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_bias_tells_the_label_in_every_network(activation: nn.Module, scale: float):
    for seed in NETS:
        target, label = last_gradient(seed, 10, activation, scale)
        assert restored(seen(target)) == label


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.Identity()], ids=["relu", "tanh", "identity"])
@pytest.mark.parametrize("classes", [3, 10])
def test_without_a_bias_the_weights_tell_the_label_in_every_network(activation: nn.Module, classes: int):
    for seed in NETS:
        target, label = last_gradient(seed, classes, activation, 0.3)
        assert restored(seen({"head.weight": target["head.weight"]})) == label


def test_of_two_classes_the_weights_tell_the_label_after_relu_and_nothing_after_tanh():
    for seed in NETS:
        target, label = last_gradient(seed, 2, nn.ReLU(), 0.3)
        assert restored(seen({"head.weight": target["head.weight"]})) == label
        target, label = last_gradient(seed, 2, nn.Tanh(), 0.3)
        assert restored(seen({"head.weight": target["head.weight"]})) is None


def test_the_rule_keeps_silent_about_batches_and_hidden_last_layers():
    target, _ = last_gradient(0, 10, nn.ReLU(), 1.0)
    assert restored(seen(target, count=2)) is None
    assert restored(seen({"body.weight": target["head.weight"]})) is None


@pytest.mark.parametrize("steps", [1, 5])
def test_weights_after_several_steps_still_tell_the_label(steps: int):
    for first in range(8):
        v = victim(first=first, steps=steps)
        assert restored(v.capture()) == int(v.y)


def test_fedproto_sends_the_set_of_labels():
    for first in (0, 1, 2):
        v = victim("fedproto", first=first, batch=2)
        found = label_rules.from_label_set(v.capture(), torch.Generator().manual_seed(0))
        assert found is not None
        assert found.tolist() == sorted(v.y.tolist())


def test_labels_that_repeat_are_filled_up_from_the_set():
    v = victim("fedproto", first=0, batch=5)
    found = label_rules.from_label_set(v.capture(), torch.Generator().manual_seed(0))
    assert found is not None
    assert len(found) == 5
    assert set(found.tolist()) == set(v.y.tolist())


@pytest.mark.parametrize(
    ("key", "settings", "expected"),
    [
        ("fedavg", {"labels": "restore"}, "restore"),
        ("fedavg", {"labels": "optimise"}, "optimise"),
        ("fedavg", {"labels": "known"}, "known"),
        ("fedproto", {"labels": "restore"}, "wire"),
        ("fedrep", {"labels": "restore"}, "optimise"),
    ],
)
def test_a_result_names_how_its_labels_were_found(key: str, settings: dict[str, Any], expected: str):
    v = victim(key)
    found = attack("inverting-gradients", v.capture(labels=True), iterations=1, **settings)
    assert found.labels == expected
    if expected in ("known", "wire", "restore"):
        assert found.y is not None
        assert found.y.tolist() == v.y.tolist()
