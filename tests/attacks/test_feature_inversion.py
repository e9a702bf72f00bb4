"""Images from prototypes and predictions: found where the extractor is known, refused with the reason where it is not."""

import math
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pflsec.core.errors import NotApplicable
from pflsec.models.network import Network
from tests import toys
from tests.attacks.test_controls import blind
from tests.attacks.victims import Victim, attack, victim

SMALL = {"iterations": 400, "restarts": 1, "lr": 0.1, "tolerance": 1e-5}
ORACLE: dict[str, Any] = {"labels": "known", "hidden": "oracle"}


def wide_module() -> nn.Module:
    """Return 16 -> 128 -> 3 with tanh: many more features than an image has pixels."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(), fc1=nn.Linear(16, 128), act=nn.Tanh(), fc=nn.Linear(128, toys.CLASSES)
    )
    return nn.Sequential(layers)


def of(key: str, **options: Any) -> Victim:
    return victim(key, net=Network(wide_module, toys.SHAPE, toys.CLASSES), **options)


def shared_start(key: str) -> Victim:
    """Return a client whose private items are still the public draw, as the recorder says it in the first round."""
    v = of(key, settings={"private_start": "shared"})
    return replace(v, record=replace(v.record, personal_equals_public=True, memory=v.state))


def test_a_shared_extractor_gives_the_images_of_one_each_away():
    for batch in (1, 2):
        v = of("fedpac", batch=batch)
        found = attack("feature-inversion", v.capture(), **SMALL)
        assert (found.labels, found.hidden) == ("wire", "none")
        assert found.y is not None
        assert found.y.tolist() == sorted(v.y.tolist())
        assert v.psnr(found.x) >= 40


def test_only_prototypes_and_logits_are_matched():
    cap = of("fedpac").capture()
    seen = cap.only("prototypes", "logits")
    assert seen.target.keys() == {"prototype"}
    assert seen.replay(torch.zeros(1, *toys.SHAPE), torch.tensor([0]), {}).keys() == {"prototype"}
    assert cap.target.keys() > seen.target.keys()
    assert cap.only("generator").target == {}


@pytest.mark.parametrize("key", ["fedproto", "fedgh"])
def test_a_private_extractor_is_refused_and_the_oracle_who_has_it_finds_the_image(key: str):
    v = of(key, after=2, first=1)
    wire = attack("feature-inversion", v.capture(), **SMALL)
    assert wire.x is None
    assert wire.y is not None
    assert wire.y.tolist() == v.y.tolist()
    assert "private items that the adversary does not have (body" in wire.note
    assert "--knowledge oracle" in wire.note
    assert math.isnan(wire.objective)
    oracle = attack("feature-inversion", v.capture(labels=True, state=True), **SMALL, **ORACLE)
    assert oracle.hidden == "oracle"
    assert v.psnr(oracle.x) >= 40


@pytest.mark.parametrize("hidden", ["auto", "guess", "joint", "log", "cotangent"])
@pytest.mark.parametrize("key", ["fedproto", "fd"])
def test_no_treatment_of_a_private_extractor_makes_up_an_image(key: str, hidden: str):
    found = attack("feature-inversion", of(key, after=1).capture(), hidden=hidden, **SMALL)
    assert found.x is None
    assert found.note.startswith("labels only: ")
    assert "\n" not in found.note


@pytest.mark.parametrize("key", ["fedproto", "fedpcl"])
def test_the_first_exchange_of_a_client_that_starts_in_public_hides_no_extractor(key: str):
    v = shared_start(key)
    found = attack("feature-inversion", v.capture(), **SMALL)
    assert found.hidden == "log"
    assert v.psnr(found.x) >= 30


def test_later_the_extractor_of_fedpcl_is_private_again():
    assert attack("feature-inversion", of("fedpcl", after=2).capture(), **SMALL).x is None


def test_private_items_are_never_freed_since_they_would_explain_any_picture():
    v = of("fedproto", after=2)
    found = attack("feature-inversion", v.capture(labels=True, state=True), iterations=2, restarts=3, **ORACLE)
    assert found.restarts == 3


@pytest.mark.parametrize("other", ["another client's", "permuted"])
def test_a_prototype_that_is_not_the_victims_gives_no_more_than_a_blind_guess(other: str):
    v = of("fedpac")
    sent = of("fedpac", client=1, first=1).record.up["prototype"] if other != "permuted" else v.record.up["prototype"]
    rng = torch.Generator().manual_seed(0)
    if other == "permuted":
        sent = sent[:, torch.randperm(sent.shape[1], generator=rng)]
    shown = v.with_upload(v.record.up | {"prototype": sent})
    assert v.psnr(attack("feature-inversion", shown.capture(), **SMALL).x) <= blind(v) + 1


def test_counts_on_the_wire_give_the_labels_with_their_numbers():
    v = of("fedpac", batch=4)
    found = attack("feature-inversion", v.capture(), iterations=1)
    assert found.y is not None
    assert found.y.tolist() == sorted(v.y.tolist())


@pytest.mark.parametrize("key", ["fedavg", "fedrep", "lgfedavg"])
def test_without_prototypes_and_logits_there_is_nothing_to_invert(key: str):
    with pytest.raises(NotApplicable, match="neither prototypes nor logits") as refusal:
        attack("feature-inversion", victim(key).capture())
    assert "\n" not in str(refusal.value)


def test_too_many_steps_leave_the_labels():
    found = attack("feature-inversion", of("fedproto", steps=60).capture())
    assert found.x is None
    assert "unrolling stops" in found.note
    assert found.y is not None
