"""BatchNorm that makes its running statistics as values, differentiable in the input, and changes nothing in place."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pflsec.core.errors import ModelError
from pflsec.core.network import Statistics

THEIRS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var")


class BatchNorm(nn.Module):
    """BatchNorm over the channels of [B, C] or [B, C, ...], the function of torch's for any number of dimensions.

    A layer is in evaluation mode, where it reads its running statistics, but inside the block of `training`: there it
    normalises by the batch's own mean and biased variance. With one value per channel these make every input zero.
    """

    seen: Statistics | None = None
    """Where new running statistics go: those that were read, by identity, and what follows them."""

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels)) if affine else None
        self.bias = nn.Parameter(torch.zeros(channels)) if affine else None
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def reset_parameters(self) -> None:
        """Set weights and statistics to where a new layer begins."""
        with torch.no_grad():
            for value, start in ((self.weight, 1), (self.bias, 0), (self.running_mean, 0), (self.running_var, 1)):
                if value is not None:
                    value.fill_(start)

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            return self._by_running_statistics(x)
        self._note(self.seen, x)
        return torch.batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps, False)

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        # By hand: torch's own lets no gradient through to the statistics.
        mean, var = self.running_mean.to(x.dtype), self.running_var.to(x.dtype)
        scale = (var + self.eps).rsqrt() if self.weight is None else self.weight * (var + self.eps).rsqrt()
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        along = (1, -1, *[1] * (x.dim() - 2))
        return torch.addcmul(shift.view(along), x, scale.view(along))

    def _note(self, seen: Statistics, x: Tensor) -> None:
        """Note the running statistics that follow, their variance unbiased where there is more than one value."""
        var, mean = torch.var_mean(x, [0, *range(2, x.dim())], correction=0)
        count = x.numel() // x.shape[1]
        unbiased = var * (count / max(1, count - 1))
        for old, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            seen[id(old)] = old, torch.lerp(old, new, self.momentum)


@contextmanager
def training(layers: Iterable[BatchNorm]) -> Iterator[Statistics]:
    """Put layers into training mode, and yield the running statistics that they find."""
    layers, seen = list(layers), {}
    for layer in layers:
        layer.seen = seen
    try:
        yield seen
    finally:
        for layer in layers:
            layer.seen = None


def replaced(module: nn.Module, name: str = "", made: dict[nn.Module, BatchNorm] | None = None) -> nn.Module:
    """Return the module with our layers where torch's stood, with the same values: the module itself, changed, or the layer
    that takes its place. Raises ModelError for layers that ours cannot stand for.

    made  layers replaced so far: one that stands in two places does so afterwards
    """
    made = {} if made is None else made
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        if module not in made:
            made[module] = _ours(module, name)
        return made[module]
    for key, child in module._modules.items():
        if child is not None:
            module._modules[key] = replaced(child, f"{name}.{key}" if name else key, made)
    return module


def _ours(theirs: nn.modules.batchnorm._BatchNorm, name: str) -> BatchNorm:
    said = f"layer '{name}' is {type(theirs).__name__}"
    remedy = "Use one of torch's own with running statistics and a momentum, or GroupNorm."
    if type(theirs) not in THEIRS:
        raise ModelError(f"{said}, which is not supported: it may do more than BatchNorm does. {remedy}")
    if theirs.running_mean is None or theirs.running_var is None:
        raise ModelError(
            f"{said} without running statistics, which is not supported: its predictions depend on what else is in a batch. "
            + remedy
        )
    if theirs.momentum is None:
        raise ModelError(
            f"{said} with momentum None, which is not supported: a cumulative mean needs a count of its own. {remedy}"
        )
    ours = BatchNorm(theirs.num_features, theirs.eps, theirs.momentum, theirs.affine)
    with torch.no_grad():
        for key in ("weight", "bias", *STATISTICS):
            if (value := getattr(ours, key)) is not None:
                value.copy_(getattr(theirs, key))
    return ours
