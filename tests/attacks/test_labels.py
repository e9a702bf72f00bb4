"""Labels that the wire gives away without any search."""

from collections import OrderedDict
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.attacks import label_rules
from pflsec.core.inputs import InputSpec
from pflsec.core.items import cast as cast_items
from pflsec.models.network import Network
from pflsec.runtime.replay import capture, local_work
from pflsec.training.local import Training
from pflsec.wire.capture import Capture, Record
from tests import toys
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


# --- batches


def ten_classes() -> Network:
    """Return 16 -> 32 -> 10 with ReLU."""
    layers = (
        ("flat", nn.Flatten),
        ("fc1", lambda: nn.Linear(16, 32)),
        ("act", nn.ReLU),
        ("fc", lambda: nn.Linear(32, 10)),
    )
    return Network(lambda: nn.Sequential(OrderedDict((name, make()) for name, make in layers)), toys.SHAPE, 10)


def batch_of(labels: list[int], key: str = "fedavg", steps: int = 1, seed: int = 0) -> Capture:
    """Return the capture of noise with these labels."""
    net, count, rng = ten_classes(), len(labels), torch.Generator().manual_seed(seed)
    method = toys.method(key, net)
    spec = InputSpec(toys.SHAPE, 10, (0.5,), (0.5,))
    x, y = spec.normalise(torch.rand(count, *toys.SHAPE, generator=rng)), torch.tensor(labels)
    server = method.init_server(net.fresh(seed))
    state, down = method.init_client(net.fresh(seed, 1), server), method.downlink(server, 0)
    record = Record("a", key, 0, 0, 0, "probe", down, {}, {}, spec, count, steps, count, 0.1, False)
    up = method.local(local_work(net, record, x, y, 0, driver=Training), state, down).up
    return capture(method, net, replace(record, up=up), history=True, seed=0)


def counted(cap: Capture, seed: int = 0) -> list[int] | None:
    """Return the labels, sorted, that the counts come to with noise for images."""
    rng = torch.Generator().manual_seed(seed)
    guesses = 0.3 * torch.randn(4, cap.count, *cap.input.shape, generator=rng, dtype=torch.float64)
    state = cast_items(cap.newcomer(rng), torch.float64)
    counts = label_rules.of_counts(cap, guesses, state)
    return None if counts is None else label_rules.listed(counts).tolist()


MULTISETS = [[0, 0], [9, 1], [4, 4, 4, 7], [2] * 8, [*range(10)] * 3, [0] * 20 + [8] * 11 + [3]]


@pytest.mark.parametrize("labels", MULTISETS, ids=len)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("key", ["fedavg", "fedprox"])
def test_a_fresh_network_gives_all_labels_of_a_batch_away_however_often_they_repeat(
    labels: list[int], steps: int, key: str
):
    for seed in range(3):
        assert counted(batch_of(labels, key, steps, seed), seed) == sorted(labels)


@pytest.mark.usefixtures("doubles")
def test_the_last_bias_is_the_mean_prediction_minus_the_shares_of_the_labels():
    v = victim(batch=5, after=2)
    mean = torch.softmax(v.setup.net.logits(v.record.down, v.x), 1).mean(0)
    shares = torch.bincount(v.y, minlength=toys.CLASSES) / 5
    assert torch.allclose(v.capture().target["head.bias"], mean - shares, atol=1e-6)


def test_with_the_batch_itself_for_a_guess_the_counts_are_exact_on_a_trained_network():
    for first in range(3):
        v = victim(batch=5, first=first, after=9)
        found = label_rules.of_counts(v.capture(), v.x.double()[None], {})
        assert found is not None
        assert label_rules.listed(found).tolist() == sorted(v.y.tolist())


def test_no_class_gets_fewer_images_than_its_bias_proves_whatever_the_guess():
    labels = [6, 6, 6, 1]
    cap = batch_of(labels)
    least = (-4 * cap.target["head.bias"] - 1e-3).ceil().clamp(min=0)
    assert least.sum() == 4  # predictions of a fresh network are near 1/10: here the signs alone tell all
    absurd = torch.full((1, 4, *toys.SHAPE), 1e3, dtype=torch.float64)
    assert label_rules.listed(label_rules.of_counts(cap, absurd, {})).tolist() == sorted(labels)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "count", "least", "expected"),
    [
        ([1.4, 0.6, 0.0], 2, [0, 0, 0], [1, 1, 0]),
        ([-3.0, 2.0, 2.0], 4, [0, 0, 0], [0, 2, 2]),
        ([0.2, 0.2, 3.6], 4, [1, 0, 0], [1, 0, 3]),
        ([0.0, 0.0, 0.0], 3, [0, 1, 0], [1, 2, 0]),
        ([0.0, 0.0, 0.0], 2, [2, 2, 0], [1, 1, 0]),
    ],
)
def test_whole_numbers_by_largest_remainder(parts: list[float], count: int, least: list[int], expected: list[int]):
    found = label_rules.whole(torch.tensor(parts).double(), count, torch.tensor(least))
    assert int(found.sum()) == count
    assert found.tolist() == expected


def test_a_batch_without_its_last_bias_has_its_labels_optimised_and_the_row_says_so():
    for key, batch in (("fedrep", 2), ("fedper", 3)):
        assert counted_name(key, batch) == "optimise"
    assert counted_name("fedavg", 3) == "restore"


def counted_name(key: str, batch: int) -> str:
    return attack("inverting-gradients", victim(key, batch=batch).capture(), iterations=1, restarts=1).labels
