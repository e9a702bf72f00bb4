"""Imprint: send a first layer whose rows differ in their threshold alone, and read images off differences of its gradient.

Source   Fowl, Geiping, Czaja, Goldblum, Goldstein, ICLR 2022, arXiv 2110.13057 (Robbing the Fed).
Needs    the choice of the downlink; a linear layer with bias on the flattened input, ReLU behind it, both layers sent.
Solves   x = (dW_j - dW_j+1) / (db_j - db_j+1) for every row j whose bin holds one image: exact, no search
Method   Every row measures the same, h = w x, and fires above its own threshold, a quantile of what h is expected to be;
         all columns behind the layer are equal, so that an image adds the same to each row that it fires.
Limits   Two images in one bin come out as one mixture. Several local steps move the thresholds: approximate. Rows of a sum
         over clients are sums of rows: aggregation hides nothing. Convolutional first layers: not applicable.
"""

import math
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import Config, above, between, option
from pflsec.core.errors import NotApplicable
from pflsec.core.items import Items, cast
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture

PROBE_SIZE = 1e3  # far beyond any pre-activation: with this threshold no row fires
CLOSE = 1e-8  # float64


class ImprintConfig(Config):
    measure: Literal["random", "mean"] = option(
        default="random",
        about="what a row measures: a random direction of length 1, or the mean of the image",
        code="mean",
    )
    spread: float = above(
        0,
        default=1.0,
        about="standard deviation that is expected of it; in a random direction that of one normalised pixel",
    )
    gain: float = above(0, default=0.05, about="size of the layer that measures; the one behind has its inverse")
    faint: float = between(
        0, 1, default=0.02, about="bins that answer more weakly than this share of the strongest are empty"
    )


def _measurement(name: str, size: int, rng: torch.Generator) -> Tensor:
    """Return the direction in which all rows measure, float64 [size]."""
    if name == "mean":
        return torch.full((size,), 1 / size, dtype=torch.float64)
    direction = torch.randn(size, generator=rng, dtype=torch.float64)
    return direction / direction.norm()


class Layers(NamedTuple):
    """Names of the parameters that are replaced: the layer on the input, and the weight behind it."""

    weight: str
    bias: str
    behind: str


class Imprint(Attack[ImprintConfig]):
    key = "imprint"
    Config = ImprintConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.DOWNLINK})

    def craft(self, cap: Capture, rng: torch.Generator) -> Items:
        """Return the downlink with the two layers replaced."""
        layers, net, cfg = _layers(cap), cap.net, self.cfg
        rows, size = net.shapes[layers.weight]
        quantiles = torch.arange(1, rows + 1, dtype=torch.float64) / (rows + 1)
        at = cfg.spread * math.sqrt(2) * torch.erfinv(2 * quantiles - 1)
        outputs = torch.arange(net.shapes[layers.behind][0], dtype=torch.float64)
        # Signs in turn, of sizes apart: softmax minus label then points along no column's zero.
        column = (1 - 2 * (outputs % 2)) * (1 + 0.5 * torch.rand(len(outputs), generator=rng, dtype=torch.float64))
        made = {
            layers.weight: cfg.gain * _measurement(cfg.measure, size, rng).expand(rows, -1),
            layers.bias: -cfg.gain * at,
            layers.behind: (column / (cfg.gain * rows))[:, None].expand(-1, rows),
        }
        down = cap.record.down
        return down | {k: v.to(down[k].dtype).contiguous() for k, v in made.items()}

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        layers = _layers(cap)
        steps = [cap.target[name] for name in (layers.weight, layers.bias)]
        weight, bias = (g - torch.cat([g[1:], torch.zeros_like(g[:1])]) for g in steps)
        answers = bias.abs()
        order = answers.argsort(descending=True)[: cap.count]
        bins = order[answers[order] > self.cfg.faint * answers.max()].sort().values
        if not len(bins):
            raise NotApplicable("no row of the imprint layer has answered")
        x = (weight[bins] / bias[bins, None]).unflatten(1, cap.input.shape)
        left = 1 - len(bins) / cap.count
        return Reconstruction(
            x=x,
            y=None,
            objective=left,
            status="converged" if not left else "budget",
            iterations=0,
            restarts=1,
            labels="none",
            hidden="none",
            note="the objective is the share of the batch for which no bin has answered",
        )


def _layers(cap: Capture) -> Layers:
    """Return the layers to replace. Raises NotApplicable where the network's input or the wire has none."""
    net = cap.net
    if not cap.target:
        raise NotApplicable("nothing that the client sends depends on its data")
    names = [name for name in net.shapes if name not in net.buffers]
    weight, bias = names[0], names[0].removesuffix("weight") + "bias"
    why = "an imprint needs a linear layer with a bias on the input itself"
    if len(net.shapes[weight]) != 2 or bias not in net.shapes or net.shapes[weight][1] != math.prod(cap.input.shape):
        raise NotApplicable(f"{why}; the network begins with {weight} {list(net.shapes[weight])}")
    behind = next((n for n in names[1:] if len(net.shapes[n]) == 2), None)
    if behind is None or net.shapes[behind][1] != net.shapes[weight][0]:
        raise NotApplicable(f"{why}, and a linear layer behind it; here none follows {weight}")
    layers = Layers(weight, bias, behind)
    if missing := [name for name in layers if name not in cap.record.down]:
        raise NotApplicable(f"{missing[0]} is not among what the client receives, so the server cannot replace it")
    if missing := [name for name in (weight, bias) if name not in cap.target]:
        raise NotApplicable(f"what the client sends does not show the gradient of {missing[0]}")
    if not _gates(cap, layers):
        raise NotApplicable(f"{why}, and ReLU behind it; {weight} is none")
    return layers


def _gates(cap: Capture, layers: Layers) -> bool:
    """Return whether the layer adds W x to its bias, shows nothing of x far below zero, and all in proportion far above."""
    net, rng = cap.net, torch.Generator().manual_seed(0)
    items: dict[str, Tensor] = cast(net.fresh("imprint"), torch.float64)
    x = torch.randn(1, *cap.input.shape, generator=rng, dtype=torch.float64)
    weight, bias = items[layers.weight], items[layers.bias]
    moved = items | {layers.weight: torch.zeros_like(weight), layers.bias: bias + weight @ x.flatten()}
    closed, opened = (items | {layers.bias: torch.full_like(bias, at)} for at in (-PROBE_SIZE, PROBE_SIZE))
    up, zero, down = (net.logits(opened, scale * x) for scale in (1, 0, -1))

    def apart(a: Items, b: Items, other: Tensor) -> bool:
        return not torch.allclose(net.logits(a, x), net.logits(b, other), rtol=CLOSE, atol=CLOSE)

    proportional = torch.allclose(up + down, 2 * zero, rtol=CLOSE, atol=CLOSE) and apart(opened, opened, -x)
    return not apart(items, moved, x) and not apart(closed, closed, -x) and proportional
