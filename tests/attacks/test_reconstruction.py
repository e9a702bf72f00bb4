"""One image, one step: the upload is its gradient, and every attack finds the image again."""

from typing import Any

import pytest
import torch

from pflsec.attacks import objectives
from pflsec.attacks.priors import batchnorm
from pflsec.core.attack import Reconstruction
from pflsec.core.errors import ConfigError
from pflsec.core.items import detached
from pflsec.models import catalogue
from tests import toys
from tests.attacks.victims import Victim, attack, victim

SMALL = {
    "dlg": {"iterations": 20, "restarts": 3, "rescue": 0},
    "idlg": {"iterations": 20, "restarts": 3, "rescue": 0},
    "inverting-gradients": {"iterations": 250, "restarts": 2},
    "modern": {"iterations": 300, "restarts": 3, "tv": 1e-6},
    "grad-inversion": {"iterations": 300, "restarts": 2, "tv": 1e-6},
}
every_attack = pytest.mark.parametrize("name", SMALL)


@every_attack
def test_an_image_is_recovered_almost_exactly_from_a_small_network(name: str):
    for first in range(3):
        v = victim(first=first)
        found = attack(name, v.capture(), **SMALL[name])
        assert found.status in ("converged", "budget")
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


def test_dlg_as_published_searches_without_bounds_and_counts_failures():
    endings = []
    for seed in range(4):
        found = attack("dlg-classic", victim().capture(), seed=seed, iterations=30)
        assert found.x is not None
        assert torch.isfinite(found.x).all()
        assert found.restarts == 1
        assert found.failures == ({found.status: 1} if found.status in ("diverged", "nonfinite") else {})
        endings.append(found.status)
    assert "diverged" in endings


def test_dlg_as_published_recovers_an_image_where_it_stays_in_the_basin():
    v = victim(net=catalogue.build("lenet", toys.SHAPE, toys.CLASSES))
    found = [attack("dlg-classic", v.capture(), seed=seed, iterations=30, tolerance=1e-9) for seed in range(6)]
    assert max(v.psnr(f.x) for f in found) >= 40


def test_statistics_of_batchnorm_on_the_wire_are_used_and_are_met_by_the_client_alone():
    v = victim(net=toys.normed(), batch=3)
    apart, note = batchnorm(v.capture(), torch.Generator().manual_seed(0))
    assert apart is not None
    assert note == "statistics of the batch"
    assert float(apart(v.x.double())) < 1e-5
    assert float(apart(v.x.double().flip(-1))) > 1e-3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no running statistics"),
        ({"key": "fedbn", "net": toys.normed()}, "to itself"),
        ({"net": toys.normed(), "buffers": "local"}, "to itself"),
        ({"net": toys.normed(), "steps": 2}, "running statistics"),
    ],
)
def test_statistics_that_are_not_known_are_left_out_and_the_row_says_so(options: dict[str, Any], said: str):
    cap = victim(**options).capture()
    assert said in batchnorm(cap, torch.Generator().manual_seed(0))[1]
    assert said in attack("grad-inversion", cap, iterations=1).note


def test_dlg_has_no_switch_that_makes_it_another_attack():
    with pytest.raises(ConfigError, match="no setting 'classic'"):
        attack("dlg", victim().capture(), classic=True)


def test_more_restarts_never_give_a_worse_objective():
    cap = victim().capture()
    few, many = (attack("inverting-gradients", cap, iterations=5, restarts=n).objective for n in (1, 4))
    assert many <= few
