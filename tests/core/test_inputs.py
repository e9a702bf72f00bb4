"""Inputs: one normalisation, invertible, and refused when it is damaged."""

from typing import Any

import pytest
import torch

from pflsec.core.errors import RunError
from pflsec.core.inputs import InputSpec

SPEC = InputSpec((3, 2, 2), 10, (0.1, 0.2, 0.3), (0.5, 0.25, 1.0))


def test_normalising_is_channel_by_channel_and_comes_back():
    """(0.6 - 0.1)/0.5 = 1, (0.6 - 0.2)/0.25 = 1.6, (0.6 - 0.3)/1 = 0.3."""
    pixels = torch.full((2, 3, 2, 2), 0.6, dtype=torch.float64)
    x = SPEC.normalise(pixels)
    assert x[0, :, 0, 0].tolist() == pytest.approx([1.0, 1.6, 0.3])
    assert torch.allclose(SPEC.pixels(x), pixels, atol=1e-15)
    assert torch.allclose(SPEC.pixels(x[0]), pixels[0], atol=1e-15)


def test_the_box_is_where_pixels_can_be():
    low, high = SPEC.box(torch.zeros((), dtype=torch.float64))
    assert torch.allclose(SPEC.pixels(low.expand(3, 2, 2)), torch.zeros(3, 2, 2, dtype=torch.float64), atol=1e-15)
    assert torch.allclose(SPEC.pixels(high.expand(3, 2, 2)), torch.ones(3, 2, 2, dtype=torch.float64), atol=1e-15)
    assert low.dtype == torch.float64


def test_the_plain_form_comes_back():
    assert InputSpec.from_dict(SPEC.as_dict()) == SPEC


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3, 2]},
        {"shape": [0, 2, 2], "mean": [], "std": []},
        {"shape": "abc"},
        {"classes": 1},
        {"classes": None},
        {"mean": [0.1]},
        {"std": [1, 1, 0]},
        {"std": [1, 1, -1]},
        {"std": [1, 1, float("nan")]},
        {"mean": [0, 0, float("inf")]},
        {"mean": 3},
        {"classes": float("inf")},
    ],
    ids=str,
)
def test_a_damaged_description_is_refused(change: dict[str, Any]):
    with pytest.raises(RunError, match="description of the inputs is damaged"):
        InputSpec.from_dict(SPEC.as_dict() | change)


@pytest.mark.parametrize("missing", ["shape", "classes", "mean", "std"])
def test_an_incomplete_description_is_refused(missing: str):
    with pytest.raises(RunError, match=missing):
        InputSpec.from_dict({k: v for k, v in SPEC.as_dict().items() if k != missing})
