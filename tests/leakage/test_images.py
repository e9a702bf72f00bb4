"""MSE, PSNR and SSIM against published constants, scikit-image, and values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from pflsec.leakage.images import PSNR_CAP, capped, mse, psnr, ssim
from tests.leakage.arrays import check_pair, ramp_pair

# channels, side, MSE, PSNR, SSIM with the 7x7 uniform window (scikit-image 0.26.0)
CHECKS = [
    (1, 28, 0.00733371, 21.346763, 0.942092),
    (3, 32, 0.00728838, 21.373690, 0.942050),
    (1, 8, 0.00719316, 21.430804, 0.941746),
    (3, 8, 0.00720919, 21.421138, 0.941295),
    (3, 64, 0.00727761, 21.380110, 0.942065),
]


@pytest.mark.parametrize(("channels", "side", "error", "decibel", "similarity"), CHECKS)
def test_check_arrays_give_the_stated_values(channels, side, error, decibel, similarity):
    truth, rec = check_pair(channels, side)
    assert mse(truth, rec) == pytest.approx(error, abs=1e-8)
    assert psnr(truth, rec) == pytest.approx(decibel, abs=1e-5)
    value, variant = ssim(truth, rec)
    assert value == pytest.approx(similarity, abs=1e-5)
    assert variant == "skimage-uniform7"


@pytest.mark.parametrize(
    ("channels", "side", "window", "value"),
    [(1, 28, 5, 0.922547), (3, 32, 3, 0.824416), (1, 8, 5, 0.923676), (3, 8, 3, 0.840145)],
)
def test_narrow_windows_are_other_metrics(channels, side, window, value):
    """The constants for windows 5 and 3 hold for scikit-image's settings, and differ from the default's."""
    truth, rec = (image.transpose(1, 2, 0) for image in check_pair(channels, side))
    got = structural_similarity(truth, rec, win_size=window, data_range=1.0, channel_axis=-1)
    assert got == pytest.approx(value, abs=1e-5)
    assert abs(float(np.asarray(got)) - 0.942) > 0.01


def test_noisy_ramp_has_the_ssim_of_data_range_one():
    """With range 2 it would be 0.521, with range 255 0.9998, with Wang's Gaussian window 0.334."""
    truth, rec = ramp_pair()
    assert psnr(truth, rec) == pytest.approx(20.454, abs=1e-3)
    value, variant = ssim(truth, rec)
    assert value == pytest.approx(0.44394, abs=1e-5)
    assert variant == "skimage-uniform7"


def test_psnr_by_hand_and_by_scikit_image():
    """All pixels off by 0.1: MSE 0.01, 20 dB, for one channel as for three."""
    for channels in (1, 3):
        truth = np.full((channels, 5, 4), 0.3)
        assert psnr(truth, truth + 0.1) == pytest.approx(20.0, abs=1e-9)
    rng = np.random.default_rng(3)
    truth, rec = rng.random((2, 3, 9, 7))
    assert psnr(truth, rec) == pytest.approx(peak_signal_noise_ratio(truth, rec, data_range=1.0), abs=1e-6)


def test_rounding_to_eight_bits_costs_all_above_59_decibel():
    truth = np.random.default_rng(0).random((3, 64, 64))
    assert psnr(truth, np.round(truth * 255) / 255) == pytest.approx(58.92, abs=0.05)


def test_equal_images():
    truth, _ = check_pair(3, 32)
    assert mse(truth, truth) == 0
    assert psnr(truth, truth) == math.inf
    assert capped(psnr(truth, truth)) == PSNR_CAP == 100.0
    assert ssim(truth, truth)[0] == pytest.approx(1.0, abs=1e-12)


def test_black_images():
    black, nearly = np.zeros((1, 28, 28)), np.full((1, 28, 28), 1e-4)
    assert psnr(black, black) == math.inf
    assert psnr(black, nearly) == pytest.approx(80.0)
    assert ssim(black, black)[0] == 1.0
    value, _ = ssim(black, nearly)
    assert value is not None
    assert math.isfinite(value)


@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        ((1, 28, 28), "skimage-uniform7"),
        ((3, 7, 7), "skimage-uniform7"),
        ((3, 6, 6), "skimage-uniform5"),
        ((1, 5, 40), "skimage-uniform5"),
        ((3, 4, 4), "skimage-uniform3"),
        ((1, 3, 3), "skimage-uniform3"),
    ],
)
def test_small_images_get_the_largest_odd_window(shape, variant):
    truth, rec = np.random.default_rng(0).random((2, *shape))
    value, name = ssim(truth, rec)
    assert name == variant
    window = int(name[-1])
    again = structural_similarity(
        truth.transpose(1, 2, 0), rec.transpose(1, 2, 0), win_size=window, data_range=1.0, channel_axis=-1
    )
    assert value == pytest.approx(again, abs=1e-12)


@pytest.mark.parametrize("shape", [(1, 2, 2), (3, 1, 9), (1, 2, 28)])
def test_images_below_three_pixels_have_no_ssim_but_a_psnr(shape):
    truth, rec = np.random.default_rng(0).random((2, *shape))
    assert ssim(truth, rec) == (None, "image-too-small")
    assert math.isfinite(psnr(truth, rec))


def test_tensors_and_arrays_of_any_float_give_the_same():
    truth, rec = check_pair(3, 8)
    for dtype in (torch.float64, torch.float32):
        a, b = torch.tensor(truth, dtype=dtype, requires_grad=True), torch.tensor(rec, dtype=dtype)
        assert psnr(a, b) == pytest.approx(psnr(truth, rec), abs=1e-5)
        assert ssim(a, b)[0] == pytest.approx(ssim(truth, rec)[0], abs=1e-6)


@pytest.mark.parametrize("metric", [mse, psnr, ssim])
@pytest.mark.parametrize("value", [-0.001, 1.001, 255.0, math.nan, math.inf])
def test_other_scales_are_refused(metric, value):
    truth, rec = check_pair(1, 8)
    rec[0, 3, 3] = value
    with pytest.raises(ValueError, match=r"reconstruction .*\[0, 1\]"):
        metric(truth, rec)
    with pytest.raises(ValueError, match=r"truth .*\[0, 1\]"):
        metric(rec, truth)


@pytest.mark.parametrize(("a", "b"), [((1, 8, 8), (3, 8, 8)), ((8, 8), (8, 8)), ((1, 0, 8), (1, 0, 8))])
def test_other_shapes_are_refused(a, b):
    with pytest.raises(ValueError, match="one shape"):
        psnr(np.zeros(a), np.zeros(b))
