"""The first layer's gradient is the image: exactly, whatever loss, label and head are."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from pflsec.attacks.analytic.linear import linear_layers, single_input, unexplained
from pflsec.attacks.optimisation.modern import feature_distance
from pflsec.core.errors import NotApplicable
from pflsec.core.inputs import InputSpec
from pflsec.leakage.images import capped, psnr
from pflsec.leakage.matching import assign
from pflsec.models import catalogue
from pflsec.models.mlp import mlp as mlp_module
from pflsec.models.network import Network
from pflsec.runtime.replay import capture, local_work
from pflsec.training.local import Training
from pflsec.wire.capture import Capture, Record
from tests import toys
from tests.attacks.test_controls import blind, noisy, shuffled
from tests.attacks.victims import Victim, attack, victim


def mlp() -> Network:
    return catalogue.build("mlp", toys.SHAPE, toys.CLASSES)


def network(*layers: tuple[str, Callable[[], nn.Module]]) -> Network:
    """Return the network of these layers, each drawn anew by what stands beside its name."""
    return Network(lambda: nn.Sequential(OrderedDict((k, make()) for k, make in layers)), toys.SHAPE, toys.CLASSES)


def convolved() -> Network:
    """Return a network whose only linear layer comes after a convolution."""
    return network(
        ("conv", lambda: nn.Conv2d(1, 2, 3)), ("act", nn.ReLU), ("flat", nn.Flatten), ("fc", lambda: nn.Linear(8, 3))
    )


def smooth() -> Network:
    """Return a network whose units react to every image."""
    return network(
        ("flat", nn.Flatten), ("fc1", lambda: nn.Linear(16, 9)), ("act", nn.Tanh), ("fc", lambda: nn.Linear(9, 3))
    )


def unbiased() -> Network:
    """Return a network whose first layer has no bias."""
    first = ("fc1", lambda: nn.Linear(16, 9, bias=False))
    return network(("flat", nn.Flatten), first, ("act", nn.ReLU), ("fc", lambda: nn.Linear(9, 3)))


def each(v: Victim, x: Tensor | None) -> list[float]:
    """Return the capped PSNR of every image that was found, each against the true image nearest to it."""
    assert x is not None
    true, found = (v.record.input.pixels(t.double()).clamp(0, 1) for t in (v.x, x))
    return [capped(psnr(true[i], found[j])) for i, j in enumerate(assign(true, found)) if j >= 0]


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("key", ["fedavg", "fedrep", "fedper", "fedprox", "scaffold"])
def test_images_come_back_exactly_whether_or_not_the_head_is_sent(key: str, batch: int):
    v = victim(key, net=mlp(), batch=batch)
    found = attack("analytic", v.capture())
    assert (found.status, found.hidden, found.note) == ("converged", "none", "")
    assert min(each(v, found.x)) >= (95 if key == "fedrep" else 100)
    assert len(each(v, found.x)) == batch


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("after", [0, 2])
def test_one_image_comes_back_after_any_number_of_steps_and_rounds(steps: int, after: int):
    v = victim("fedper", after=after, steps=steps)
    found = attack("analytic", v.capture())
    assert found.status == "converged"
    assert each(v, found.x) == [100]


def test_the_rounding_of_weights_at_a_small_learning_rate_costs_little():
    """float32 weights of 0.1 differ by 4e-9 at least, which a step of 0.005 makes 1e-6 of the gradient."""
    v = victim(net=mlp())
    gentle = v.with_upload({
        k: (v.record.down[k].double() + (u.double() - v.record.down[k]) / 20).float() if u.is_floating_point() else u
        for k, u in v.record.up.items()
    })  # fmt: skip
    assert each(v, attack("analytic", gentle.capture()).x)[0] >= 80


def test_without_a_search_the_seed_makes_no_difference():
    v = victim(net=mlp(), batch=2)
    first, second = (attack("analytic", v.capture(), seed=seed).x for seed in (0, 1))
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


def test_only_images_with_rows_of_their_own_are_returned_and_the_row_says_so():
    v = victim(net=mlp(), batch=8, after=2)
    found = attack("analytic", v.capture())
    assert found.x is not None
    assert 0 < len(found.x) < 8
    assert (found.status, found.note) == ("budget", f"{len(found.x)} of 8 images are certain")
    assert min(each(v, found.x)) >= 80


def test_the_label_of_one_image_is_read_by_rule():
    for first in range(3):
        v = victim(net=mlp(), first=first)
        found = attack("analytic", v.capture())
        assert found.y is not None
        assert (found.labels, found.y.tolist()) == ("restore", v.y.tolist())
    hidden = attack("analytic", victim("fedper", net=mlp()).capture())
    assert (hidden.labels, hidden.y) == ("none", None)
    granted = victim("fedper", net=mlp()).capture(labels=True)
    assert attack("analytic", granted, labels="known").labels == "known"
    with pytest.raises(NotApplicable, match="labels are not granted"):
        attack("analytic", victim(net=mlp()).capture(), labels="known")


@pytest.mark.parametrize("wrong", [shuffled, noisy])
def test_messages_that_say_nothing_give_no_image_and_do_not_pretend_to(wrong: Any):
    v = wrong(victim(net=mlp()))
    found = attack("analytic", v.capture())
    assert (found.status, found.objective > 0.1) == ("budget", True)
    assert each(v, found.x)[0] <= blind(v) + 1
    with pytest.raises(NotApplicable, match="2 images"):
        attack("analytic", wrong(victim(net=mlp(), batch=2)).capture())


def test_another_victims_message_gives_that_victims_image():
    mine, other = victim(net=mlp()), victim(net=mlp(), first=1)
    found = attack("analytic", other.capture())
    assert each(other, found.x) == [100]
    assert each(mine, found.x)[0] <= blind(mine) + 1


@pytest.mark.parametrize(
    ("key", "net", "batch", "says"),
    [
        ("fedavg", convolved, 1, "its first one reads features"),
        ("fedproto", mlp, 1, "the layer that reads the image, body.fc1, is not sent"),
        ("lgfedavg", mlp, 1, "the layer that reads the image, body.fc1, is not sent"),
        ("fedavg", unbiased, 1, "body.fc1 has no bias on the wire"),
        ("fedavg", smooth, 2, "none of the 2 images has units of body.fc1 to itself for certain"),
        ("fedavg", toys.tiny, 6, "6 images are too many for a layer of 5 units on 16 numbers"),
    ],
)
def test_where_there_is_nothing_to_work_on_the_reason_is_given(key: str, net: Any, batch: int, says: str):
    with pytest.raises(NotApplicable, match=says) as reason:
        attack("analytic", victim(key, net=net(), batch=batch).capture())
    assert "\n" not in str(reason.value)


def test_a_layer_that_did_not_move_has_nothing_to_say():
    v = victim(net=mlp())
    with pytest.raises(NotApplicable, match="bias did not change"):
        attack("analytic", v.with_upload(v.record.up | {k: v.record.down[k] for k in v.record.down}).capture())


@pytest.mark.parametrize("labels", [[0] * 3, [0, 0, 1], [0] * 6], ids=str)
@pytest.mark.parametrize("classes", [2, 3])
def test_of_images_of_one_class_no_mixture_is_taken_for_an_image(labels: list[int], classes: int):
    """With two classes all images push their units in the same proportions: rows of mixtures agree as those of images do."""
    net = Network(mlp_of(classes), toys.SHAPE, classes)
    told = 0
    for seed in range(12):
        cap, pixels = batch(net, labels, seed)
        try:
            found = attack("analytic", cap)
        except NotApplicable:
            continue
        true, rec = pixels.double(), cap.input.pixels(found.x).clamp(0, 1) if found.x is not None else pixels[:0]
        told += len(rec)
        assert all(max(psnr(t, one) for t in true) >= 60 for one in rec)
        assert (found.status == "converged") <= (len(rec) == len(labels))
    assert told >= 12


def mlp_of(classes: int) -> Callable[[], nn.Module]:
    return lambda: mlp_module(toys.SHAPE, classes)


def batch(net: Network, labels: list[int], seed: int) -> tuple[Capture, Tensor]:
    """Return the capture of noise with these labels after one step of FedAvg, and the pixels."""
    method, rng, count = toys.method("fedavg", net), torch.Generator().manual_seed(seed), len(labels)
    pixels, spec = torch.rand(count, *toys.SHAPE, generator=rng), InputSpec(toys.SHAPE, net.classes, (0.5,), (0.5,))
    down = method.init_server(net.fresh(seed))
    record = Record("a", "fedavg", 0, 0, 0, "probe", down, {}, {}, spec, count, 1, count, 0.1, False)
    work = local_work(net, record, spec.normalise(pixels), torch.tensor(labels), 0, driver=Training)
    return capture(method, net, replace(record, up=method.local(work, {}, down).up), history=True, seed=0), pixels


def test_linear_layers_are_named_with_what_they_read():
    assert linear_layers(victim().capture()) == {"body.fc1": True, "head": False}
    assert linear_layers(victim(net=convolved()).capture()) == {"head": False}
    assert linear_layers(
        victim(net=network(("flat", nn.Flatten), ("act", nn.Tanh), ("fc", lambda: nn.Linear(16, 3)))).capture()
    ) == {"head": False}


@pytest.mark.parametrize("key", ["fedavg", "fedper"])
def test_behind_a_convolution_the_features_of_one_image_come_back_exactly(key: str):
    net = network(
        ("conv", lambda: nn.Conv2d(1, 2, 3)), ("act", nn.ReLU), ("flat", nn.Flatten), ("fc1", lambda: nn.Linear(8, 6)),
        ("act1", nn.ReLU), ("fc", lambda: nn.Linear(6, 3)),
    )  # fmt: skip
    v = victim(key, net=net)
    cap = v.capture()
    true = net.linear_inputs(cap.began(cap.newcomer(torch.Generator()) | v.record.down), v.x.double())["body.fc1"]
    assert torch.allclose(single_input(cap, "body.fc1"), true, atol=1e-4)
    away = feature_distance(cap, torch.Generator().manual_seed(0))
    assert away is not None
    assert float(away(v.x.double())) < 1e-6
    assert float(away(v.x.double().flip(-1))) > 1e-3


@pytest.mark.parametrize(
    ("key", "options"),
    [("lgfedavg", {}), ("fedavg", {"batch": 2}), ("fedavg", {"net": "convolved", "steps": 2})],
    ids=["hidden body", "batch", "several steps"],
)
def test_features_that_are_not_known_for_certain_are_left_out(key: str, options: dict[str, Any]):
    if "net" in options:
        options = {**options, "net": convolved()}
    cap = victim(key, **options).capture()
    assert feature_distance(cap, torch.Generator().manual_seed(0)) is None
    assert "that term is left out" in attack("modern", cap, iterations=1, restarts=1).note


def test_what_is_left_unexplained_is_a_share_of_the_gradient():
    """Rows 3 x and 4 y: with x alone 16 |(y, 1)|^2 of the squares are left, as x and y are orthogonal with their ones."""
    x, y = torch.tensor([1.0, 0.0, 1.0, 1.0]).double(), torch.tensor([-1.0, 0.0, 0.0, 0.0]).double()

    class Seen:
        target: ClassVar = {"fc.weight": torch.stack([3 * x, 4 * y]), "fc.bias": torch.tensor([3.0, 4.0]).double()}

    cap: Any = Seen()
    assert unexplained(cap, "fc", torch.stack([x, y])) == pytest.approx(0, abs=1e-20)
    assert unexplained(cap, "fc", x[None]) == pytest.approx(16 * 2 / (9 * 4 + 16 * 2))
