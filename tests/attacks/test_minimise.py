"""Minimisers: the best iterate is kept, and endings are called what they are."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.attacks.minimise import FAR, Best, Free, Plan, _bend, descend, with_rescue

WIDE = (torch.tensor(-1e9, dtype=torch.float64), torch.tensor(1e9, dtype=torch.float64))
GOAL = torch.linspace(-1, 1, 4, dtype=torch.float64)


def adam(iterations: int, tolerance: float = 0, **more: Any) -> Plan:
    return Plan("adam", iterations, more.pop("lr", 0.1), tolerance, **more)


def lbfgs(iterations: int, tolerance: float = 0, **more: Any) -> Plan:
    return Plan("lbfgs", iterations, more.pop("lr", 1.0), tolerance, **more)


def start(*values: float) -> Free:
    return {"x": torch.tensor(values or [0.0] * 4, dtype=torch.float64)}


def bowl(free: Free) -> tuple[Tensor, Tensor]:
    value = (free["x"] - GOAL).square().sum()
    return value, value.detach()


@pytest.mark.parametrize("plan", [adam(3), adam(40), lbfgs(1), lbfgs(3), lbfgs(2, line_search=False)], ids=str)
def test_the_objective_is_that_of_the_iterate_beside_it(plan: Plan):
    best = descend(bowl, start(), [plan], WIDE)
    assert best.objective == float(bowl(best.free)[0])


def test_the_best_iterate_is_kept_and_not_the_last():
    """A step that is far too long jumps to and fro over the goal, ever further from it."""
    seen: list[float] = []

    def loss(free: Free) -> tuple[Tensor, Tensor]:
        value = (free["x"] - 0.1).square().sum()
        seen.append(float(value.detach()))
        return value, value.detach()

    best = descend(loss, start(0.0), [adam(6, lr=5.0)], WIDE)
    assert best.objective == min(seen) < seen[-1]


def test_iterates_are_chosen_by_matching_alone_and_not_by_the_prior():
    def loss(free: Free) -> tuple[Tensor, Tensor]:
        match = (free["x"] - 1).square().sum()
        return match + 100 * free["x"].square().sum(), match.detach()

    best = descend(loss, start(0.9), [adam(30)], WIDE)
    assert best.free["x"].item() == 0.9


def test_a_descent_stops_once_it_has_converged():
    best = descend(bowl, start(), [adam(5000, tolerance=1e-3)], WIDE)
    assert best.status == "converged"
    assert best.objective < 1e-3
    assert best.calls < 200


def test_later_plans_are_not_needed_after_convergence():
    best = descend(bowl, start(), [lbfgs(5, tolerance=1e-6), adam(1000, tolerance=1e-6)], WIDE)
    assert best.status == "converged"
    assert best.calls < 100


def test_a_second_plan_goes_on_from_the_best_point():
    alone = descend(bowl, start(), [adam(10)], WIDE)
    both = descend(bowl, start(), [adam(10), adam(10)], WIDE)
    assert both.calls == 20
    assert both.objective < alone.objective


def test_a_budget_that_runs_out_is_called_so():
    best = descend(bowl, start(), [adam(3, tolerance=1e-9)], WIDE)
    assert best.status == "budget"
    assert best.calls == 3


def test_a_blow_up_is_called_divergence_and_the_best_point_before_it_is_kept():
    def cliff(free: Free) -> tuple[Tensor, Tensor]:
        """A slope that throws the search off, onto a plain high above."""
        value = torch.where(free["x"] > 0.5, 1e3, -free["x"] + 2).sum()
        return value, value.detach()

    best = descend(cliff, start(0.0), [lbfgs(5, lr=10.0, line_search=False)], WIDE)
    assert best.status == "diverged"
    assert best.objective == 2
    assert float(best.free["x"]) == 0


def test_pixels_that_run_away_are_called_divergence():
    def slope(free: Free) -> tuple[Tensor, Tensor]:
        value = torch.exp(-free["x"] / 1e3).sum()
        return value, value.detach()

    best = descend(slope, start(0.0), [lbfgs(50, lr=1e5, line_search=False)], WIDE)
    assert best.status == "diverged"
    assert float(best.free["x"]) > FAR


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (adam(50), "nonfinite"),
        (lbfgs(5, line_search=False), "nonfinite"),
        (lbfgs(20), "diverged"),  # a line search goes ever further where there is nothing to see
        (lbfgs(1), "diverged"),
    ],
    ids=str,
)
def test_a_search_that_falls_off_the_edge_has_failed_and_its_best_point_is_kept(plan: Plan, expected: str):
    def loss(free: Free) -> tuple[Tensor, Tensor]:
        value = (10 + torch.sqrt(1 - free["x"]) - 3 * free["x"]).sum()
        return value, value.detach()

    best = descend(loss, start(0.7), [plan], WIDE)
    assert best.status == expected
    assert math.isfinite(best.objective)
    assert torch.isfinite(best.free["x"]).all()


@pytest.mark.parametrize("plan", [adam(5), lbfgs(5)], ids=str)
def test_a_start_that_is_not_finite_gives_itself_back(plan: Plan):
    def loss(free: Free) -> tuple[Tensor, Tensor]:
        value = free["x"].sum() * math.nan
        return value, value.detach()

    best = descend(loss, start(0.5), [plan], WIDE)
    assert best.status == "nonfinite"
    assert best.objective == math.inf
    assert best.free["x"].item() == 0.5


def test_convergence_counts_even_where_the_search_breaks_right_after_it():
    def loss(free: Free) -> tuple[Tensor, Tensor]:
        value = (free["x"] - 1).square().sum() * torch.where(free["x"] > 1.05, math.nan, 1.0).sum()
        return value, value.detach()

    best = descend(loss, start(0.0), [lbfgs(3, tolerance=1e-3)], WIDE)
    assert best.status in ("converged", "nonfinite")
    assert (best.status == "converged") == (best.objective < 1e-3)


def test_a_stuck_lbfgs_gives_up():
    def flat(free: Free) -> tuple[Tensor, Tensor]:
        value = free["x"].sum() * 0 + 1
        return value, value.detach()

    assert descend(flat, start(), [lbfgs(1000)], WIDE).calls < 20


@pytest.mark.parametrize("outside", [-3.0, 3.0])
def test_adam_never_leaves_the_box_even_if_it_starts_outside(outside: float):
    box = (torch.tensor(-0.5, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
    seen: list[float] = []

    def loss(free: Free) -> tuple[Tensor, Tensor]:
        seen.append(float(free["x"].detach().abs().max()))
        return bowl(free)

    best = descend(loss, start(*[outside] * 4), [adam(20)], box)
    assert max(seen) <= 0.5
    assert float(best.free["x"].abs().max()) <= 0.5


def test_the_learning_rate_is_cut_by_ten_at_each_stage():
    steps: list[float] = []

    def loss(free: Free) -> tuple[Tensor, Tensor]:
        steps.append(float(free["x"].detach()))
        value = 10 - free["x"].sum()
        return value, value.detach()

    descend(loss, start(0.0), [adam(8, signed=True, decay_at=(3 / 8, 5 / 8, 7 / 8))], WIDE)
    moves = [b - a for a, b in pairwise(steps)]
    assert moves == pytest.approx([0.1] * 3 + [0.01] * 2 + [0.001] * 2, rel=1e-4)


def test_a_cosine_falls_from_the_full_step_to_none_after_a_warm_up():
    plan = adam(100, cosine=True)
    assert [plan.rate(step) for step in (0, 50, 100)] == pytest.approx([1, 0.5, 0])
    warm = adam(100, cosine=True, warm_up=3)
    assert [warm.rate(s) / plan.rate(s) for s in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])


def test_a_soft_sign_is_a_sign_for_steep_slopes_at_first_and_the_slope_itself_at_last():
    """Adam forgets a constant scale, so two pixels tell: one step, slopes 1e3 and 1e-3, of which tanh leaves 1 and 1e-3."""
    x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    for step, steep in ((0, 1.0), (99, 100.0)):
        x.grad = torch.tensor([1e3, 1e-3], dtype=torch.float64)
        _bend(x, adam(100, soft_sign=True), step, None)
        assert x.grad is not None
        assert x.grad.tolist() == pytest.approx([steep, 1e-3], rel=1e-4)


def test_noise_is_drawn_from_the_generator_and_shrinks_with_the_step():
    x = torch.zeros(1000, dtype=torch.float64, requires_grad=True)
    for step, size in ((0, 0.2 * 0.1), (50, 0.2 * 0.05)):
        x.grad = torch.zeros(1000, dtype=torch.float64)
        _bend(x, adam(100, cosine=True, langevin=0.2), step, torch.Generator().manual_seed(0))
        assert x.grad is not None
        assert float(x.grad.std()) == pytest.approx(size, rel=0.1)


def test_an_attempt_far_behind_a_better_one_is_given_up_at_a_quarter_and_says_so():
    def slow(free: Free) -> tuple[Tensor, Tensor]:
        value = 10 + 1e-9 * free["x"].square().sum()
        return value, value.detach()

    for ahead, calls in ((1.0, 25), (5.0, 100)):
        best = descend(slow, start(), [adam(100)], WIDE, rival=[ahead] * 50)
        assert (best.given_up, best.status, best.calls) == (calls < 100, "budget", calls)


def test_signed_steps_forget_how_steep_a_pixel_is():
    def loss(free: Free) -> tuple[Tensor, Tensor]:
        value = 10 + (free["x"] * torch.tensor([1.0, 1e-6], dtype=torch.float64)).sum()
        return value, value.detach()

    moved = descend(loss, start(0.0, 0.0), [adam(3, signed=True)], WIDE).free["x"]
    assert moved[0] == moved[1] < 0


def test_private_items_have_a_step_of_their_own():
    def loss(free: Free) -> tuple[Tensor, Tensor]:
        value = 10 + free["x"].sum() + free["state.w"].sum()
        return value, value.detach()

    free = {"x": torch.zeros(1, dtype=torch.float64), "state.w": torch.zeros(1, dtype=torch.float64)}
    moved = descend(loss, free, [adam(2, state_lr=0.001)], WIDE).free
    assert moved["x"].item() == pytest.approx(-0.1, rel=1e-4)
    assert moved["state.w"].item() == pytest.approx(-0.001, rel=1e-4)


def test_the_start_is_left_alone():
    free = start()
    descend(bowl, free, [adam(3), lbfgs(2)], WIDE)
    assert torch.equal(free["x"], start()["x"])
    assert not free["x"].requires_grad


def test_the_trace_never_rises_and_ends_at_the_best():
    best = descend(bowl, start(), [adam(200)], WIDE)
    assert len(best.trace) <= 60
    assert best.trace == sorted(best.trace, reverse=True)
    assert best.objective <= best.trace[-1]


def test_a_rescue_is_adam_between_two_descents():
    assert [p.optimiser for p in with_rescue(lbfgs(5), 7)] == ["lbfgs", "adam", "lbfgs"]
    assert with_rescue(lbfgs(5), 0) == [lbfgs(5)]


def test_every_evaluation_is_counted():
    best = Best()
    for value in (3.0, 2.0, math.nan, 5.0):
        best.see(value, {"x": torch.tensor([value])})
    assert (best.calls, best.objective, best.first) == (4, 2.0, 3.0)
    assert best.free["x"].item() == 2.0


def test_lbfgs_keeps_its_curvature_near_a_solution():
    """A narrow valley: without the scale, torch leaves curvature out once steps times slopes are below 1e-10."""
    widths = torch.logspace(0, -5, 40, dtype=torch.float64)

    def valley(free: Free) -> tuple[Tensor, Tensor]:
        away = free["x"] - 1
        value = (widths * (away.square() + away**4)).sum() / 100
        return value, value.detach()

    scaled, plain = (descend(valley, start(*[0.0] * 40), [lbfgs(8, scale=s)], WIDE).objective for s in (1e6, 1.0))
    assert scaled < plain / 10
