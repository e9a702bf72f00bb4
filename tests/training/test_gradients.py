"""Local training beyond plain SGD: gradients on sets of rows, projections, loops that stop on the loss, constants."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.core.errors import PrivacyError
from pflsec.core.items import Items, combine
from pflsec.core.local import paced
from pflsec.training.local import Training, Unrolled
from tests import toys

pytestmark = pytest.mark.usefixtures("doubles")
both = pytest.mark.parametrize("driver", [Training, Unrolled])


def ten(driver: Any = Training, **changes: Any) -> Any:
    """Return the context of a client with ten different rows."""
    x, y = toys.batch(10)
    return toys.work(x, y, driver=driver(), **changes)


class Guard:
    """Hands out known rows and counts gradients; it adds nothing."""

    def __init__(self, rows: int, steps_per_epoch: int):
        self.spent: Any = []
        self.count, self.steps = rows, steps_per_epoch

    def rows(self, epochs: int) -> Any:
        return (torch.arange(self.count) for _ in range(epochs * self.steps))

    def gradient(self, on: Any, params: Items, x: Tensor, y: Tensor) -> list[Tensor]:
        self.spent.append((0.0, 1.0, 1))
        return list(torch.autograd.grad(on(params, x, y).mean(), list(params.values())))


# --- sets of rows


@pytest.mark.parametrize(
    ("count", "batch", "sizes"),
    [
        (1, 4, [[4], [4]]),
        (2, 4, [[4, 4]]),
        (2, 2, [[2, 2], [2, 2]]),
        (2, 10, [[5, 5]]),
        (3, 4, [[4, 3, 3]]),
        (3, 99, [[4, 3, 3]]),
    ],
)
def test_an_epoch_has_whole_sets_of_disjoint_batches(count: int, batch: int, sizes: list[list[int]]):
    """floor(10 / (count * batch)) of them; where not even one fits, all rows are split as evenly as can be."""
    sets = list(ten(batch_size=batch).row_sets(count, epochs=3))
    assert [[len(rows) for rows in one] for one in sets] == 3 * sizes
    per_epoch = len(sizes)
    for epoch in range(3):
        rows = torch.cat([r for one in sets[epoch * per_epoch : (epoch + 1) * per_epoch] for r in one])
        assert len(rows.unique()) == len(rows)


def test_epochs_and_phases_have_sets_of_their_own():
    ctx = ten(batch_size=5)
    orders = [torch.cat(one) for phase in ("main", "other") for one in ctx.row_sets(2, 2, phase)]
    assert len({tuple(rows.tolist()) for rows in orders}) == 4
    again, anew = (torch.cat(next(iter(work.row_sets(2)))) for work in (ctx, ten(batch_size=5)))
    assert not torch.equal(again, orders[0])
    assert torch.equal(anew, orders[0])


@pytest.mark.parametrize(("rows", "count"), [(1, 2), (1, 3), (2, 3)])
def test_fewer_rows_than_parts_are_used_again(rows: int, count: int):
    x, y = toys.batch(rows)
    (one,) = toys.work(x, y).row_sets(count)
    assert [len(part) for part in one] == [1] * count
    assert set(torch.cat(one).tolist()) == set(range(rows))


def test_a_guard_chooses_the_rows():
    """As many sets as without it; each batch is a draw of its own."""
    sets = list(ten(batch_size=2, guard=Guard(3, 5)).row_sets(2, epochs=3))
    assert len(sets) == 3 * 2
    assert all(rows.tolist() == [0, 1, 2] for one in sets for rows in one)
    assert len(list(ten(guard=Guard(3, 1)).row_sets(2, epochs=3))) == 3


# --- a gradient of its own


@both
def test_a_gradient_is_the_mean_over_its_rows(driver: Any):
    ctx, start, rows = ten(driver), toys.tiny().fresh(0), torch.tensor([1, 4, 7])
    found = ctx.gradient(start, ctx.ce, rows)
    assert toys.distance(found, toys.hand_gradient(start, ctx.x[rows], ctx.y[rows])) < 1e-15
    assert [v.item() for v in ctx.losses] == [pytest.approx(toys.hand_loss(start, ctx.x[rows], ctx.y[rows]).item())]
    ctx.gradient(start, ctx.ce, rows, phase="other")
    assert len(ctx.losses) == 1


def test_a_gradient_goes_through_the_guard():
    ctx = ten(guard=Guard(3, 5))
    ctx.gradient(toys.tiny().fresh(0), ctx.ce, torch.tensor([0]))
    assert len(ctx.guard.spent) == 1


def test_a_gradient_takes_what_was_computed_before_for_constant():
    """<w, v(w)> at v = 2 w: d/dw is v, not 2 v, although the two share a history; the upload is that history's."""
    w = torch.tensor([3.0], requires_grad=True)
    ctx = ten(Unrolled)
    v = 2 * w
    found = ctx.gradient({"w": w}, lambda p, x, y: (p["w"] * v).expand(len(y)), torch.tensor([0]))["w"]
    assert found.item() == 6
    assert torch.autograd.grad(found, w)[0].item() == 2


