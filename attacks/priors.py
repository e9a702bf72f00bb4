"""What images look like before any message is seen."""

from torch import Tensor


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, across plus down (anisotropic), 0-d; x [B, C, H, W]."""
    across = (x[..., :, 1:] - x[..., :, :-1]).abs()
    down = (x[..., 1:, :] - x[..., :-1, :]).abs()
    return sum((d.mean() for d in (across, down) if d.numel()), start=x.new_zeros(()))
