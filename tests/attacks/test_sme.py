"""One gradient in place of many local steps: what it finds, where it agrees with unrolling, and where it has no say."""

import statistics
from dataclasses import replace

import pytest
import torch

from pflsec.attacks.optimisation import sme
from pflsec.core import registry
from pflsec.core.config import build
from pflsec.core.errors import NotApplicable
from pflsec.core.streams import stream
from pflsec.leakage.images import psnr
from pflsec.leakage.matching import assign
from pflsec.wire.capture import MOST_STEPS, Capture
from tests import toys
from tests.attacks.test_controls import shuffled
from tests.attacks.victims import Victim, attack, victim

SMALL = {"iterations": 400, "restarts": 2}


def gains(v: Victim, cap: Capture, **settings) -> list[float]:
    """Return by how many dB each image of the batch is found better than as the mean training image."""
    found = attack("sme", cap, **(SMALL | settings))
    assert found.x is not None
    true, pixels = (v.record.input.pixels(x.double()).clamp(0, 1) for x in (v.x, found.x))
    mean = torch.as_tensor(v.setup.federation.mean_image()).double()
    order = assign(true, pixels).tolist()
    return [psnr(image, pixels[j]) - psnr(image, mean) for image, j in zip(true, order, strict=True)]


def test_one_image_is_found_behind_twenty_steps():
    v = victim(steps=20)
    assert gains(v, v.capture())[0] > 18


def test_four_images_are_found_behind_twenty_steps():
    v = victim(steps=20, batch=4)
    found = gains(v, v.capture(labels=True), labels="known")
    assert min(found) > 2
    assert statistics.mean(found) > 8


def test_the_point_is_worth_learning():
    """Twenty steps later the gradient has turned: the one at the start explains less, and shows less."""
    v = victim(steps=20)
    learned, start = (attack("sme", v.capture(), point=point, **SMALL) for point in ("learned", "start"))
    assert learned.objective < 0.2 * start.objective
    assert v.psnr(learned.x) > v.psnr(start.x) + 5


def test_hundreds_of_steps_are_no_obstacle_where_unrolling_stops():
    v = victim(steps=4 * MOST_STEPS)
    with pytest.raises(NotApplicable, match="unrolling stops"):
        attack("inverting-gradients", v.capture())
    assert gains(v, v.capture())[0] > 12


def test_numbers_in_another_order_give_no_more_than_a_blind_guess():
    many = [victim(steps=20, client=client, first=first) for client in (1, 3) for first in range(3)]
    settings = {"iterations": 100, "restarts": 1}
    own, others = ([gains(v, shown(v).capture(), **settings)[0] for v in many] for shown in (lambda v: v, shuffled))
    assert statistics.median(own) > 10
    assert statistics.median(others) <= 1


def test_one_step_from_the_start_is_the_very_problem_of_inverting_gradients():
    cap, settings = victim().capture(), {"iterations": 30, "restarts": 1}
    found = []
    for name, more in (("inverting-gradients", {}), ("sme", {"point": "start"})):
        kind = registry.load("attacks", name)
        found.append(kind(build(kind.Config, settings | more, name)).reconstruct(cap, stream(0)))
    unrolled, surrogate = found
    assert surrogate.x is not None
    assert unrolled.x is not None
    assert toys.distance({"x": surrogate.x}, {"x": unrolled.x}) < 1e-6
    assert surrogate.objective == pytest.approx(unrolled.objective, rel=1e-6)


@pytest.mark.usefixtures("doubles")
def test_the_gradient_is_the_one_by_hand_at_the_share_of_the_way():
    v = victim(steps=3, batch=2)
    cap = v.capture()
    for place in (-1.0, 2.0):
        share = torch.sigmoid(torch.tensor(place))
        seen = sme.as_one_gradient(cap, sme.SHARES["learned"])
        found = seen.replay(v.x, v.y, {sme.PLACE: torch.tensor(place)})
        items = {k: w + share * (v.record.up[k] - w) for k, w in v.record.down.items()}
        assert toys.distance(found, toys.hand_gradient(items, v.x, v.y)) < 1e-12
    assert seen.record.steps == 1
    assert cap.record.steps == 3


def test_a_hidden_head_is_sought_or_given_and_only_what_is_sent_is_matched():
    v = victim("fedrep", after=2, local_epochs=4, steps=20, first=4)
    joint = attack("sme", v.capture(labels=True), labels="known", **SMALL)
    given = attack("sme", v.capture(labels=True, state=True), labels="known", hidden="oracle", **SMALL)
    assert (joint.hidden, given.hidden) == ("joint", "oracle")
    assert v.psnr(joint.x) > 16
    seen = sme.as_one_gradient(v.capture(), sme.SHARES["start"])
    assert all(name.startswith("body.") for name in seen.target)


def test_labels_are_restored_from_the_mean_gradient():
    v = victim(steps=20)
    found = attack("sme", v.capture(), iterations=1)
    assert found.labels == "restore"
    assert found.y is not None
    assert found.y.tolist() == v.y.tolist()


def test_statistics_that_are_sent_beside_the_weights_are_not_matched():
    v = victim(net=toys.normed(), batch=2, steps=2)
    seen = sme.as_one_gradient(v.capture(), sme.SHARES["middle"])
    assert seen.target.keys() == set(toys.normed().shapes) - toys.normed().buffers
    assert attack("sme", v.capture(), iterations=2).x is not None


@pytest.mark.parametrize("key", ["fedproto", "fd", "fedgh"])
def test_where_no_weights_are_sent_there_is_no_direction(key: str):
    with pytest.raises(NotApplicable, match="no weights are sent") as refusal:
        attack("sme", victim(key, steps=20).capture())
    assert "\n" not in str(refusal.value)


def test_a_cotangent_is_refused_and_so_is_silence():
    v = victim("fedrep", after=1, steps=20)
    with pytest.raises(NotApplicable, match="cotangent"):
        attack("sme", v.capture(), hidden="cotangent")
    with pytest.raises(NotApplicable, match="no weights are sent"):
        attack("sme", replace(v.capture(), target={}))
