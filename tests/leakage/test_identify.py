"""Identification of the victim among candidates, with duplicates and near ones."""

import pytest
import torch

from pflsec.leakage.identify import identified
from pflsec.leakage.vault import Pool
from tests.leakage.arrays import pool_of, random_images


def test_the_nearest_image_by_pixel_distance_decides():
    pool = pool_of(random_images(300))  # more than one chunk of candidates
    for position in (0, 127, 128, 299):
        truth = pool.images[position]
        near = (truth + 0.05 * torch.randn(truth.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)
        assert identified(near, pool, 100 + position, truth)
        assert not identified(near, pool, 100 + (position + 1) % 300, pool.images[(position + 1) % 300])


def test_a_noise_image_identifies_about_one_in_the_pool():
    pool = pool_of(random_images(50))
    guesses = random_images(200, seed=7)
    hits = [identified(guess, pool, 100 + i % 50, pool.images[i % 50]) for i, guess in enumerate(guesses)]
    assert sum(hits) <= 16  # 4 expected


def test_a_duplicate_counts_as_the_victim():
    """The same picture stored twice, off by a float's rounding: whichever comes first is a hit."""
    images = random_images(5)
    images[1] = images[3] + 1e-5
    pool = pool_of(images)
    assert identified(images[1], pool, 103, images[3])
    images[1] = images[3] + 0.01  # distance 0.08: another picture
    assert not identified(images[1], pool_of(images), 103, images[3])


def test_an_augmented_victim_is_found_under_its_stored_image():
    """Trained on mirrored: the reconstruction lies nearest to the stored image's duplicate, not to the truth."""
    images = random_images(4)
    images[1] = images[2]
    assert identified(images[2], pool_of(images), 102, images[2].flip(-1))


def test_the_index_is_the_datasets_not_the_position():
    images = random_images(3)
    pool = Pool(images, torch.tensor([2, 0, 1]), images.mean(0))
    assert identified(images[0], pool, 2, images[0])
    assert not identified(images[0], pool, 0, images[1])


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match="the others"):
        identified(torch.zeros(3, 8, 8), pool_of(random_images(3)), 100, torch.zeros(3, 8, 8))
