"""Soteria: of the gradient of one linear layer, the columns are zeroed whose inputs say most about the image.

Source   Sun et al., CVPR 2021, arXiv 2012.06043, section 4. Its code zeroes columns of the last layer; so does the default.
Seam     step, without an account
Claims   none. The paper bounds how far the features of its own attacker's image are from the true ones: attackers who leave
         the layer out of their comparison are not bounded by it (Balunovic et al., ICLR 2022, arXiv 2111.04706).
Knob     prune
Limits   prune = 0: the identity, bit for bit. An input r_j of the layer is judged by |r_j| / |d r_j/dx|, the largest are
         zeroed; batches by the mean of it over their images, where the paper has one image. (Its code takes the reciprocal,
         which is infinite at r_j = 0; for one image the order is the same.) Every step on data is treated, those of models
         that stay with the client too; penalties, biases and all other layers pass, and so do prototypes, logits,
         statistics and counts. Costs a backward pass for each input of the layer at every step. An attacker who knows of it
         takes that layer's weight as it was sent, so that it says nothing, and compares the rest: where little else is sent,
         the naive comparison may be the better one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pflsec.core.config import Config, between, option
from pflsec.core.defense import ShapingDefense
from pflsec.core.errors import ConfigError, PrivacyError
from pflsec.core.items import Items
from pflsec.core.local import LossPerExample
from pflsec.core.network import Net

AT_ONCE = 2**24  # numbers that the slopes of a few inputs of the layer may take


class SoteriaConfig(Config):
    prune: float = between(
        0, 1, default=0.4, about="share of the layer's columns that are zeroed; 1: that weight stands still"
    )
    layer: str | None = option(
        default=None, about="prefix of the linear layer's parameters, such as body.fc1; none: the last layer"
    )


class Soteria(ShapingDefense[SoteriaConfig]):
    key = "soteria"
    Config = SoteriaConfig

    def at(self, net: Net) -> "Prepared | None":
        layer = self.cfg.layer or net.last_layer
        if layer is None:
            raise ConfigError("soteria: the network ends in no linear layer; name one, e.g. soteria:layer=body.fc1.")
        shape = net.shapes.get(f"{layer}.weight", ())
        if len(shape) != 2:
            two = [
                name.removesuffix(".weight")
                for name, s in net.shapes.items()
                if name.endswith(".weight") and len(s) == 2
            ]
            raise ConfigError(f"soteria: the network has no linear layer '{layer}'. It has: {', '.join(two)}.")
        count = int(self.cfg.prune * shape[1] + 1e-9)
        return Prepared(self.cfg, net, layer, count) if count else None


class Prepared(Soteria):
    """Soteria at one layer of a network, with the number of columns that are zeroed."""

    def __init__(self, cfg: SoteriaConfig, net: Net, layer: str, count: int):
        super().__init__(cfg)
        self.net, self.layer, self.count = net, layer, count

    def gradient(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = x.detach().requires_grad_()
        with self.net.reading(self.layer) as read:
            loss = on(params, x, y).mean()
        if not params:  # a network that is cut at its first layer has an empty body
            return loss.detach(), []
        plain = torch.autograd.grad(loss, list(params.values()), retain_graph=True, allow_unused=True)
        found = {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(params.items(), plain, strict=True)}
        for name in filter(self._is_weight, params):
            reads = read[id(params[name])][1] if id(params[name]) in read else []
            if (ratio := sensitivity(reads, x)) is not None:
                found[name] = found[name].index_fill(1, largest(ratio, self.count), 0)
        return loss.detach(), list(found.values())

    def adapt(self, guess: Items, seen: Items) -> Items:
        return guess | {k: seen[k].to(v.dtype) for k, v in guess.items() if k in seen and self._is_weight(k)}

    def why_not(self, net: Net, x: Tensor, sent: Callable[[ShapingDefense[Any], Tensor], Items]) -> str | None:
        if not x.is_floating_point():
            return "its inputs are texts, in which no feature has a slope"
        if net.buffers:
            return "BatchNorm ties the examples of a batch together, so that no feature is of one image alone"
        if self.layer not in net.linear_inputs(net.fresh("soteria"), x):
            return f"{self.layer} reads more than one vector an image"
        whole = Prepared(self.cfg, net, self.layer, net.shapes[f"{self.layer}.weight"][1])
        up, other = sent(whole, x), sent(whole, 1 - x)
        weights = [name for name in up if self._is_weight(name)]
        if not weights:
            return f"{self.layer}.weight is not sent"
        if moved := next((name for name in weights if not torch.equal(up[name], other[name])), None):
            return f"{moved} says something of the data by another way than the columns of its gradient"
        return None

    def _is_weight(self, name: str) -> bool:
        """Return whether an item holds the layer's weight, under whatever prefix."""
        return f".{name}".endswith(f".{self.layer}.weight")


def sensitivity(reads: Sequence[Tensor], x: Tensor) -> Tensor | None:
    """Return the mean over the images of |r_j| / |d r_j/dx|, [d]; None where no input of the layer depends on the images.

    reads  inputs of the layer in each pass, [B, d]; those that do not depend on x [B, ...] do not count
    An input that is zero counts nothing, one that is the same for all images infinitely much.
    """
    pairs = [(r.detach(), slopes(r, x)) for r in reads]
    found = [torch.where(r == 0, 0.0, r.abs() / slope) for r, slope in pairs if slope is not None]
    return torch.cat(found).mean(0) if found else None


def slopes(r: Tensor, x: Tensor) -> Tensor | None:
    """Return |d r_ij / d x_i| [B, d] for an input r [B, d] of the layer, or None where it does not depend on x."""
    if not r.requires_grad or torch.autograd.grad(r.sum(), x, retain_graph=True, allow_unused=True)[0] is None:
        return None
    if r.dim() != 2 or len(r) != len(x):
        raise PrivacyError(f"the layer reads {list(r.shape)} for a batch of {len(x)}: not one vector an image")
    units = torch.eye(r.shape[1], dtype=r.dtype)
    parts = [
        torch.autograd.grad(r, x, some[:, None].expand(-1, len(x), -1), retain_graph=True, is_grads_batched=True)[0]
        .flatten(2)
        .norm(dim=2)
        for some in units.split(max(1, AT_ONCE // x.numel()))
    ]
    return torch.cat(parts).T


def largest(values: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest values; of equals the first."""
    return values.sort(descending=True, stable=True).indices[:count]
