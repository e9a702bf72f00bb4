"""The scoring of a victim batch: order of steps, matching, failures, labels, the blind guess."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pflsec.core.errors import RunError
from pflsec.core.files import to_csv
from pflsec.leakage.images import ssim
from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.score import score
from pflsec.leakage.vault import Pool, Truth
from tests.leakage.arrays import (
    no_perceptual,
    normalised,
    pool_of,
    random_images,
    to_pixels,
    truth_of,
)


def scored(pool: Pool, truth: Truth, pixels: Tensor | None, labels: Tensor | None = None):
    """Score a reconstruction that is given in pixels."""
    rec = None if pixels is None else normalised(pixels)
    return score(truth, rec, labels, to_pixels, pool, no_perceptual())


def off_by(images: Tensor, *steps: float) -> Tensor:
    """Return copies with every pixel moved by the step, one step for each image; images lie in [0.1, 0.9]."""
    return images.double() + torch.tensor(steps, dtype=torch.float64)[:, None, None, None]


@pytest.fixture
def pool() -> Pool:
    return pool_of(random_images(6))


def test_an_exact_reconstruction(pool):
    truth = truth_of(pool, 3)
    result = score(truth, truth.x.clone(), truth.y, to_pixels, pool, no_perceptual())
    assert (result.mse, result.psnr, result.psnr_capped) == (0.0, math.inf, 100.0)
    assert result.ssim == pytest.approx(1.0, abs=1e-12)
    assert (result.ssim_variant, result.lpips, result.lpips_status) == ("skimage-uniform7", None, "off")
    assert (result.clip_frac, result.saturated, result.nonfinite) == (0.0, False, False)
    assert (result.label_true, result.label_found, result.label_correct) == ("3", "3", 1.0)
    assert result.identified == 1.0
    assert result.images[0].dataset_index == 103


def test_the_mean_of_decibels_is_not_the_decibel_of_the_mean(pool):
    """Off by 0.1 and 0.01: 20 and 40 dB, mean 30; the PSNR of the mean error would be 22.97."""
    truth = truth_of(pool, 0, 1)
    result = scored(pool, truth, off_by(pool.images[:2], 0.1, 0.01))
    assert [one.psnr for one in result.images] == pytest.approx([20.0, 40.0], abs=1e-4)
    assert result.psnr == pytest.approx(30.0, abs=1e-4)
    assert result.mse == pytest.approx(0.00505, abs=1e-7)


def test_one_exact_image_makes_the_mean_infinite_but_not_the_capped_mean(pool):
    truth = truth_of(pool, 0, 1)
    rec = torch.cat([truth.x[:1], normalised(off_by(pool.images[1:2], 0.1))])
    result = score(truth, rec, None, to_pixels, pool, no_perceptual())
    assert result.psnr == math.inf
    assert result.psnr_capped == pytest.approx(60.0, abs=1e-4)


def test_images_labels_and_metrics_follow_one_assignment(pool):
    truth = truth_of(pool, 4, 0, 2)
    rec = off_by(pool.images[[2, 4, 0]], 0.1, 0.01, 0.001)
    result = scored(pool, truth, rec, torch.tensor([2, 5, 0]))
    assert [one.position for one in result.images] == [0, 1, 2]
    assert [one.dataset_index for one in result.images] == [104, 100, 102]
    assert [one.psnr for one in result.images] == pytest.approx([40.0, 60.0, 20.0], abs=1e-3)
    assert [one.label_found for one in result.images] == [5, 0, 2]
    assert [one.label_correct for one in result.images] == [0.0, 1.0, 1.0]
    assert (result.label_true, result.label_found) == ("4 0 2", "5 0 2")
    assert result.label_correct == pytest.approx(2 / 3)
    assert result.identified == 1.0


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)))
def test_the_order_of_a_reconstruction_changes_nothing(order):
    pool = pool_of(random_images(6))
    truth = truth_of(pool, 0, 1, 2, 3)
    rec, labels = off_by(pool.images[:4], 0.1, 0.05, 0.02, -0.01), torch.tensor([0, 1, 9, 3])
    assert scored(pool, truth, rec[order], labels[order]) == scored(pool, truth, rec, labels)


def test_missing_reconstructions_count_as_grey(pool):
    truth = truth_of(pool, 0, 1)
    result = scored(pool, truth, off_by(pool.images[1:2], 0.1), torch.tensor([1]))
    lost, found = result.images
    assert (lost.matched, found.matched) == (False, True)
    grey_error = float((pool.images[0].double() - 0.5).square().mean())
    assert lost.mse == pytest.approx(grey_error, abs=1e-7)
    assert (lost.identified, lost.label_found, lost.label_correct) == (0.0, None, None)
    assert result.mse == pytest.approx((grey_error + 0.01) / 2, abs=1e-7)
    assert (result.label_found, result.label_correct, result.identified) == ("1", 0.5, 0.5)


def test_grey_in_the_place_of_a_missing_image_identifies_nobody():
    """The unmatched victim is the pool's greyest image, so that grey would identify it by chance."""
    images = random_images(6)
    images[2] = 0.51
    pool = pool_of(images)
    assert scored(pool, truth_of(pool, 2, 3), images[3:4]).identified == 0.5


