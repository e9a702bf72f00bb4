"""Identification: does the reconstruction point to the victim among all candidates? Needs no threshold."""

import torch
from torch import Tensor

from pflsec.leakage.vault import Pool

DUPLICATE = 1e-3  # pixel L2; images this close to the truth are the same picture stored twice
CHUNK = 128  # candidates in float64 at a time


def identified(rec: Tensor, pool: Pool, true_index: int, truth_pixels: Tensor) -> bool:
    """Return whether the pool's nearest image to rec [C, H, W], by pixel L2, is the victim or its duplicate.

    Both images lie in [0, 1]. By chance this happens for 1 in P reconstructions. Among candidates at exactly
    the same distance the first of the pool counts. Raises ValueError when shapes differ.
    """
    nearest = pool.images[int(_distances(rec, pool.images).argmin())]
    stored = pool.images[pool.dataset_index == true_index]  # differs from the truth if that was augmented
    victim = torch.cat([stored.double(), truth_pixels.double()[None]])
    return float(_distances(nearest, victim).min()) <= DUPLICATE


def _distances(image: Tensor, others: Tensor) -> Tensor:
    """Return the pixel L2 distances, float64 [P], of image [C, H, W] to the others [P, C, H, W]."""
    if image.shape != others.shape[1:]:
        raise ValueError(f"the image is {list(image.shape)}, the others are {list(others.shape[1:])}")
    target = image.double()
    return torch.cat([torch.linalg.vector_norm((part - target).flatten(1), dim=1) for part in others.split(CHUNK)])