# --- constants within a step


@both
def test_a_constant_passes_no_slope_within_a_step(driver: Any):
    """<w, const(2 w)>: the step's gradient is 2 w."""
    ctx, start = ten(driver), {"w": torch.tensor([3.0])}
    found = ctx.fit(start, on=lambda p, x, y: (p["w"] * ctx.constant(2 * p["w"])).expand(len(y)))
    assert found["w"].item() == pytest.approx(3 - 0.1 * 6)


def test_a_constant_is_followed_when_the_result_is_differentiated():
    """w' = w - lr 2 w, so dw'/dw = 1 - 0.2 a step; with the constant cut off it would be 1."""
    w = torch.tensor([3.0], requires_grad=True)
    ctx = ten(Unrolled, epochs=2)
    found = ctx.fit({"w": w}, on=lambda p, x, y: (p["w"] * ctx.constant(2 * p["w"])).expand(len(y)))["w"]
    assert torch.autograd.grad(found, w)[0].item() == pytest.approx(0.8**2)


@both
def test_a_paced_parameter_moves_at_its_own_rate(driver: Any):
    """<w, w>/2 of two numbers, one of them at a third of the pace: each w moves by its own rate times w."""
    ctx, start = ten(driver), {"fast": torch.tensor([3.0]), "slow": torch.tensor([3.0])}

    def loss(p: Items, x: Tensor, y: Tensor) -> Tensor:
        return (p["fast"].square() / 2 + paced(ctx, p["slow"], 1 / 3).square() / 2).expand(len(y))

    found = ctx.fit(start, on=loss)
    assert found["fast"].item() == pytest.approx(3 - 0.1 * 3, abs=1e-15)
    assert found["slow"].item() == pytest.approx(3 - 0.1 * 3 / 3, abs=1e-15)


def test_a_paced_parameter_is_followed_when_the_result_is_differentiated():
    """w' = w - lr r w, so dw'/dw = 1 - 0.1 r a step; at pace 0 nothing moves, to the last bit."""
    w = torch.tensor([3.0], requires_grad=True)
    for ratio in (0.0, 0.5):
        ctx = ten(Unrolled, epochs=2)
        found = ctx.fit({"w": w}, on=lambda p, x, y, c=ctx, r=ratio: (paced(c, p["w"], r).square() / 2).expand(len(y)))[
            "w"
        ]
        assert torch.autograd.grad(found, w)[0].item() == pytest.approx((1 - 0.1 * ratio) ** 2, abs=1e-15)
        assert (found.item() == 3) == (ratio == 0)


# --- a part of the rows


@pytest.mark.parametrize(("share", "size"), [(0.8, 8), (1.0, 10), (0.01, 1), (0.44, 4)])
def test_a_subset_is_a_random_share_of_the_rows(share: float, size: int):
    part = ten().subset(share, "mine")
    assert part.num_samples == size
    rows = [int((ten().x == row).flatten(1).all(1).nonzero()) for row in part.x]
    assert len(set(rows)) == size
    assert torch.equal(part.y, ten().y[rows])


def test_subsets_have_names_and_rounds():
    def rows(purpose: str = "mine", **changes: Any) -> list[float]:
        return ten(**changes).subset(0.5, purpose).x.flatten(1).sum(1).tolist()

    assert rows() == rows()
    assert rows() != rows("other")
    assert rows() != rows(round=1)


