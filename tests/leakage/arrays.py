"""Small images with known metrics, and a federation's pool to score against."""

import numpy as np
import torch
from torch import Tensor

from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.vault import Pool, Truth

MEAN, STD = 0.3, 0.25


def check_pair(channels: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a smooth image, and it with a fixed pattern added, both [channels, side, side] in [0, 1]."""
    c, i, j = np.meshgrid(np.arange(channels), np.arange(side), np.arange(side), indexing="ij")
    waves = 0.25 * np.sin(2 * np.pi * (i + 2 * c) / 9) + 0.25 * np.cos(2 * np.pi * (j - c) / 7)
    pattern = ((37 * i + 91 * j + 53 * c + 17) % 101) / 100 - 0.5
    return 0.5 + waves, np.clip(0.5 + waves + 0.3 * pattern, 0, 1)


def ramp_pair() -> tuple[np.ndarray, np.ndarray]:
    """Return a colour ramp and a noisy copy of it, both [3, 32, 32] in [0, 1]."""
    x, y = np.meshgrid(np.linspace(0, 1, 32), np.linspace(0, 1, 32))
    ramp = np.stack([x, y, (x + y) / 2], axis=-1)
    noisy = np.clip(ramp + 0.1 * np.random.default_rng(1).standard_normal(ramp.shape), 0, 1)
    return ramp.transpose(2, 0, 1), noisy.transpose(2, 0, 1)


def random_images(count: int, channels: int = 1, side: int = 8, seed: int = 0) -> Tensor:
    """Return float32 [count, channels, side, side], uniform in [0.1, 0.9]: room for noise on both sides."""
    rng = torch.Generator().manual_seed(seed)
    return 0.1 + 0.8 * torch.rand(count, channels, side, side, generator=rng)


def normalised(pixels: Tensor) -> Tensor:
    return (pixels - MEAN) / STD


def to_pixels(x: Tensor) -> Tensor:
    return x * STD + MEAN


def pool_of(images: Tensor) -> Pool:
    """Return a pool in which image i has dataset index 100 + i."""
    return Pool(images, torch.arange(len(images)) + 100, images.mean(dim=0))


def truth_of(pool: Pool, *positions: int) -> Truth:
    """Return the batch of these images of the pool; the label of an image is its position modulo 10."""
    where = torch.tensor(positions)
    return Truth(normalised(pool.images[where]), where % 10, pool.dataset_index[where], {}, 0.0)


def no_perceptual() -> Perceptual:
    return Perceptual.find("none", None)
