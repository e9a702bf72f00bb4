"""Isolated training. The checks take the method's class, so that planted bugs can be put to them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pflsec.algorithms.other.local import Isolated
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.config.attack import AttackConfig, make_attack
from pflsec.core import registry
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import NotApplicable
from pflsec.core.items import select
from pflsec.core.knowledge import POWERS
from pflsec.runtime.replay import capture
from tests import toys
from tests.contracts.cases import Case, exchange
from tests.contracts.test_every_method import _with, probe


def check_each_client_trains_on_from_where_it_was(kind: type[Algorithm]) -> None:
    """Rounds of one client are one long loop of SGD on its own rows."""
    made = toys.setup(kind)
    models = {c: made.client_fresh(c) for c in range(4)}
    for turn in toys.rounds(made):
        for client, model in models.items():
            theta = model
            for x, y in toys.context(made, turn.t, client).batches():
                theta = toys.hand_step(theta, toys.hand_gradient(theta, x, y), lr=0.1)
            models[client] = theta
            assert toys.distance(turn.next_states[client], theta) < 1e-14


def check_a_client_does_not_know_the_others(kind: type[Algorithm]) -> None:
    """Everybody else's labels change: client 0 has the same model, bit for bit."""
    data = toys.dataset()
    assert data.client_ids is not None
    other = replace(data, labels=np.where(data.client_ids == 0, data.labels, (data.labels + 1) % toys.CLASSES))
    turn, changed = (toys.play(kind, data=d)[-1] for d in (data, other))
    assert toys.same(turn.next_states[0], changed.next_states[0])
    assert not any(toys.same(turn.next_states[c], changed.next_states[c]) for c in (1, 2, 3))


def check_nothing_is_on_the_wire(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind):
        assert all(message == {} for message in (*turn.downs.values(), *turn.ups.values()))
        assert turn.metrics["bytes_up"] == turn.metrics["bytes_down"] == 0


def test_each_client_trains_on_from_where_it_was():
    check_each_client_trains_on_from_where_it_was(Isolated)


def test_a_client_does_not_know_the_others():
    check_a_client_does_not_know_the_others(Isolated)


def test_nothing_is_on_the_wire():
    check_nothing_is_on_the_wire(Isolated)


def test_one_client_is_fedavg_with_one_client():
    """The weights of FedAvg's mean are then 1."""
    data, shared = toys.dataset([7]), {"private_start": "shared"}
    ours, reference = toys.play(Isolated, data=data, settings=shared), toys.play(FedAvg, data=data)
    for turn, other in zip(ours, reference, strict=True):
        assert toys.same(turn.next_states[0], other.next_server)


def test_models_start_apart_unless_they_are_told_to_share():
    apart, shared = (
        toys.play(Isolated, 1, settings={"private_start": start})[0].states for start in ("apart", "shared")
    )
    assert not toys.same(apart[0], apart[1])
    assert toys.same(shared[0], shared[1])


def test_each_client_is_tested_with_its_own_model():
    made = toys.setup(Isolated, lr=0.5)
    turn = toys.rounds(made)[-1]
    for row in turn.rows:
        x, y = made.federation.test(row["client"])
        model = turn.next_states[row["client"]]
        right = (toys.tiny().logits(model, x).argmax(1) == y).double().mean()
        assert row["accuracy_post_agg"] == row["accuracy_post_local"] == pytest.approx(float(right))
    assert turn.metrics["global_accuracy"] is None


@pytest.mark.parametrize("attack", registry.names("attacks"))
@pytest.mark.parametrize("granted", [{}, {"oracle": True}])
def test_no_attack_has_anything_to_work_on(attack: str, granted: dict[str, Any]):
    """Also where labels and private model are granted: the wire says nothing about the images."""
    ex = exchange(Case("local"))
    record, _, y, up = probe(ex, 2, 1)
    truth = {"labels": y, "state": ex.state} if granted else {}
    cap = capture(ex.setup.algorithm, ex.setup.net, _with(record, up=up), history=True, seed=0, **truth)
    active = registry.load("attacks", attack).needs & POWERS
    who = "malicious-server" if active else "server"
    made = make_attack(attack, AttackConfig(adversary=who, knowledge="oracle" if granted else "wire+candidates"))
    nothing = "nothing that the client sends depends on its data|(is|are) (not )?sent|there are no candidates"
    for step in (made.craft, made.reconstruct) if active else (made.reconstruct,):
        with pytest.raises(NotApplicable, match=nothing):
            step(cap, torch.Generator().manual_seed(0))


def test_a_method_that_sends_nothing_has_no_shared_part():
    assert select(toys.tiny().fresh(0), *Isolated.shared) == {}
