"""Scores of mixed images: the best step, the part that shows best, and what stands beside them."""

import math

import pytest
import torch
from torch import Tensor

from pflsec.leakage import mixed
from pflsec.leakage.vault import Mixtures, Pool
from tests.leakage.arrays import normalised, pool_of, random_images, to_pixels

IMAGES = random_images(4, side=6).double()


def of(parts: list[list[int]], weights: list[list[float]], steps: list[int]) -> Mixtures:
    """Return mixtures of IMAGES, whose dataset rows count from 100."""
    places, shares = torch.tensor(parts), torch.tensor(weights, dtype=torch.float64)
    blends = (shares[:, :, None, None, None] * IMAGES[places]).sum(1)
    labels = torch.nn.functional.one_hot(places % 3, 3).double()
    return Mixtures(
        x=normalised(blends),
        y=(shares[:, :, None] * labels).sum(1),
        step=torch.tensor(steps),
        main=torch.ones(len(steps), dtype=torch.bool),
        parts=places + 100,
        weights=shares,
        images=normalised(IMAGES),
        dataset_index=torch.arange(4) + 100,
    )


def decibel(a: Tensor, b: Tensor) -> float:
    return min(100.0, -10 * math.log10(max(float((a - b).square().mean()), 1e-30)))


def by_hand(guess: Tensor, true: Tensor) -> float:
    """Return the PSNR of the nearest a*guess + b, found by solving the normal equations, clamped."""
    g, t = guess.flatten(), true.flatten()
    columns = torch.stack([g, torch.ones_like(g)], 1)
    a, b = torch.linalg.solve(columns.T @ columns, columns.T @ t)
    return decibel((a * guess + b).clamp(0, 1), true)


def test_of_several_steps_the_mixed_image_that_was_rebuilt_best_counts():
    found = of([[0, 1], [0, 2]], [[0.5, 0.5], [0.8, 0.2]], [0, 1])
    guess = to_pixels(found.x[1:]) + 0.01
    one = mixed.score(found, normalised(guess), to_pixels, pool_of(IMAGES))[100]
    assert (one.step, one.weight) == (1, pytest.approx(0.8))
    assert one.psnr_mixed == pytest.approx(40, abs=1e-6)
    assert one.psnr_mixed_blind == pytest.approx(decibel(to_pixels(found.x[1]), IMAGES.mean(0)))


def test_the_part_that_shows_best_is_found_through_scale_and_shift():
    found = of([[0, 1, 2]], [[0.2, 0.7, 0.1]], [0])
    guess = to_pixels(found.x)
    one = mixed.score(found, found.x, to_pixels, pool_of(IMAGES))[100]
    shown = {i: by_hand(guess[0], IMAGES[i]) for i in range(3)}
    assert max(shown, key=lambda i: shown[i]) == 1
    assert (one.part, one.part_weight) == (101, pytest.approx(0.7))
    assert one.psnr_part == pytest.approx(shown[1], abs=1e-6)
    assert one.psnr_part_blind == pytest.approx(max(by_hand(IMAGES.mean(0), IMAGES[i]) for i in range(3)), abs=1e-6)
    pale = mixed.score(found, normalised(0.3 * IMAGES[2:3] + 0.4), to_pixels, pool_of(IMAGES))[100]
    assert (pale.part, pale.psnr_part) == (102, 100)
    dark = mixed.score(found, normalised(0.9 - IMAGES[:1]), to_pixels, pool_of(IMAGES))[100]
    assert (dark.part, dark.psnr_part) == (100, 100)


def test_a_guess_without_contrast_is_the_mean_of_each_part():
    flat = mixed.fitted(torch.full((1, 6, 6), 0.5, dtype=torch.float64), IMAGES[0])
    assert torch.allclose(flat, IMAGES[0].mean().expand(1, 6, 6))


def test_reconstructions_of_a_batch_are_told_apart_and_missing_or_damaged_ones_are_grey():
    found = of([[0, 1], [2, 3], [3, 0]], [[0.5, 0.5]] * 3, [0, 0, 0])
    x = torch.stack([found.x[1], torch.full_like(found.x[0], torch.nan)])
    scores = mixed.score(found, x, to_pixels, pool_of(IMAGES))
    grey = torch.full_like(IMAGES[0], 0.5)
    assert scores[102].psnr_mixed == 100
    for place, row in ((0, 100), (2, 103)):
        assert scores[row].psnr_mixed == pytest.approx(decibel(to_pixels(found.x[place]), grey))


def test_parts_of_no_weight_do_not_count():
    found = of([[0, 1]], [[1.0, 0.0]], [0])
    one = mixed.score(found, normalised(IMAGES[1:2]), to_pixels, pool_of(IMAGES))[100]
    assert one.part == 100


def test_the_mixtures_of_several_clients_are_taken_step_by_step():
    a, b = of([[0, 1], [0, 2]], [[0.5, 0.5]] * 2, [0, 1]), of([[3, 2, 1]], [[0.4, 0.3, 0.3]], [0])
    both = mixed.joined([a, b])
    assert both is not None
    assert both.step.tolist() == [0, 1, 0]
    assert both.parts.tolist() == [[100, 101, 100], [100, 102, 100], [103, 102, 101]]
    assert mixed.joined([a, None]) is None
    scores = mixed.score(both, torch.cat([b.x, a.x[:1]]), to_pixels, pool_of(IMAGES))
    assert [scores[row].psnr_mixed for row in (100, 103)] == [100, 100]


def test_labels_are_the_mean_over_the_steps_of_the_phase_that_is_sent():
    found = of([[0, 1], [0, 2], [1, 2]], [[0.5, 0.5], [0.8, 0.2], [0.4, 0.6]], [0, 1, 1])
    labels = found.labels(torch.tensor([100, 101]))
    assert labels is not None
    assert torch.allclose(labels, torch.tensor([[0.65, 0.25, 0.1], [0, 0.4, 0.6]]).double())
    found.main[0] = False
    labels = found.labels(torch.tensor([100]))
    assert labels is not None
    assert torch.allclose(labels, found.y[1:2])
    assert found.labels(torch.tensor([100, 102])) is None


def test_rows_and_sentence():
    pool = Pool(IMAGES, torch.arange(4) + 100, IMAGES.mean(0))
    found = of([[0, 1], [2, 3]], [[0.5, 0.5]] * 2, [0, 0])
    rows = mixed.rows("r000-c00-v0-probe", [102, 100, 101], mixed.score(found, found.x, to_pixels, pool))
    assert [(row["position"], row["dataset_index"]) for row in rows] == [(0, 102), (1, 100)]
    assert set(rows[0]) == set(mixed.COLUMNS)
    said = mixed.sentence(rows, 1e-7)
    assert said.startswith("the 2 mixed images were rebuilt at 100.0 dB (blind ")
    assert "misses" not in said
    assert "misses what was sent by 0.2 (relative)" in mixed.sentence(rows, 0.2)
    assert mixed.sentence([], None) == ""
