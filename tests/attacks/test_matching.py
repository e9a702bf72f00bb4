"""Among restarts the objective decides, and failures are counted."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pflsec.attacks import matching, objectives
from pflsec.attacks.minimise import Best
from pflsec.core.attack import Reconstruction, Status
from tests import toys
from tests.attacks.victims import attack, victim

Ending = tuple[float, Status]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs an attack whose restarts end as told; the image says which restart it is from."""

    def run(endings: Sequence[Ending], **settings: Any) -> Reconstruction:
        script = enumerate(endings)

        def descend(loss: Any, start: Any, *rest: Any) -> Best:
            number, (objective, status) = next(script)
            x = torch.full((1, 1, *toys.SHAPE), float(number), dtype=torch.float64)
            return Best(objective=objective, free={**start, "x": x}, calls=10, trace=[objective], status=status)

        monkeypatch.setattr(matching, "descend", descend)
        return attack("idlg", victim().capture(), restarts=len(endings), **settings)

    return run


def which(found: Reconstruction) -> int:
    assert found.x is not None
    return int(found.x.flatten()[0])


@pytest.mark.parametrize("best", [0, 1, 2])
def test_the_lowest_objective_wins(scripted: Any, best: int):
    endings: list[Ending] = [(0.5, "budget")] * 3
    endings[best] = (0.1, "budget")
    found = scripted(endings)
    assert (which(found), found.objective, found.restarts) == (best, 0.1, 3)


def test_the_objective_decides_even_against_the_way_a_restart_ended(scripted: Any):
    found = scripted([(0.3, "budget"), (0.2, "diverged"), (0.4, "budget")])
    assert (which(found), found.status) == (1, "diverged")


def test_restarts_that_failed_are_counted_and_not_forgotten(scripted: Any):
    found = scripted([(math.inf, "nonfinite"), (0.7, "diverged"), (0.2, "budget"), (9.0, "diverged")])
    assert which(found) == 2
    assert found.failures == {"nonfinite": 1, "diverged": 2}
    assert found.restarts == 4


def test_an_attack_all_of_whose_restarts_failed_has_failed(scripted: Any):
    found = scripted([(math.inf, "nonfinite"), (math.inf, "nonfinite")])
    assert found.status == "nonfinite"
    assert found.x is not None
    assert torch.isfinite(found.x).all()


def test_no_restart_follows_after_convergence(scripted: Any):
    found = scripted([(0.3, "budget"), (1e-9, "converged"), (0.0, "budget")])
    assert (which(found), found.status, found.restarts) == (1, "converged", 2)


def test_every_restart_begins_somewhere_else(monkeypatch: pytest.MonkeyPatch):
    starts: list[torch.Tensor] = []

    def descend(loss: Any, start: Any, *rest: Any) -> Best:
        starts.append(start["x"])
        return Best(objective=1.0, free=start)

    monkeypatch.setattr(matching, "descend", descend)
    names = ("dlg", "idlg", "inverting-gradients", "dlg-classic", "modern", "grad-inversion")
    for name in names:
        attack(name, victim().capture(), restarts=3)
    assert len({tuple(x.flatten().tolist()) for x in starts}) == 3 * len(names)
    assert all(not torch.equal(*x) for x in starts if len(x) == 2)


@pytest.mark.parametrize(
    ("name", "one", "several"),
    [("inverting-gradients", 1, 4), ("modern", 1, 4), ("dlg", 8, 8), ("idlg", 8, 8), ("dlg-classic", 1, 1)],
)
def test_a_batch_is_worth_more_attempts_than_an_image(name: str, one: int, several: int):
    for batch, expected in ((1, one), (2, several)):
        rescue = {"rescue": 0} if name in ("dlg", "idlg") else {}
        assert attack(name, victim(batch=batch).capture(), iterations=1, tolerance=0, **rescue).restarts == expected


def test_of_a_group_the_member_that_matches_best_is_returned_with_its_objective():
    v = victim()
    cap = v.capture()
    found = attack("grad-inversion", cap, iterations=3, group=3, precision="float64")
    assert found.x is not None
    assert found.y is not None
    assert found.x.shape == v.x.shape
    again = objectives.relative_squared(cap.target)(cap.replay(found.x, found.y, {}))
    assert found.objective == pytest.approx(float(again.detach()), rel=1e-9)


def test_a_group_is_pulled_to_its_mean_and_the_pull_is_no_part_of_the_match():
    """Two images of 16 pixels, 0 and 2: each lies 1 from their mean, 32 squares in all."""

    class Same:
        def replay(self, free: Any) -> Any:
            return {"x": free["x"]}

    problem: Any = Same()
    pair = torch.stack([torch.zeros(1, *toys.SHAPE), torch.full((1, *toys.SHAPE), 2.0)]).double()
    loss = matching._loss(problem, lambda sent: sent["x"].square().sum() + 1, None, pull=0.5)
    total, match = loss({"x": pair})
    assert float(total) == 1 + (16 * 4 + 1) + 0.5 * 32
    assert float(match) == 1
    alone, _ = loss({"x": pair[:1]})
    assert float(alone) == 1


def test_the_trace_and_the_calls_are_those_of_the_winner(scripted: Any):
    found = scripted([(0.5, "budget"), (0.25, "budget")])
    assert (found.trace, found.iterations) == ([0.25], 10)


def test_the_truth_makes_no_difference_unless_it_is_asked_for():
    v = victim()
    bare, granted = v.capture(), v.capture(labels=True, state=True)
    first, second = (attack("inverting-gradients", cap, iterations=5) for cap in (bare, granted))
    assert first.x is not None
    assert second.x is not None
    assert torch.equal(first.x, second.x)
