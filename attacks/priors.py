"""What images look like before any message is seen."""

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from pflsec.core.errors import NotApplicable
from pflsec.core.items import Items, cast, floating
from pflsec.core.network import Net
from pflsec.wire.capture import Capture

SMOOTH = 1e-8  # under the root, so that flat images have a gradient
FIRST = 10.0  # weight of the first BatchNorm layer, before which little is lost


def total_variation(x: Tensor) -> Tensor:
    """Return the mean absolute difference of neighbouring pixels, across plus down (anisotropic), 0-d; x [B, C, H, W]."""
    across = (x[..., :, 1:] - x[..., :, :-1]).abs()
    down = (x[..., 1:, :] - x[..., :-1, :]).abs()
    return sum((d.mean() for d in (across, down) if d.numel()), start=x.new_zeros(()))


def isotropic_variation(x: Tensor) -> Tensor:
    """Return the mean length of the pixels' slopes, 0-d, over all channels of x [B, C, H, W] and over the difference of each
    two of them ("double opponents": edges of natural images are alike in all colours)."""
    pairs = [x[:, i : i + 1] - x[:, j : j + 1] for i, j in combinations(range(x.shape[1]), 2)]
    x = torch.cat([x, *pairs], 1)
    across = x[..., :-1, 1:] - x[..., :-1, :-1]
    down = x[..., 1:, :-1] - x[..., :-1, :-1]
    return (across.square() + down.square() + SMOOTH).sqrt().mean() if across.numel() else x.new_zeros(())


def known_start(
    cap: Capture, rng: torch.Generator, look: Callable[[Net, Items, Tensor], Tensor] | None = None
) -> Items | None:
    """Return the network with which local work begins, float64, if what `look` sees of it on a noisy image is the same
    whatever the client keeps to itself; None if not, or if no whole network is trained."""
    known = cast(cap.known or {}, torch.float64)
    some = cast(cap.newcomer(rng), torch.float64)
    other = {k: v + torch.rand(v.shape, generator=rng, dtype=v.dtype) for k, v in floating(some).items()}
    x = cap.input.noise(2, rng, torch.float64)
    try:
        first, second = (cap.began(some | private | known) for private in ({}, other))
    except NotApplicable:
        return None
    look = look or (lambda net, items, x: net.features(items, x))
    return first if torch.equal(look(cap.net, first, x), look(cap.net, second, x)) else None


def batchnorm(cap: Capture, rng: torch.Generator) -> tuple[Callable[[Tensor], Tensor] | None, str]:
    """Return how far images [B, C, H, W] move running statistics from where they are held to move them, 0-d, and a word on
    what these are; (None, why) where none are known.

    Sums over the layers the distances of means and of variances, the first layer ten times: each is the layer's momentum
    (0.1, as a rule) times how far its statistics on the images are from the client's own batch where statistics were sent
    after one local step, or from the running ones.
    """
    names = [name for name in cap.net.shapes if name in cap.net.buffers]
    if not names:
        return None, "the network has no running statistics: that term is left out"
    if (items := known_start(cap, rng)) is None:
        return None, "the client keeps its body or its running statistics to itself: that term is left out"
    sent = cap.record.steps == 1 and all(name in cap.record.up for name in names)
    goal = {name: (cap.record.up[name] if sent else items[name]).double() for name in names}
    weights = [FIRST if name.rpartition(".")[0] == names[0].rpartition(".")[0] else 1.0 for name in names]

    def distance(x: Tensor) -> Tensor:
        now = cast(items, x.dtype)
        with cap.net.training() as seen:
            cap.net.logits(now, x)
        apart = [(seen[id(now[name])][1] - goal[name].to(x.dtype)).square().sum() for name in names]
        return torch.stack([w * (d + SMOOTH**2).sqrt() for w, d in zip(weights, apart, strict=True)]).sum()

    return distance, "statistics of the batch" if sent else "running statistics"