def test_no_reconstruction_at_all_in_a_batch_is_all_grey(pool):
    result = scored(pool, truth_of(pool, 0), pool.images[:0], torch.tensor([], dtype=torch.int64))
    assert result.mse == pytest.approx(float((pool.images[0].double() - 0.5).square().mean()), abs=1e-7)
    assert (result.label_found, result.label_correct, result.clip_frac) == ("", 0.0, None)


def test_surplus_reconstructions_are_ignored(pool):
    rec = torch.cat([random_images(3, seed=5).double(), off_by(pool.images[:1], 0.1)])
    result = scored(pool, truth_of(pool, 0), rec, torch.tensor([7, 8, 9, 0]))
    assert result.psnr == pytest.approx(20.0, abs=1e-4)
    assert (result.label_found, result.label_correct) == ("0", 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reconstruction_that_is_not_finite_is_grey_and_a_failure(value):
    """The victim is the pool's greyest image, so that grey would identify it by chance."""
    images = random_images(6)
    images[2] = 0.51
    pool = pool_of(images)
    result = scored(pool, truth_of(pool, 2), torch.full((1, 1, 8, 8), value))
    assert result.nonfinite
    assert result.mse == pytest.approx(1e-4, abs=1e-7)
    assert (result.mse_unclipped, result.clip_frac, result.identified) == (math.inf, 1.0, 0.0)
    finite = scored(pool, truth_of(pool, 2), torch.full((1, 1, 8, 8), 0.5))
    assert (finite.identified, finite.nonfinite) == (1.0, False)


def test_one_nan_spoils_its_image_but_not_its_neighbour(pool):
    rec = off_by(pool.images[:2], 0.1, 0.01)
    rec[0, 0, 3, 3] = math.nan
    result = scored(pool, truth_of(pool, 0, 1), rec)
    assert [one.nonfinite for one in result.images] == [True, False]
    assert result.nonfinite
    grey_error = float((pool.images[0].double() - 0.5).square().mean())
    assert [one.mse for one in result.images] == pytest.approx([grey_error, 1e-4], abs=1e-7)
    assert result.identified == 0.5
    assert result.clip_frac == pytest.approx(1 / 128)


def test_a_diverged_reconstruction_is_clamped_and_all_of_it_counted(pool):
    rec = torch.where(torch.arange(64).view(1, 1, 8, 8) % 2 == 0, 1e6, -1e6)
    result = scored(pool, truth_of(pool, 0), rec)
    assert result.clip_frac == 1.0
    assert not result.nonfinite
    assert result.mse is not None
    assert 0 < result.mse <= 1
    assert result.mse_unclipped == pytest.approx(1e12, rel=1e-3)


def test_values_outside_the_range_are_counted_but_rounding_is_not(pool):
    rec = off_by(pool.images[:1], 0.0)
    rec[0, 0, 0, :4] = torch.tensor([-0.01, 1.01, -1e-7, 1 + 1e-7], dtype=torch.float64)
    assert scored(pool, truth_of(pool, 0), rec).clip_frac == pytest.approx(2 / 64)


def test_a_truth_that_rounding_left_outside_the_range_is_clamped():
    pool = pool_of(torch.cat([torch.ones(1, 1, 8, 8), random_images(5)]))
    truth = truth_of(pool, 0)
    result = score(truth, truth.x, None, lambda x: to_pixels(x) + 1e-7, pool, no_perceptual())
    assert (result.psnr, result.clip_frac) == (math.inf, 0.0)


def test_a_match_made_by_clamping_is_flagged():
    """Truth 1 everywhere, reconstruction 5 everywhere: equal once clamped."""
    images = torch.cat([torch.ones(1, 1, 8, 8), random_images(5)])
    pool = pool_of(images)
    result = scored(pool, truth_of(pool, 0), torch.full((1, 1, 8, 8), 5.0))
    assert (result.psnr_capped, result.clip_frac, result.saturated) == (100.0, 1.0, True)
    assert result.mse_unclipped == pytest.approx(16.0, abs=1e-4)
    exact = scored(pool, truth_of(pool, 0), torch.full((1, 1, 8, 8), 1.0000001))
    assert (exact.psnr_capped, exact.saturated) == (100.0, False)
    half = scored(pool, truth_of(pool, 0), torch.full((1, 1, 8, 8), 0.5))
    assert not half.saturated


def test_the_blind_guess_is_the_mean_image(pool):
    truth = truth_of(pool, 0, 1)
    result = scored(pool, truth, off_by(pool.images[:2], 0.1, 0.01))
    blind = [-10 * math.log10(float((pool.images[i] - pool.mean).square().mean())) for i in (0, 1)]
    assert [one.psnr_blind for one in result.images] == pytest.approx(blind, abs=1e-4)
    assert result.psnr_blind == pytest.approx(sum(blind) / 2, abs=1e-4)
    assert result.excess_psnr == pytest.approx(30.0 - sum(blind) / 2, abs=1e-3)


def test_the_mean_image_itself_exceeds_nothing(pool):
    assert scored(pool, truth_of(pool, 0), pool.mean[None]).excess_psnr == pytest.approx(0.0, abs=1e-4)


def test_a_pool_of_one_leaves_nothing_to_leak():
    single = pool_of(random_images(1))
    result = scored(single, truth_of(single, 0), single.images)
    assert (result.psnr_blind, result.excess_psnr) == (100.0, 0.0)


def test_labels_without_images(pool):
    result = scored(pool, truth_of(pool, 3, 4), None, torch.tensor([4, 5]))
    assert (result.label_true, result.label_found, result.label_correct) == ("3 4", "4 5", 0.5)
    for name in ("mse", "mse_unclipped", "psnr", "psnr_capped", "ssim", "lpips", "clip_frac", "identified"):
        assert getattr(result, name) is None
    assert result.excess_psnr is None
    assert (result.ssim_variant, result.lpips_status) == ("no-reconstruction", "off")
    assert result.psnr_blind
    assert result.psnr_blind > 0
    assert [one.label_true for one in result.images] == [3, 4]
    assert [one.label_found for one in result.images] == [None, None]


def test_nothing_found_at_all(pool):
    result = scored(pool, truth_of(pool, 3), None)
    assert (result.label_true, result.label_found, result.label_correct) == ("3", None, None)


@pytest.mark.parametrize(
    ("channels", "side", "variant"),
    [(1, 28, "skimage-uniform7"), (3, 6, "skimage-uniform5"), (3, 2, "image-too-small")],
)
def test_small_and_grey_images(channels, side, variant):
    pool = pool_of(random_images(6, channels, side))
    result = scored(pool, truth_of(pool, 0, 1), off_by(pool.images[:2], 0.1, 0.1))
    assert result.psnr == pytest.approx(20.0, abs=1e-4)
    assert result.ssim_variant == variant
    assert (result.ssim is None) == (side == 2)


def test_batch_ssim_is_the_mean_of_the_images(pool):
    noise = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    rec = (pool.images[:2] + 0.1 * noise).clamp(0, 1)
    result = scored(pool, truth_of(pool, 0, 1), rec)
    a, b = (ssim(pool.images[i], rec[i])[0] or math.nan for i in (0, 1))
    assert [one.ssim for one in result.images] == pytest.approx([a, b], abs=1e-5)
    assert result.ssim == pytest.approx((a + b) / 2, abs=1e-5)
    assert abs(a - b) > 1e-3


def test_scores_do_not_depend_on_the_normalisation(pool):
    """The same pixels reach the network as [-1, 1] or standardised: the leakage is the same."""
    rec = off_by(pool.images[:1], 0.1)
    standard = scored(pool, truth_of(pool, 0), rec)
    wide = Truth(pool.images[:1] * 2 - 1, torch.tensor([0]), pool.dataset_index[:1], {}, None)
    other = score(wide, rec * 2 - 1, None, lambda x: (x + 1) / 2, pool, no_perceptual())
    assert other.psnr == pytest.approx(standard.psnr, abs=1e-4)
    assert other.ssim == pytest.approx(standard.ssim, abs=1e-6)


class MeanDistance(nn.Module):
    """Stands in for LPIPS: mean absolute difference of what the metric is given."""

    def forward(self, a: Tensor, b: Tensor, normalize: bool) -> Tensor:
        assert normalize
        return (a - b).abs().mean()


def test_lpips_is_the_mean_over_images_after_clamping(pool):
    perceptual = Perceptual("alex", "ok", "", MeanDistance(), native=False)
    truth = truth_of(pool, 0, 1)
    rec = normalised(off_by(pool.images[:2], 0.1, 0.02))
    result = score(truth, rec, None, to_pixels, pool, perceptual)
    assert [one.lpips for one in result.images] == pytest.approx([0.1, 0.02], abs=1e-5)
    assert (result.lpips, result.lpips_status) == (pytest.approx(0.06, abs=1e-5), "ok")
    assert score(truth, None, None, to_pixels, pool, perceptual).lpips_status == "no-reconstruction"


def test_lpips_without_a_value_says_why():
    pool = pool_of(random_images(6))
    perceptual = Perceptual("alex", "ok", "", MeanDistance(), native=True)
    result = score(truth_of(pool, 0), normalised(pool.images[:1]), None, to_pixels, pool, perceptual)
    assert (result.lpips, result.lpips_status) == (None, "image-too-small")


def test_rows_go_into_a_table(pool):
    result = scored(pool, truth_of(pool, 0), off_by(pool.images[:1], 0.1), torch.tensor([0]))
    columns = ["mse", "psnr", "psnr_capped", "ssim", "ssim_variant", "lpips", "lpips_status", "clip_frac"]
    columns += ["label_true", "label_found", "label_correct", "identified", "psnr_blind", "excess_psnr"]
    assert set(columns) <= set(result.row())
    assert "images" not in result.row()
    assert {"position", "dataset_index", *columns} <= set(result.images[0].row())
    header, line = to_csv(columns, [result.row()]).splitlines()
    assert header == ",".join(columns)
    assert line.split(",")[1] == "20"
    assert line.split(",")[5:8] == ["", "off", "0"]


def test_inputs_are_left_alone(pool):
    truth = truth_of(pool, 0)
    rec = normalised(torch.full((1, 1, 8, 8), 3.0)).requires_grad_()
    before = truth.x.clone(), rec.detach().clone(), pool.images.clone()
    score(truth, rec, truth.y, to_pixels, pool, no_perceptual())
    assert all(map(torch.equal, before, (truth.x, rec.detach(), pool.images)))


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 3, 8, 8), (1, 1, 8, 9)])
def test_a_reconstruction_of_another_shape_is_refused(pool, shape):
    with pytest.raises(ValueError, match=r"the reconstruction is \["):
        scored(pool, truth_of(pool, 0), torch.zeros(shape))


def test_labels_must_belong_to_images(pool):
    with pytest.raises(ValueError, match="2 images and 1 labels"):
        scored(pool, truth_of(pool, 0, 1), pool.images[:2], torch.tensor([1]))


def test_a_pool_without_the_victim_is_refused(pool):
    foreign = Truth(normalised(pool.images[:1]), torch.tensor([0]), torch.tensor([7]), {}, None)
    with pytest.raises(RunError, match="lacks the victim's image 7"):
        scored(pool, foreign, pool.images[:1])


def test_a_pool_of_another_shape_is_refused(pool):
    other = pool_of(random_images(6, channels=3))
    with pytest.raises(RunError, match="the pool's images are"):
        scored(other, truth_of(pool, 0), pool.images[:1])
