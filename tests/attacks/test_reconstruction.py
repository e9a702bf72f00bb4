"""One image, one step: the upload is its gradient, and every attack finds the image again."""

import pytest
import torch

from pflsec.attacks import objectives
from pflsec.core.attack import Reconstruction
from pflsec.core.items import detached
from pflsec.models import catalogue
from tests import toys
from tests.attacks.victims import Victim, attack, victim

SMALL = {
    "dlg": {"iterations": 20, "restarts": 3, "rescue": 0},
    "idlg": {"iterations": 20, "restarts": 3, "rescue": 0},
    "inverting-gradients": {"iterations": 250, "restarts": 2},
}
every_attack = pytest.mark.parametrize("name", SMALL)


@every_attack
def test_an_image_is_recovered_almost_exactly_from_a_small_network(name: str):
    for first in range(3):
        v = victim(first=first)
        found = attack(name, v.capture(), **SMALL[name])
        assert found.status == "converged"
        assert v.psnr(found.x) >= 40
        assert found.y is not None
        assert found.y.tolist() == v.y.tolist()


@every_attack
def test_an_image_is_recovered_almost_exactly_from_the_mlp(name: str):
    net = catalogue.build("mlp", toys.SHAPE, toys.CLASSES)
    v = victim(net=net, first=1)
    found = attack(name, v.capture(), **SMALL[name])
    assert v.psnr(found.x) >= 40


@every_attack
def test_an_image_is_recovered_after_several_steps(name: str):
    v = victim(steps=3)
    found = attack(name, v.capture(), **SMALL[name])
    assert v.psnr(found.x) >= 40


def test_a_batch_is_recovered_where_its_labels_are_known():
    v = victim(batch=2)
    found = attack("dlg", v.capture(labels=True), labels="known", iterations=40, restarts=4, rescue=0)
    assert v.psnr(found.x) >= 40


def evaluated(v: Victim, found: Reconstruction, name: str) -> float:
    """Return an attack's objective at its own result, computed once more."""
    cap = v.capture()
    assert found.x is not None
    assert found.y is not None
    distance = objectives.cosine if name == "inverting-gradients" else objectives.relative_squared
    return float(distance(cap.target)(cap.replay(found.x, found.y, {})).detach())


@pytest.mark.parametrize("name", ["idlg", "inverting-gradients"])
def test_the_objective_belongs_to_the_image_that_is_returned(name: str):
    v = victim()
    found = attack(name, v.capture(), iterations=3, restarts=2, **({"rescue": 0} if name == "idlg" else {}))
    assert found.objective == pytest.approx(evaluated(v, found, name), rel=1e-9)


@pytest.mark.usefixtures("doubles")
def test_the_truth_explains_what_was_sent_and_half_of_it_does_not():
    """A client whose loss were half of what the attacker thinks would be noticed, though its direction is right."""
    v = victim(steps=2)
    down, up = v.record.down, v.record.up
    halved = v.with_upload({k: (down[k] + u) / 2 if u.is_floating_point() else u for k, u in up.items()})
    for shown, expected in ((v, 0), (halved, 1)):
        cap = shown.capture()
        again = detached(cap.replay(v.x, v.y, {}))
        assert float(objectives.relative_squared(cap.target)(again)) == pytest.approx(expected, abs=1e-12)
        assert float(objectives.cosine(cap.target)(again)) == pytest.approx(0, abs=1e-12)


@every_attack
def test_the_same_seed_gives_the_same_bits_and_another_one_others(name: str):
    settings = {**SMALL[name], "iterations": 2, "restarts": 1}
    cap = victim().capture()
    first, second, other = (attack(name, cap, seed=seed, **settings) for seed in (0, 0, 1))
    assert first.x is not None
    assert second.x is not None
    assert other.x is not None
    assert torch.equal(first.x, second.x)
    assert first.objective == second.objective
    assert not torch.equal(first.x, other.x)


def test_torchs_global_generator_makes_no_difference():
    cap = victim().capture()
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(attack("dlg", cap, iterations=2, restarts=1, rescue=0).x)
    assert torch.equal(*found)


def test_inverting_gradients_stays_among_valid_pixels():
    v = victim()
    for iterations in (1, 5):
        found = attack("inverting-gradients", v.capture(), iterations=iterations)
        assert found.x is not None
        pixels = v.record.input.pixels(found.x)
        assert float(pixels.min()) >= -1e-12
        assert float(pixels.max()) <= 1 + 1e-12


def test_single_precision_can_be_asked_for():
    v = victim()
    found = attack("idlg", v.capture(), precision="float32", iterations=20, restarts=2, rescue=0)
    assert found.x is not None
    assert found.x.dtype == torch.float32
    assert v.psnr(found.x) >= 30


def test_the_published_settings_of_dlg_search_without_bounds_and_count_failures():
    found = attack("dlg", victim().capture(), classic=True, iterations=3, restarts=4)
    assert found.restarts <= 4
    assert sum(found.failures.values()) <= found.restarts
    assert set(found.failures) <= {"diverged", "nonfinite"}


def test_more_restarts_never_give_a_worse_objective():
    cap = victim().capture()
    few, many = (attack("inverting-gradients", cap, iterations=5, restarts=n).objective for n in (1, 4))
    assert many <= few