def test_work_on_a_subset_is_not_the_main_work():
    ctx = ten(batch_size=4)
    part = ctx.subset(0.5, "mine")
    part.fit(toys.tiny().fresh(0), on=part.ce, phase="mine")
    assert ctx.losses == []
    assert all(torch.equal(a[0], b[0]) for a, b in zip(ctx.batches(), ten(batch_size=4).batches(), strict=True))


@pytest.mark.parametrize(
    ("rows", "share", "sizes"),
    [(10, 0.2, (2, 8)), (4, 0.2, (1, 3)), (2, 0.9, (1, 1)), (3, 0.01, (1, 2)), (1, 0.2, (1, 1))],
)
def test_a_split_gives_every_row_to_one_part(rows: int, share: float, sizes: tuple[int, int]):
    """Except where there is only one row."""
    x, y = toys.batch(rows)
    parts = toys.work(x, y).split(share, "mine")
    assert tuple(part.num_samples for part in parts) == sizes
    seen = torch.cat([part.x for part in parts]).flatten(1)
    assert len(seen.unique(dim=0)) == rows
    for part in parts:
        found = [int((x == row).flatten(1).all(1).nonzero()) for row in part.x]
        assert torch.equal(part.y, y[found])


def test_a_split_lasts_and_has_a_name_and_a_client():
    def rows(purpose: str = "mine", **changes: Any) -> list[float]:
        return ten(**changes).split(0.5, purpose)[0].x.flatten(1).sum(1).tolist()

    assert rows() == rows() == rows(round=1)
    assert len({tuple(rows()), tuple(rows("other")), tuple(rows(client=1)), tuple(rows(seed=1))}) == 4


def test_work_on_a_part_of_a_split_is_the_clients_training():
    ctx = ten(batch_size=4)
    rest = ctx.split(0.2, "mine")[1]
    rest.fit(toys.tiny().fresh(0), on=rest.ce)
    assert len(ctx.losses) == 2


def test_under_a_guard_there_is_no_part_of_the_rows_and_no_stopping():
    ctx = ten(guard=Guard(3, 1))
    with pytest.raises(PrivacyError, match=r"ctx\.split"):
        ctx.split(0.5, "mine")
    with pytest.raises(PrivacyError, match=r"ctx\.subset"):
        ctx.subset(0.5, "mine")
    with pytest.raises(PrivacyError, match="stops on the loss"):
        ctx.fit(toys.tiny().fresh(0), on=ctx.ce, until=lambda losses: True)


# --- projections and loops that stop


@both
def test_a_projection_follows_every_step(driver: Any):
    """Held against the same steps by hand, clipped after each."""
    ctx, theta = ten(driver, epochs=3, lr=5.0), toys.tiny().fresh(0)

    def clip(params: Items) -> Items:
        return combine(lambda p: p.clamp(-0.2, 0.2), params)

    found = ctx.fit(theta, on=ctx.ce, project=clip)
    for _ in range(3):
        theta = clip(toys.hand_step(theta, toys.hand_gradient(theta, ctx.x, ctx.y), 5.0))
    assert toys.distance(found, theta) < 1e-14
    assert all(v.requires_grad == (driver is Unrolled) for v in found.values())


@both
def test_a_loop_may_stop_after_any_epoch(driver: Any):
    """It is shown the mean loss of every epoch, over its steps; what it has done until then is the result."""
    shown: list[list[float]] = []

    def third(losses: Any) -> bool:
        shown.append(list(losses))
        return len(losses) == 3

    ctx, start = ten(driver, batch_size=4), toys.tiny().fresh(0)
    found = ctx.fit(start, on=ctx.ce, epochs=50, until=third)
    reference = ten(driver, batch_size=4)
    assert toys.distance(found, reference.fit(start, on=reference.ce, epochs=3)) == 0
    steps = torch.stack(reference.losses).reshape(3, 3).mean(1).tolist()
    assert shown == [pytest.approx(steps[: i + 1]) for i in range(3)]


def test_a_loop_that_never_wants_to_stop_ends_with_its_epochs():
    ctx = ten(batch_size=4)
    ctx.fit(toys.tiny().fresh(0), on=ctx.ce, epochs=4, until=lambda losses: False)
    assert len(ctx.losses) == 4 * 3
    quiet = ten()
    quiet.fit(toys.tiny().fresh(0), on=quiet.ce, phase="other", until=lambda losses: True)
    assert quiet.losses == []
