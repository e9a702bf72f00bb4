"""Leading singular values as a wire format."""

import pytest
import torch
from torch import Tensor

from pflsec.training import lowrank

pytestmark = pytest.mark.usefixtures("doubles")


def matrix(rows: int, columns: int, rank: int | None = None, seed: int = 0) -> Tensor:
    """Return a random matrix, of this rank."""
    rng = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(rows, columns, generator=rng)
    return torch.randn(rows, rank, generator=rng) @ torch.randn(rank, columns, generator=rng)


def near(a: Tensor, energy: float) -> Tensor:
    """Return the matrix that the factors stand for."""
    u, s, v = lowrank.leading(a, energy)
    return u * s @ v


@pytest.mark.parametrize("energy", [0.0, 0.5, 0.95, 0.98, 1.0])
@pytest.mark.parametrize("size", [(5, 16), (16, 5), (1, 7), (7, 1), (6, 6)])
def test_the_fewest_values_that_keep_the_energy(energy: float, size: tuple[int, int]):
    """|A - A_k|^2 = sum of the squares left out <= (1 - T)|A|^2, and one value fewer would leave out more."""
    a = matrix(*size)
    u, s, v = lowrank.leading(a, energy)
    k, values = len(s), torch.linalg.svdvals(a)
    assert k >= 1
    assert torch.allclose(s, values[:k], atol=1e-13)
    assert float((a - u * s @ v).norm() / a.norm()) <= (1 - energy) ** 0.5 + 1e-7
    assert k == 1 or values[: k - 1].square().sum() < energy * values.square().sum()
    assert torch.allclose(u.T @ u, torch.eye(k), atol=1e-13)
    assert torch.allclose(v @ v.T, torch.eye(k), atol=1e-13)


def test_the_full_rank_is_tried_too():
    """Equal values: 0.98 of ten needs all ten. A search that stops before the last would find nothing, and send zeros."""
    assert lowrank.rank(torch.ones(10), 0.98) == 10
    assert lowrank.rank(torch.ones(3), 0.95) == 3
    assert lowrank.rank(torch.ones(1), 1.0) == 1
    assert torch.allclose(near(torch.eye(4), 0.98), torch.eye(4))


def test_of_nothing_nothing_is_sent():
    packed = lowrank.pack({"a": torch.zeros(4, 6), "b": torch.zeros(2)}, 0.95)
    assert packed["ranks"].tolist() == [0, lowrank.DENSE]
    assert packed["update"].tolist() == [0, 0]
    found = lowrank.unpack(packed, {"a": (4, 6), "b": (2,)})
    assert torch.equal(found["a"], torch.zeros(4, 6))


def test_tiny_numbers_have_a_rank_too():
    """Their squares are zero in single precision."""
    assert len(lowrank.leading((1e-30 * matrix(4, 6, rank=1)).float(), 0.95)[1]) == 1


def test_what_is_unpacked_is_what_was_packed():
    """Vectors and what would not get smaller bit for bit; matrices to the energy; kernels as [out, in * k * k]."""
    items = {
        "w": matrix(8, 12, rank=3),
        "b": matrix(1, 8)[0],
        "k": matrix(6, 45, rank=3).reshape(6, 5, 3, 3),
        "full": torch.eye(3),
    }
    packed = lowrank.pack(items, 0.9)
    found = lowrank.unpack(packed, {k: tuple(v.shape) for k, v in items.items()})
    w, b, k, full = packed["ranks"].tolist()
    assert b == full == lowrank.DENSE
    assert 0 < w < 8
    assert 0 < k < 6
    assert len(packed["update"]) == w * 21 + 8 + k * 52 + 9
    assert torch.equal(found["b"], items["b"])
    assert torch.equal(found["full"], items["full"])
    assert torch.allclose(found["w"], near(items["w"], 0.9), atol=1e-14)
    assert torch.allclose(found["k"].flatten(1), near(items["k"].flatten(1), 0.9), atol=1e-14)


def test_what_is_not_finite_is_sent_as_it_is():
    """So that whoever checks messages finds it, and names it."""
    bad = torch.full((4, 9), torch.nan)
    assert lowrank.pack({"a": bad}, 0.9)["update"].isnan().all()


@pytest.mark.parametrize("size", [(5, 9), (9, 5), (4, 4), (1, 6)])
def test_the_factors_are_differentiable(size: tuple[int, int]):
    a = matrix(*size).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: lowrank.leading(a, 0.8), a, atol=1e-6)


def test_all_values_have_torchs_derivative():
    a, weights = matrix(5, 7).requires_grad_(), matrix(5, 7, seed=1)

    def total(u: Tensor, s: Tensor, v: Tensor) -> Tensor:
        return ((u.square() * s) @ v.abs() * weights).sum()  # does not depend on signs

    ours = torch.autograd.grad(total(*lowrank.leading(a, 1.0)), a)[0]
    theirs = torch.autograd.grad(total(*torch.linalg.svd(a, full_matrices=False)), a)[0]
    assert torch.allclose(ours, theirs, atol=1e-11)


@pytest.mark.parametrize("rank", [1, 2])
def test_zeros_among_the_values_do_no_harm(rank: int):
    """Within matrices of its rank, a matrix is its own nearest: the derivative along such a path is the path's. torch's own
    derivative is not finite here, at a matrix whose other values are zeros."""
    left, right = matrix(6, rank), matrix(rank, 8, seed=1)
    left[3:], right[:, 5:] = 0, 0
    left = left.requires_grad_()
    weights = matrix(6, 8, seed=2)
    found = torch.autograd.grad((near(left @ right, 1.0 - 1e-12) * weights).sum(), left)[0]
    assert torch.allclose(found, weights @ right.T, atol=1e-9)


def test_the_sign_does_not_depend_on_where_it_is_computed():
    """The factors of -A are those of A with V turned round."""
    a = matrix(5, 9)
    u, s, v = lowrank.leading(a, 0.9)
    other = lowrank.leading(-a, 0.9)
    assert torch.allclose(other[0], u, atol=1e-12)
    assert torch.allclose(other[2], -v, atol=1e-12)
    assert torch.allclose(other[1], s, atol=1e-12)
