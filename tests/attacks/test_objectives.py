"""Distances and priors against numbers worked out by hand."""

import pytest
import torch
from torch import Tensor

from pflsec.attacks.objectives import cosine, relative_squared, squared
from pflsec.attacks.priors import total_variation

SEEN = {"a": torch.tensor([3.0, 0.0]).double(), "b": torch.tensor([[4.0]]).double()}
GUESS = {"a": torch.tensor([3.0, 1.0]).double(), "b": torch.tensor([[2.0]]).double()}


def scaled(items: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    return {k: v.double() * by for k, v in items.items()}


def random_items(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(50, 40, generator=rng, dtype=dtype), "b": torch.randn(40, generator=rng, dtype=dtype)}


def test_the_squared_distance_is_the_sum_over_all_numbers():
    assert float(squared(SEEN)(GUESS)) == 1 + 4


def test_the_relative_distance_is_in_units_of_what_was_seen():
    assert float(relative_squared(SEEN)(GUESS)) == (1 + 4) / (9 + 16)


def test_the_cosine_is_taken_over_all_items_as_one_vector():
    inner, sizes = 3 * 3 + 4 * 2, (9 + 1 + 4) * (9 + 16)
    assert float(cosine(SEEN)(GUESS)) == pytest.approx(1 - inner / sizes**0.5, rel=1e-12)


def test_the_cosine_distance_of_opposite_vectors_is_two():
    assert float(cosine(SEEN)(scaled(SEEN, -2.0))) == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_a_vector_has_no_distance_to_itself(seed: int):
    items = random_items(seed, torch.float32)
    assert abs(float(cosine(items)(items))) < 1e-14
    assert float(squared(items)(items)) == float(relative_squared(items)(items)) == 0


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e6])
def test_the_cosine_forgives_scale_on_either_side(scale: float):
    """Trained networks have tiny gradients: 1e-8 is nothing unusual."""
    a, b = random_items(0), random_items(1)
    expected = float(cosine(a)(b))
    assert float(cosine(a)(scaled(b, scale))) == pytest.approx(expected, rel=1e-9)
    assert float(cosine(scaled(a, scale))(b)) == pytest.approx(expected, rel=1e-9)
    assert float(cosine(scaled(a, scale))(scaled(b, scale))) == pytest.approx(expected, rel=1e-9)


def test_the_relative_distance_forgives_the_scale_of_both():
    a, b = random_items(0), random_items(1)
    assert float(relative_squared(scaled(a, 1e-9))(scaled(b, 1e-9))) == pytest.approx(float(relative_squared(a)(b)))


def test_rounding_does_not_hide_the_end_of_a_descent():
    """In single precision the plain cosine of a vector with itself misses 1 by up to 2e-5."""
    items = {"a": torch.full((200_000,), 0.1)}
    nudged = {"a": items["a"] + torch.where(torch.arange(200_000) % 2 == 0, 1e-6, -1e-6)}
    assert 1e-12 < float(cosine(items)(nudged)) < 1e-9
    assert cosine(items)(nudged).dtype == torch.float64


@pytest.mark.parametrize("objective", [squared, relative_squared, cosine])
@pytest.mark.parametrize("guess", [{"a": GUESS["a"]}, {**GUESS, "c": GUESS["a"]}, {"a": GUESS["a"], "B": GUESS["b"]}])
def test_items_under_other_names_are_refused(objective, guess: dict[str, Tensor]):
    with pytest.raises(KeyError, match="not present on both sides"):
        objective(SEEN)(guess)


@pytest.mark.parametrize("objective", [squared, relative_squared, cosine])
def test_a_guess_that_sends_nothing_has_a_finite_distance_and_slope(objective):
    guess = {k: torch.zeros_like(v, dtype=torch.float64, requires_grad=True) for k, v in SEEN.items()}
    distance = objective(SEEN)(guess)
    slopes = torch.autograd.grad(distance, list(guess.values()))
    assert torch.isfinite(distance)
    assert all(torch.isfinite(s).all() for s in slopes)


@pytest.mark.parametrize("objective", [squared, relative_squared, cosine])
def test_slopes_agree_with_finite_differences(objective):
    guess = {k: v.double().requires_grad_() for k, v in GUESS.items()}
    assert torch.autograd.gradcheck(lambda a, b: objective(SEEN)({"a": a, "b": b}), (guess["a"], guess["b"]))


def test_total_variation_is_the_mean_step_across_plus_the_mean_step_down():
    image = torch.tensor([[1.0, 3.0, 3.0], [1.0, 0.0, 0.0]])[None, None]
    across, down = (2 + 0 + 1 + 0) / 4, (0 + 3 + 3) / 3
    assert float(total_variation(image)) == pytest.approx(across + down)


def test_total_variation_of_a_flat_image_is_zero_and_of_one_row_counts_one_direction():
    assert float(total_variation(torch.full((2, 3, 4, 4), 0.7))) == 0
    assert float(total_variation(torch.tensor([[[[0.0, 1.0, 0.0]]]]))) == 1


def test_total_variation_counts_every_image_and_channel_alike():
    one = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0))
    assert float(total_variation(one.expand(3, 2, 5, 5))) == pytest.approx(float(total_variation(one)))


@pytest.mark.parametrize("objective", [squared, relative_squared, cosine])
def test_single_precision_tells_how_far_a_guess_near_the_truth_is_and_which_way(objective):
    seen, aside = random_items(0), random_items(1)
    near = {k: v + 1e-5 * aside[k] for k, v in seen.items()}
    found = []
    for dtype in (torch.float64, torch.float32):
        guess = {k: v.to(dtype).requires_grad_() for k, v in near.items()}
        distance = objective(seen)(guess)
        slopes = torch.autograd.grad(distance, list(guess.values()))
        found.append((distance.item(), torch.cat([s.flatten().double() for s in slopes])))
    (exact, slope), (single, rough) = found
    assert single == pytest.approx(exact, rel=1e-2)
    assert float(torch.cosine_similarity(slope, rough, dim=0)) > 0.999


def test_no_guess_is_nearer_than_another_to_the_direction_of_nothing():
    guess = {k: v.clone().requires_grad_() for k, v in GUESS.items()}
    distance = cosine(scaled(SEEN, 0.0))(guess)
    assert distance.item() == 1
    assert not any(s.any() for s in torch.autograd.grad(distance, list(guess.values())))


def test_a_guess_too_large_for_its_arithmetic_has_no_distance():
    assert cosine(SEEN)(scaled(SEEN, 1.0) | {"a": torch.tensor([torch.inf, 0.0]).double()}).isnan()
    assert cosine(SEEN)({k: v.float() * 1e25 for k, v in SEEN.items()}).isnan()
