"""What a client keeps to itself: guessed, sought together with the data, computed from the log, or given."""

from typing import Any

import pytest
import torch

from pflsec.attacks import matching
from pflsec.attacks.minimise import Best, Free
from pflsec.attacks.problem import Problem
from pflsec.core.errors import NotApplicable
from pflsec.core.items import floating
from pflsec.runtime.replay import local_work
from pflsec.training.local import Training
from tests import toys
from tests.attacks.test_controls import blind, shuffled
from tests.attacks.victims import Victim, attack, victim


@pytest.fixture(scope="module")
def hidden_head() -> Victim:
    """A client whose head is nothing like a newcomer's."""
    return victim("fedrep", after=2, local_epochs=4)


@pytest.fixture(scope="module")
def objectives(hidden_head: Victim) -> dict[str, float]:
    """How far Inverting Gradients gets, by how the head is treated."""
    found = {}
    for hidden in ("guess", "joint", "oracle"):
        cap = hidden_head.capture(labels=True, state=hidden == "oracle")
        result = attack("inverting-gradients", cap, iterations=150, labels="known", hidden=hidden)
        assert result.hidden == hidden
        found[hidden] = result.objective
    return found


def test_a_head_that_is_sought_explains_more_than_one_that_is_guessed(objectives: dict[str, float]):
    assert objectives["joint"] < 0.5 * objectives["guess"]


def test_with_the_head_given_the_attack_gets_as_far_as_without(objectives: dict[str, float]):
    assert objectives["oracle"] <= objectives["joint"] + 1e-4


def test_the_oracle_tries_the_head_both_fixed_and_freed(hidden_head: Victim, monkeypatch: pytest.MonkeyPatch):
    starts: list[Free] = []

    def descend(loss: Any, start: Free, *rest: Any) -> Best:
        starts.append(start)
        return Best(objective=1.0, free=start)

    monkeypatch.setattr(matching, "descend", descend)
    cap = hidden_head.capture(labels=True, state=True)
    found = attack("inverting-gradients", cap, hidden="oracle", labels="known", restarts=2)
    head = {"state.head.weight", "state.head.bias"}
    assert [set(start) - {"x"} for start in starts] == [set(), head, set(), head]
    assert toys.distance({k: starts[1][f"state.{k}"] for k in hidden_head.state}, hidden_head.state) == 0
    assert (found.hidden, found.restarts) == ("oracle", 4)


def test_the_true_head_and_image_send_exactly_what_was_sent(hidden_head: Victim):
    cap = hidden_head.capture()
    again = cap.replay(hidden_head.x.double(), hidden_head.y, hidden_head.state)
    assert toys.distance(again, cap.target) < 1e-5


def test_the_log_does_not_reveal_a_head_and_the_attack_says_so(hidden_head: Victim):
    with pytest.raises(NotApplicable, match="log does not reveal"):
        attack("inverting-gradients", hidden_head.capture(), hidden="log")


def test_private_items_that_are_not_granted_are_not_used(hidden_head: Victim):
    with pytest.raises(NotApplicable, match="not granted"):
        attack("inverting-gradients", hidden_head.capture(), hidden="oracle")
    with pytest.raises(NotApplicable, match="not granted"):
        attack("inverting-gradients", hidden_head.capture(), labels="known")


def test_where_the_log_is_silent_private_items_are_sought_by_default(hidden_head: Victim):
    assert attack("inverting-gradients", hidden_head.capture(), iterations=1).hidden == "joint"


@pytest.mark.parametrize("key", ["scaffold", "fedamp"])
def test_the_log_gives_the_private_state_bit_for_bit(key: str):
    v = victim(key, after=2)
    known = v.capture().known
    assert known is not None
    assert toys.same(known, v.state)
    assert any(bool(item.any()) for item in floating(known).values())


@pytest.mark.parametrize("key", ["scaffold", "fedamp"])
def test_with_the_state_from_the_log_the_attack_finds_the_image(key: str):
    v = victim(key, after=2, first=1)
    found = attack("dlg", v.capture(), hidden="log", iterations=20, restarts=3, rescue=0)
    assert found.hidden == "log"
    assert found.objective < 1e-5
    assert v.psnr(found.x) >= 40


@pytest.mark.parametrize("key", ["scaffold", "fedamp"])
def test_an_observer_without_the_log_does_not_know_the_state(key: str):
    v = victim(key, after=2)
    assert v.capture(history=False).known is None


@pytest.mark.parametrize("hidden", ["auto", "guess", "joint", "log", "oracle"])
def test_a_method_without_private_items_has_nothing_hidden(hidden: str):
    cap = victim().capture()
    problem = Problem(cap, "restore", hidden, torch.Generator().manual_seed(0), torch.float64)  # pyright: ignore[reportArgumentType]
    assert (problem.hidden, problem.state) == ("none", {})


