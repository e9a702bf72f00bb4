"""Metrics of one image against another: MSE, PSNR, SSIM. Images are [C, H, W] in [0, 1]; work is in float64.

Values outside [0, 1] are refused, never rescaled: the scale is converted once, in `pflsec.leakage.score`.
"""

import math
from typing import Any

import numpy as np
from torch import Tensor

Image = np.ndarray | Tensor

PSNR_CAP = 100.0  # dB; stands for "exact" in averages, which an infinite PSNR would swallow
SSIM_WINDOW = 7
TOO_SMALL = "image-too-small"


def as_array(image: Image) -> np.ndarray:
    """Return the values as a float64 numpy array, on the CPU and cut off from any graph."""
    values = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    return np.asarray(values, dtype=np.float64)


def image_pair(truth: Image, rec: Image) -> tuple[np.ndarray, np.ndarray]:
    """Return both as float64 [C, H, W]; ValueError unless they are of one non-empty shape and in [0, 1]."""
    pair = as_array(truth), as_array(rec)
    if pair[0].shape != pair[1].shape or pair[0].ndim != 3 or not pair[0].size:
        shapes = f"{pair[0].shape} and {pair[1].shape}"
        raise ValueError(f"two images [C, H, W] of one shape are needed; got {shapes}")
    for name, values in zip(("truth", "reconstruction"), pair, strict=True):
        if not ((values >= 0) & (values <= 1)).all():  # written so that a NaN fails too
            low, high = values.min(), values.max()
            raise ValueError(f"the {name} runs from {low:.4g} to {high:.4g}; pixels must lie in [0, 1]")
    return pair


def mse(truth: Image, rec: Image) -> float:
    """Return the mean squared error over all C*H*W values, in [0, 1]: channels are averaged too."""
    a, b = image_pair(truth, rec)
    return float(np.mean((a - b) ** 2))


def psnr(truth: Image, rec: Image) -> float:
    """Return 10 log10(1 / MSE) in dB, for data range 1; inf when the images are equal.

    Rounding to 8 bits already costs all above 58.9 dB on average: higher values all mean "exact".
    """
    error = mse(truth, rec)
    return -10 * math.log10(error) if error > 0 else math.inf


def capped(decibel: float) -> float:
    """Return the PSNR, at most PSNR_CAP."""
    return min(decibel, PSNR_CAP)


def ssim(truth: Image, rec: Image) -> tuple[float | None, str]:
    """Return the structural similarity in [-1, 1] and the name of its variant; 1 when the images are equal.

    Wang et al., IEEE TIP 2004, as scikit-image computes it: uniform 7x7 window, K1 0.01, K2 0.03, sample
    covariance, data range 1, mean over channels. An image with a side below 7 gets the largest odd window
    that fits, which the name says ("skimage-uniform5"); variants are not comparable. Below 3 there is no
    value: (None, "image-too-small").
    """
    a, b = image_pair(truth, rec)
    side = min(a.shape[1:])
    window = min(SSIM_WINDOW, side - 1 + side % 2)
    if window < 3:
        return None, TOO_SMALL
    from skimage.metrics import structural_similarity

    value: Any = structural_similarity(
        np.moveaxis(a, 0, -1), np.moveaxis(b, 0, -1), win_size=window, data_range=1.0, channel_axis=-1
    )
    return float(value), f"skimage-uniform{window}"
