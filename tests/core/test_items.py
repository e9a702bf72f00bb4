"""Items: functions of named tensors that return new dicts and name what does not fit."""

import pytest
import torch

from pflsec.core import items as it
from pflsec.core.items import Items
from tests import toys

A: Items = {"body.w": torch.tensor([3.0, 4.0]), "body.b": torch.tensor(0.0), "head.w": torch.tensor([[1.0]])}


def test_select_takes_whole_parts_and_single_items_in_their_order():
    assert list(it.select(A, "body")) == ["body.w", "body.b"]
    assert list(it.select(A, "head", "body")) == list(A)
    assert list(it.select(A, "body.b")) == ["body.b"]
    assert it.select(A, "bod", "w") == {}


def test_a_prefix_goes_on_and_comes_off():
    under = it.prefixed("delta", A)
    assert list(under) == ["delta.body.w", "delta.body.b", "delta.head.w"]
    assert toys.same(it.without_prefix("delta", under | A), A)
    assert it.without_prefix("del", under) == {}


def test_names_that_stand_on_one_side_only_are_listed():
    with pytest.raises(KeyError, match=r"head\.w, x"):
        it.same_names(A, it.select(A, "body") | {"x": torch.ones(1)})
    for fn in (it.subtract, it.dot, it.squared_distance):
        with pytest.raises(KeyError, match=r"head\.w"):
            fn(A, it.select(A, "body"))
    with pytest.raises(KeyError):
        it.weighted_mean([A, {}], [1, 1])


def test_norms_and_distances_are_over_all_items_as_one_vector():
    """(3, 4, 0, 1): squares 9 + 16 + 0 + 1 = 26."""
    zero = {k: torch.zeros_like(v) for k, v in A.items()}
    assert it.squared_distance(A, zero).item() == 26
    assert it.dot(A, A).item() == 26
    assert it.norm(A).item() == pytest.approx(26**0.5)
    assert toys.same(it.subtract(A, A), zero)


@pytest.mark.parametrize(("weights", "value"), [([1, 3], 3.0), ([1, 1], 2.0), ([0, 5], 4.0), ([0.1, 0.3], 3.0)])
def test_a_weighted_mean_normalises_its_weights(weights: list[float], value: float):
    """0 and 4 with weights 1 and 3: (0 + 12)/4 = 3."""
    many = [{"w": torch.full((2,), v)} for v in (0.0, 4.0)]
    before = [toys.snapshot(m) for m in many]
    assert it.weighted_mean(many, weights)["w"].tolist() == pytest.approx([value] * 2)
    assert all(toys.same(a, b) for a, b in zip(many, before, strict=True))


def test_the_mean_of_one_is_a_copy():
    found = it.weighted_mean([A], [7])
    assert toys.same(found, A)
    assert not any(found[k].data_ptr() == A[k].data_ptr() for k in A)


@pytest.mark.parametrize("weights", [[0, 0], [], [-1, 1], [float("nan"), 1]])
def test_weights_without_a_positive_sum_are_refused(weights: list[float]):
    with pytest.raises(ValueError, match="must sum to a positive number"):
        it.weighted_mean([A, A][: len(weights)], weights)


@pytest.mark.parametrize("count", [1, 3])
def test_as_many_weights_as_items_are_needed(count: int):
    with pytest.raises(ValueError, match="zip"):
        it.weighted_mean([A, A], [1.0] * count)


def test_copies_share_nothing_and_detached_items_share_memory():
    source = {"w": torch.ones(2, requires_grad=True)}
    assert it.cloned(source)["w"].data_ptr() != source["w"].data_ptr()
    assert it.detached(source)["w"].data_ptr() == source["w"].data_ptr()
    assert not it.cloned(source)["w"].requires_grad
    assert not it.detached(source)["w"].requires_grad


def test_casting_leaves_flags_and_counts_alone():
    mixed = A | {"held": torch.tensor([True]), "n": torch.tensor(3)}
    found = it.cast(mixed, torch.float64)
    assert {k: v.dtype for k, v in found.items() if k in A} == dict.fromkeys(A, torch.float64)
    assert (found["held"].dtype, found["n"].dtype) == (torch.bool, torch.int64)
    assert it.floating(mixed).keys() == A.keys()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_first_item_that_is_not_finite_is_named(bad: float):
    assert it.first_nonfinite(A) is None
    assert it.first_nonfinite(A | {"x": torch.tensor([0, bad]), "y": torch.tensor(bad)}) == "x"
    assert it.first_nonfinite({"n": torch.tensor(3), "empty": torch.zeros(0)}) is None


def test_bytes_are_counted_without_scalars():
    """2 float32 and one [1, 1]: 12 bytes; 0-d items ride in the header; three flags are three bytes."""
    assert it.size_in_bytes(A) == 12
    assert it.size_in_bytes({"held": torch.zeros(3, dtype=torch.bool), "e": torch.zeros(0, 3)}) == 3


def test_a_table_has_a_row_for_each_model_and_some_of_them_can_be_replaced():
    table = it.repeated(A, 3)
    assert {k: tuple(v.shape) for k, v in table.items()} == {"body.w": (3, 2), "body.b": (3,), "head.w": (3, 1, 1)}
    other = {k: v + 1 for k, v in A.items()}
    changed = it.with_rows(table, {2: other, 0: A})
    assert all(toys.same({k: v[i] for k, v in changed.items()}, A) for i in (0, 1))
    assert toys.same({k: v[2] for k, v in changed.items()}, other)
    assert toys.same(table, it.repeated(A, 3))
    with pytest.raises(KeyError, match=r"head\.w"):
        it.with_rows(table, {1: it.select(A, "body")})
