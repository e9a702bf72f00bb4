"""What an adversary is given, and the check that a capture can be replayed at all."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pflsec.algorithms.model_splitting.fedrep import FedRep
from pflsec.core.algorithm import Done
from pflsec.core.errors import NotApplicable
from pflsec.core.items import Items, select
from pflsec.core.local import Local, half_squared_distance
from pflsec.runtime.replay import capture, newcomer, relative_distance, residual
from pflsec.wire.capture import Capture
from tests import toys
from tests.attacks.victims import victim
from tests.contracts.cases import Case, Exchange, exchange
from tests.contracts.test_every_method import _with, probe


def given(
    case: Case, *, history: bool, after: int = 2, public: bool = False, **granted: Any
) -> tuple[Exchange, Capture]:
    """Return an exchange, and the capture of a probe in it."""
    ex = exchange(case, after=after)
    record, _, _, up = probe(ex, 2, 1)
    whole = _with(record, up=up, memory=ex.memory, personal_equals_public=public)
    return ex, capture(ex.setup.algorithm, ex.setup.net, whole, history=history, seed=0, **granted)


@pytest.mark.parametrize("history", [True, False])
def test_where_there_is_nothing_private_nothing_is_hidden(history: bool):
    assert given(Case("fedavg"), history=history)[1].known == {}


@pytest.mark.parametrize("key", ["scaffold", "fedamp"])
def test_the_log_gives_the_state_to_those_who_have_it(key: str):
    ex, cap = given(Case(key), history=True)
    assert cap.known is not None
    assert toys.distance(cap.known, ex.state) < 1e-15
    assert given(Case(key), history=False)[1].known is None


@pytest.mark.parametrize("key", ["fedrep", "fedproto"])
def test_what_never_crosses_the_wire_stays_hidden(key: str):
    assert given(Case(key), history=True)[1].known is None


def test_a_shared_start_is_known_before_the_first_exchange():
    case = Case("fedrep", (("private_start", "shared"),))
    ex, cap = given(case, history=False, after=0, public=True)
    assert cap.known is not None
    assert toys.same(cap.known, ex.state)


def test_labels_and_state_are_given_where_granted_and_not_otherwise():
    y, state = torch.tensor([0, 1]), {"head.weight": torch.ones(1)}
    cap = given(Case("fedrep"), history=True, labels=y, state=state)[1]
    assert cap.labels is y
    assert cap.state is state
    cap = given(Case("fedrep"), history=True)[1]
    assert cap.labels is None
    assert cap.state is None


def test_a_wrong_guess_of_the_state_moves_the_replay_and_not_the_target():
    """FedAMP: the target is read from the known start; a replay from another start lands elsewhere."""
    _, cap = given(Case("fedamp"), history=True)
    x, y = toys.batch(2)
    assert cap.known is not None
    right = {k: v.detach() for k, v in cap.replay(x.double(), y, cap.known).items()}
    wrong = cap.replay(x.double(), y, {k: v + 0.1 for k, v in cap.known.items()})
    assert relative_distance(wrong, right) > 1e-2


def test_a_replay_is_differentiable_in_data_labels_and_state():
    ex, cap = given(Case("fedrep"), history=True)
    x, y = toys.batch(2)
    x, y = x.double().requires_grad_(), torch.full((2, 3), 1 / 3, dtype=torch.float64, requires_grad=True)
    state = {k: v.clone().requires_grad_() for k, v in ex.state.items()}
    total = torch.stack([v.square().sum() for v in cap.replay(x, y, state).values()]).sum()
    found = torch.autograd.grad(total, [x, y, *state.values()])
    assert all(g.abs().max() > 0 for g in found)


@pytest.mark.parametrize("key", ["fedavg", "fedrep", "fedproto", "lgfedavg", "scaffold", "fedamp"])
def test_a_capture_says_with_which_network_the_work_that_is_sent_begins_and_ends(key: str):
    """All of the network: what was received, what the client keeps, and for the end what it sent of it."""
    ex, cap = given(Case(key), history=True)
    state = {k: v.detach() for k, v in ex.state.items()}
    began, ended = cap.began(state), cap.ended(state)
    held = select(ex.down, "body", "head") | select(state, "body", "head")
    assert began.keys() == ended.keys() == cap.net.shapes.keys()
    if key != "fedamp":  # which begins at a model of the client's own
        assert toys.distance(began, {k: held[k].double() for k in began}) == 0
    up = {k: v.double() for k, v in cap.record.up.items() if v.is_floating_point()}
    moved = {k.removeprefix("delta."): began[k.removeprefix("delta.")] + v for k, v in up.items() if k.startswith("delta.")}
    expected = began | {k: v for k, v in up.items() if k in began} | moved
    assert toys.distance(ended, expected) == 0
    assert (toys.distance(ended, began) > 0) == (key != "fedproto")


def test_where_no_whole_network_is_trained_there_is_none():
    _, cap = given(Case("fedrep"), history=True)
    with pytest.raises(NotApplicable, match=r"no whole network is trained in what is sent: it has no head\."):
        cap.began({})


# --- the body's gradient through its features


def test_a_pullback_is_what_the_chain_rule_says():
    """z = tanh(W x + b), so d<u, z>/dW = (u (1 - z^2)) x^T and d<u, z>/db = u (1 - z^2), summed over the batch."""
    ex, cap = given(Case("fedrep"), history=True)
    x, u = toys.batch(2)[0].double(), torch.randn(2, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    slope = u * (1 - toys.hand_features({k: v.double() for k, v in ex.down.items()}, x).square())
    expected = {"body.fc1.weight": slope.T @ x.flatten(1), "body.fc1.bias": slope.sum(0)}
    assert cap.net.feature_dim == 5
    assert toys.distance(cap.pullback(x, u), expected) < 1e-14


def test_a_pullback_is_differentiable_in_image_and_cotangent():
    _, cap = given(Case("fedrep"), history=True)
    x, u = torch.ones(2, *toys.SHAPE, dtype=torch.float64), torch.ones(2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, u: tuple(cap.pullback(x, u).values()), (x.requires_grad_(), u.requires_grad_())
    )


def test_without_a_body_at_the_start_there_is_nothing_to_pull_back():
    _, cap = given(Case("fedproto"), history=True)
    assert cap.pullback(torch.zeros(2, *toys.SHAPE), torch.zeros(2, 5)) == {}


class Decaying(FedRep):
    """FedRep whose body is also pulled to zero: no gradient at the features can do that."""

    key = "decaying"

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        head, pull = state, half_squared_distance(0.1, {k: torch.zeros_like(v) for k, v in down.items()})
        return Done(state, up=ctx.fit(down, on=lambda b, x, y: ctx.ce(b | head, x, y), penalty=pull))


def test_a_body_that_is_moved_by_more_than_its_features_is_refused():
    v = victim()
    algorithm: Any = toys.method(Decaying)
    record = replace(v.record, down=select(v.record.down, "body"), up=select(v.record.up, "body"))
    cap = capture(algorithm, algorithm.net, record, history=True, seed=0)
    with pytest.raises(NotApplicable, match="more than what reaches it through its features"):
        cap.pullback(torch.zeros(1, *toys.SHAPE), torch.zeros(1, 5))


def test_a_replay_computes_in_the_dtype_of_its_images():
    _, cap = given(Case("fedavg"), history=True)
    x, y = toys.batch(2)
    assert {v.dtype for v in cap.replay(x, y, {}).values()} == {torch.float32}
    assert {v.dtype for v in cap.replay(x.double(), y, {}).values()} == {torch.float64}


def test_a_newcomer_is_drawn_from_the_attackers_stream():
    algorithm: Any = toys.method("fedrep")
    one, again, other = (newcomer(algorithm, algorithm.net, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert toys.same(one, again)
    assert not toys.same(one, other)


def test_a_relative_distance_is_one_number_over_all_items():
    """|(3, 4) - (0, 0)| / |(3, 4)| = 1; doubled on one side: 5/10."""
    a: Items = {"u": torch.tensor([3.0]), "v": torch.tensor([4.0])}
    zero = {k: torch.zeros_like(v) for k, v in a.items()}
    assert relative_distance(zero, a) == 1
    assert relative_distance(a, {k: 2 * v for k, v in a.items()}) == pytest.approx(0.5)
    assert relative_distance(a, a) == 0


@pytest.mark.parametrize(
    "other", [{"u": torch.ones(2)}, {"w": torch.ones(1)}, {}, {"u": torch.ones(1), "v": torch.ones(1)}]
)
def test_other_names_or_shapes_are_infinitely_far(other: Items):
    assert relative_distance(other, {"u": torch.ones(1)}) == float("inf")


def test_distances_to_nothing_are_zero_or_one():
    zero = {"u": torch.zeros(2)}
    assert relative_distance(zero, zero) == 0
    assert relative_distance({"u": torch.ones(2)}, zero) == 1


@pytest.mark.parametrize("wrong", ["x", "y", "state", "steps"])
def test_the_residual_notices_what_is_not_the_truth(wrong: str):
    ex = exchange(Case("fedrep"))
    record, x, y, up = probe(ex, 4, 3)
    state = ex.state
    x, y = (x + 0.5 if wrong == "x" else x), (y.roll(1) if wrong == "y" else y)
    # A constant added to every class's weights would not show: softmax does not see it.
    state = (
        {k: v + torch.linspace(0, 1, v.numel()).reshape(v.shape) for k, v in state.items()}
        if wrong == "state"
        else state
    )
    record = _with(record, epochs=1) if wrong == "steps" else record
    assert residual(ex.setup.algorithm, ex.setup.net, record, x, y, state, select(up, "body"), 0) > 1e-4
