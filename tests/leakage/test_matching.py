"""The assignment against all permutations, and labels as multisets."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pflsec.leakage.labels import exact, overlap
from pflsec.leakage.matching import assign
from tests.leakage.arrays import random_images


def total(truth: np.ndarray, rec: np.ndarray, order: tuple[int, ...]) -> float:
    return sum(float(np.mean((truth[i] - rec[j]) ** 2)) for i, j in enumerate(order))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("surplus", [0, 1])
def test_assignment_has_the_least_total_error_of_all_permutations(seed, surplus):
    rng = np.random.default_rng(seed)
    truth, rec = rng.random((5, 1, 3, 3)), rng.random((5 + surplus, 1, 3, 3))
    best = min(permutations(range(len(rec)), len(truth)), key=lambda order: total(truth, rec, order))
    assert assign(truth, rec).tolist() == list(best)


def test_assignment_is_not_the_best_per_image():
    """Both truths are nearest to the first reconstruction; only one may have it."""
    truth = np.array([0.5, 0.6]).reshape(2, 1, 1, 1)
    rec = np.array([0.55, 0.9]).reshape(2, 1, 1, 1)
    assert assign(truth, rec).tolist() == [0, 1]


def test_a_shuffled_batch_is_put_back_and_exact_matches_come_first():
    truth = random_images(6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    rec = truth[order].clone()
    rec[0] = 0.5  # only one of them is not exact
    assert order[torch.from_numpy(assign(truth, rec))].tolist() == list(range(6))


def test_missing_reconstructions_leave_the_worst_truths_unmatched():
    truth = random_images(4)
    assert assign(truth, truth[[2, 0]]).tolist() == [1, -1, 0, -1]
    assert assign(truth, truth[:0]).tolist() == [-1, -1, -1, -1]


def test_surplus_reconstructions_are_ignored():
    truth = random_images(2)
    assert assign(truth, torch.cat([random_images(3, seed=9), truth])).tolist() == [3, 4]


def test_values_that_are_not_finite_and_other_shapes_are_refused():
    truth = random_images(2)
    with pytest.raises(ValueError, match="invalid numeric"):
        assign(truth, torch.full_like(truth, torch.nan))
    with pytest.raises(ValueError, match="one shape"):
        assign(truth, random_images(2, channels=3))


def test_labels_are_multisets():
    assert overlap([3, 3, 5, 7], [7, 3, 3, 5]) == 1.0
    assert overlap([3, 3, 5, 7], [3, 5, 5, 5]) == 0.5
    assert overlap([3, 3], [3]) == 0.5
    assert overlap([3], []) == 0.0
    assert exact([3, 3, 5], [5, 3, 3])
    assert not exact([3, 3, 5], [3, 5, 5])
    assert not exact([3], [3, 3])


def test_guessing_every_class_does_not_pay():
    assert overlap([3], range(10)) == pytest.approx(0.1)


def test_overlap_needs_a_true_label():
    with pytest.raises(ValueError, match="at least one"):
        overlap([], [1])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.lists(st.integers(0, 4), max_size=8))
def test_overlap_is_a_share_and_one_only_for_equal_multisets(true, found):
    share = overlap(true, found)
    assert 0 <= share <= 1
    assert (share == 1) == exact(true, found)
    assert share == overlap(true[::-1], sorted(found))
