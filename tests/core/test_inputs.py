"""Inputs: one normalisation, invertible, and refused when it is damaged."""

from typing import Any

import pytest
import torch

from pflsec.core.errors import RunError
from pflsec.core.inputs import InputSpec, example

SPEC = InputSpec((3, 2, 2), 10, (0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
TEXT = InputSpec((5,), 4, (), (), vocabulary=7)


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
    assert InputSpec.from_dict(TEXT.as_dict()) == TEXT
    assert "vocabulary" not in SPEC.as_dict()


@pytest.mark.parametrize(
    "change", [{"vocabulary": 2}, {"vocabulary": "many"}, {"shape": [5, 5, 5]}, {"mean": [0.5]}, {"shape": []}], ids=str
)
def test_a_damaged_description_of_texts_is_refused(change: dict[str, Any]):
    with pytest.raises(RunError, match="description of the inputs is damaged"):
        InputSpec.from_dict(TEXT.as_dict() | change)


def test_tokens_are_seen_as_they_are():
    tokens = torch.tensor([[3, 1, 0, 0, 0]])
    assert TEXT.normalise(tokens) is tokens
    assert TEXT.pixels(tokens) is tokens


def test_inputs_for_gradients_are_images_or_soft_tokens():
    rng = torch.Generator().manual_seed(0)
    for spec, shape in ((SPEC, (2, 3, 2, 2)), (TEXT, (2, 5, 7))):
        assert spec.blank(2, torch.float64).shape == spec.noise(2, rng, torch.float64).shape == shape
        assert not spec.blank(2, torch.float64).any()
    assert torch.allclose(TEXT.noise(2, rng, torch.float64).sum(-1), torch.ones(2, 5, dtype=torch.float64))
    torch.manual_seed(3)
    assert torch.equal(SPEC.noise(2, torch.Generator().manual_seed(3), torch.float32), torch.randn(2, 3, 2, 2))


def test_the_example_of_a_text_has_no_padding_and_no_foreign_word():
    assert example((8,), 7).tolist() == [[1, 2, 3, 4, 5, 6, 1, 2]]
    assert example((3, 2, 2)).shape == (1, 3, 2, 2)


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
