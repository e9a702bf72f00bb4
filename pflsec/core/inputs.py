"""What the network's inputs look like: shape, number of classes, and the normalisation between pixels and network."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from pflsec.core.errors import RunError

LARGEST = 2**16
"""No side of an image, and no number of classes or channels, is larger."""


@dataclass(frozen=True)
class InputSpec:
    """Images of `shape` (C, H, W) with pixels in [0, 1]; the network sees (pixel - mean) / std, channel by channel."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Return what the network sees for pixels [..., C, H, W] in [0, 1]."""
        return (pixels - self._column(self.mean, pixels)) / self._column(self.std, pixels)

    def pixels(self, x: Tensor) -> Tensor:
        """Return the pixels of network inputs [..., C, H, W]; values outside [0, 1] are not clamped."""
        return x * self._column(self.std, x) + self._column(self.mean, x)

    def box(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lowest and the highest network input of each channel, two tensors [C, 1, 1] in the dtype of `like`."""
        mean, std = self._column(self.mean, like), self._column(self.std, like)
        return (0 - mean) / std, (1 - mean) / std

    def as_dict(self) -> dict[str, Any]:
        """Return the plain form for a JSON file."""
        return {"shape": list(self.shape), "classes": self.classes, "mean": list(self.mean), "std": list(self.std)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "InputSpec":
        """Return the spec from its plain form. Raises RunError when that is damaged."""
        try:
            channels, height, width = (_number(n, int) for n in values["shape"])
            mean, std = (tuple(float(_number(v, int, float)) for v in values[name]) for name in ("mean", "std"))
            spec = InputSpec((channels, height, width), _number(values["classes"], int), mean, std)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunError(f"the description of the inputs is damaged: {error!r}.") from error
        sizes = len(mean) == len(std) == channels and min(spec.shape) >= 1 and 2 <= spec.classes <= LARGEST
        sizes = sizes and max(spec.shape) <= LARGEST
        if not sizes or not all(map(isfinite, mean)) or not all(0 < s < inf for s in std):
            raise RunError(f"the description of the inputs is damaged: {spec}.")
        return spec

    @staticmethod
    def _column(values: tuple[float, ...], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None, None]


def _number(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:  # true is no number
        raise TypeError(f"{value!r} is no number")
    return value
