"""Cases T8: metrics of images. Most are held in tests/leakage already: see README.md."""

from typing import Any

import numpy as np
import pytest
from skimage.metrics import structural_similarity

from pflsec.leakage.images import psnr, ssim
from pflsec.leakage.perceptual import Perceptual


def fixture() -> tuple[np.ndarray, np.ndarray]:
    """Return fixture F1 as it was reported: channels last, drawn in that order."""
    x, y = np.meshgrid(np.linspace(0, 1, 32), np.linspace(0, 1, 32))
    g = np.stack([x, y, (x + y) / 2], axis=-1)
    return g, np.clip(g + 0.1 * np.random.default_rng(1).standard_normal(g.shape), 0, 1)


def test_u088_the_stated_setting_gives_the_stated_value():
    """The same pair has other values under other settings, which is why the name of the variant stands beside it."""
    g, n = fixture()
    value, variant = ssim(*(image.transpose(2, 0, 1) for image in (g, n)))
    assert (round(value or 0, 4), variant) == (0.4439, "skimage-uniform7")
    wang: dict[str, Any] = {
        "data_range": 1, "gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False
    }  # fmt: skip
    others: list[tuple[dict[str, Any], float]] = [({"data_range": 2}, 0.5210), (wang, 0.3342)]
    for settings, other in others:
        assert structural_similarity(g, n, channel_axis=-1, **settings) == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("shape", [(1, 6, 6), (3, 6, 6), (1, 28, 28), (3, 32, 32), (1, 1, 1), (4, 5, 5)])
def test_u089_every_shape_has_a_value_or_none_with_the_reason(shape: tuple[int, int, int]):
    truth, rec = np.random.default_rng(0).random((2, *shape))
    value, variant = ssim(truth, rec)
    assert (value is None) == (variant == "image-too-small") == (min(shape[1:]) < 3)
    assert np.isfinite(psnr(truth, rec))
    off = Perceptual.find("none", None)
    assert off(truth, rec) is None
    assert off.reason(shape) == "off"
