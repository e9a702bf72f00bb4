"""What the network's inputs look like: images, with the normalisation between pixels and network, or texts of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from pflsec.core.errors import RunError

LARGEST = 2**16
"""No side of an image, and no number of classes or channels, is larger."""
MOST_WORDS = 2**24
"""No vocabulary is larger."""
PAD, UNKNOWN, SPECIALS = 0, 1, 2
"""Token numbers of padding and of words outside the vocabulary, and how many such numbers there are."""


def example(shape: tuple[int, ...], vocabulary: int | None = None) -> Tensor:
    """Return one input as a network may get it, always the same: an image [1, C, H, W], or tokens int64 [1, T]."""
    if vocabulary is None:
        return torch.linspace(-1, 1, torch.Size(shape).numel()).reshape(1, *shape)
    return (torch.arange(shape[0]) % (vocabulary - 1) + 1)[None]


@dataclass(frozen=True)
class InputSpec:
    """Images of `shape` (C, H, W) with pixels in [0, 1]; the network sees (pixel - mean) / std, channel by channel.

    With a vocabulary, texts of `shape` (T,): T token numbers below `vocabulary`, 0 for padding; mean and std are empty. The
    network sees the tokens themselves, int64 [B, T], or soft ones, [B, T, vocabulary]: a weight for each word in each place,
    through which a gradient can pass.
    """

    shape: tuple[int, ...]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    vocabulary: int | None = None

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return what the network sees for pixels [..., C, H, W] in [0, 1]; tokens are seen as they are."""
        if self.vocabulary is not None:
            return pixels
        return (pixels - self._column(self.mean, pixels)) / self._column(self.std, pixels)

    def pixels(self, x: Tensor) -> Tensor:
        """Return the pixels of network inputs [..., C, H, W]; values outside [0, 1] are not clamped. Tokens stay tokens."""
        if self.vocabulary is not None:
            return x
        return x * self._column(self.std, x) + self._column(self.mean, x)

    def box(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest and the highest network input of each channel, two tensors [C, 1, 1] in the dtype of `like`; 0 and
        1 for soft tokens."""
        if self.vocabulary is not None:
            return torch.zeros_like(like), torch.ones_like(like)
        mean, std = self._column(self.mean, like), self._column(self.std, like)
        return (0 - mean) / std, (1 - mean) / std

    def blank(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return inputs of zeros through which a gradient can pass: [count, C, H, W], or soft tokens [count, T, vocabulary]."""
        return torch.zeros(count, *self._float_shape, dtype=dtype)

    def noise(self, count: int, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
        """Return inputs from N(0, 1), in the form of `blank`; soft tokens are the softmax of such numbers."""
        drawn = torch.randn(count, *self._float_shape, generator=rng, dtype=dtype)
        return drawn if self.vocabulary is None else drawn.softmax(-1)

    def as_dict(self) -> dict[str, Any]:
        """Return the plain form for a JSON file."""
        plain = {"shape": list(self.shape), "classes": self.classes, "mean": list(self.mean), "std": list(self.std)}
        return plain if self.vocabulary is None else plain | {"vocabulary": self.vocabulary}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "InputSpec":
        """Return the spec from its plain form. Raises RunError when that is damaged."""
        try:
            shape = tuple(_number(n, int) for n in values["shape"])
            mean, std = (tuple(float(_number(v, int, float)) for v in values[name]) for name in ("mean", "std"))
            words = values.get("vocabulary")
            vocabulary = None if words is None else _number(words, int)
            spec = InputSpec(shape, _number(values["classes"], int), mean, std, vocabulary)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"the description of the inputs is damaged: {error!r}.") from error
        axes, channels = (3, shape[:1]) if vocabulary is None else (1, (0,))
        sizes = len(shape) == axes and (len(mean),) == (len(std),) == channels and 2 <= spec.classes <= LARGEST
        sizes = sizes and min(shape) >= 1 and max(shape) <= LARGEST
        sizes = sizes and (vocabulary is None or SPECIALS < vocabulary <= MOST_WORDS)
        if not sizes or not all(map(isfinite, mean)) or not all(0 < s < inf for s in std):
            raise RunError(f"the description of the inputs is damaged: {spec}.")
        return spec

    @property
    def _float_shape(self) -> tuple[int, ...]:
        return self.shape if self.vocabulary is None else (*self.shape, self.vocabulary)

    @staticmethod
    def _column(values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


def _number(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:  # true is no number
        raise TypeError(f"{value!r} is no number")
    return value