def test_a_guess_stays_where_it_was_drawn_and_a_joint_search_moves_it(hidden_head: Victim):
    cap = hidden_head.capture(labels=True)
    for hidden, moves in (("guess", False), ("joint", True)):
        rng = torch.Generator().manual_seed(0)
        problem = Problem(cap, "known", hidden, rng, torch.float64)  # pyright: ignore[reportArgumentType]
        free = problem.start(lambda cap, rng, dtype: torch.zeros(cap.count, *toys.SHAPE, dtype=dtype))
        assert {name for name in free if name.startswith("state.")} == (
            {"state.head.weight", "state.head.bias"} if moves else set()
        )
        assert toys.distance(problem.state, hidden_head.state) > 1e-3


# --- the unknown gradient at the features, in place of a hidden head

COTANGENT: dict[str, Any] = {"hidden": "cotangent", "iterations": 150, "restarts": 4}


@pytest.fixture(scope="module")
def far_head() -> Victim:
    """A client for whose head a newcomer's is no substitute."""
    return victim("fedrep", after=2, local_epochs=4, first=4)


def test_a_cotangent_finds_the_image_where_a_wrong_head_does_not(far_head: Victim):
    wrong = attack("inverting-gradients", far_head.capture(labels=True), labels="known", hidden="guess", iterations=150)
    found = attack("inverting-gradients", far_head.capture(), **COTANGENT)
    assert far_head.psnr(wrong.x) <= 10
    assert far_head.psnr(found.x) >= 25
    assert (found.hidden, found.labels, found.y) == ("cotangent", "none", None)


@pytest.mark.parametrize("name", ["dlg", "idlg"])
def test_every_matching_attack_can_seek_a_cotangent(name: str):
    v = victim("fedrep", after=2, local_epochs=4, first=1)
    found = attack(name, v.capture(), hidden="cotangent", iterations=20, restarts=3, rescue=0)
    assert v.psnr(found.x) >= 40


def test_the_true_cotangent_explains_the_body_exactly(far_head: Victim):
    """u_i = dL_i/dz_i at the head as the client had fitted it before its body moved."""
    cap, x = far_head.capture(), far_head.x.double()
    net, body = far_head.setup.net, {k: v.double() for k, v in far_head.record.down.items()}
    ctx = local_work(net, far_head.record, x, far_head.y, 0, driver=Training)
    head = far_head.setup.algorithm.local(ctx, {k: v.double() for k, v in far_head.state.items()}, body).state
    z = net.features(body, x).detach().requires_grad_()
    (u,) = torch.autograd.grad(ctx.head_ce(head, z, far_head.y).mean(), z)
    assert toys.distance(cap.pullback(x, u), cap.target) < 1e-5


@pytest.mark.parametrize("other", ["another image's message", "shuffled"])
def test_a_cotangent_does_not_find_what_the_message_does_not_tell(far_head: Victim, other: str):
    shown = victim("fedrep", after=2, local_epochs=4, first=3) if other != "shuffled" else shuffled(far_head)
    assert far_head.psnr(attack("inverting-gradients", shown.capture(), **COTANGENT).x) <= blind(far_head) + 1


def test_what_is_granted_makes_no_difference_to_a_cotangent(far_head: Victim):
    captures = far_head.capture(), far_head.capture(history=False), far_head.capture(labels=True, state=True)
    found = [attack("inverting-gradients", cap, hidden="cotangent", iterations=5).x for cap in captures]
    assert found[0] is not None
    for other in found[1:]:
        assert other is not None
        assert torch.equal(other, found[0])


@pytest.mark.parametrize(
    ("key", "options", "says"),
    [
        ("fedavg", {}, "the head is on the wire"),
        ("scaffold", {}, "the head is on the wire"),
        ("lgfedavg", {}, "the head is on the wire"),
        ("fedrep", {"steps": 2}, "the sum of 2"),
        ("fedproto", {}, "no gradient of the body is on the wire"),
        ("fedbabu", {"after": 0}, "depends on no hidden head"),
    ],
)
def test_where_no_hidden_head_is_in_the_way_a_cotangent_is_refused(key: str, options: dict[str, Any], says: str):
    with pytest.raises(NotApplicable, match=says) as refusal:
        attack("inverting-gradients", victim(key, **options).capture(), hidden="cotangent")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("key", ["fedper", "fedbabu", "gpfl"])
def test_methods_with_a_hidden_head_can_be_attacked_through_their_features(key: str):
    found = attack("inverting-gradients", victim(key, after=2).capture(), hidden="cotangent", iterations=1)
    assert (found.hidden, found.y) == ("cotangent", None)


def test_nothing_on_the_wire_that_depends_on_the_data_is_not_applicable():
    v = victim()
    silent = v.capture()
    object.__setattr__(silent, "target", {})
    for name in ("dlg", "idlg", "inverting-gradients"):
        with pytest.raises(NotApplicable, match="nothing that the client sends"):
            attack(name, silent)
