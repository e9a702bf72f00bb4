"""Analytic inversion: the gradient of a layer that reads the image, divided by its bias's, is the image.

Source   Phong et al. 2017; Geiping et al. 2020, section 3.1; exact for any loss, label and head.
Needs    architecture, learning rate, shape of the inputs, the client's own messages with a biased linear layer on the image.
Solves   dW = sum_i u_i x_i^T / B and db = sum_i u_i / B for the images x_i; the u_i, and all that shapes them, stay unknown
Method   One image: x = dW^T db / |db|^2. A batch: rows dW_j / db_j that agree are one image, or one mixture of images. An
         image is told from a mixture by the units at rest under it: their rows must span one dimension less than all rows.
Limits   Smooth units never rest, so batches need ReLU. Only images that are certain are returned: the rest count as not
         found, and the row says how many there are. After a convolution the layer tells features, not the image: not
         applicable. One image: any number of local steps.
"""

from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.attacks import label_rules
from pflsec.core import linear
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import Config, above, option
from pflsec.core.errors import NotApplicable
from pflsec.core.inputs import example
from pflsec.core.items import cast
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture

ALIKE = 4.0  # times the rounding of two rows: as near as two measurements of one image lie
CLEAR = 30.0  # times the rounding of an entry, over the rows: a direction that stands out
FEW = 1e-3  # rows with so small a share of the largest bias tell nothing but rounding
OUTSIDE = 0.05  # pixels of an image lie no further outside [0, 1]


class AnalyticConfig(Config):
    labels: Literal["restore", "known"] = option(default="restore", about="restore: by rule where possible; known")
    tolerance: float = above(
        0, default=1e-6, about="converged where so little of the layer's gradient is left unexplained"
    )


class Analytic(Attack[AnalyticConfig]):
    key = "analytic"
    Config = AnalyticConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        y, labels = _labels(cap, self.cfg.labels)
        layer = reading_layer(cap)
        if not cap.target[f"{layer}.bias"].any():
            raise NotApplicable(f"{layer}.bias did not change: no unit of the layer reacted to the batch")
        found = single_input(cap, layer) if cap.count == 1 else _certain(cap, layer, rng)
        left, some = unexplained(cap, layer, found), len(found) < cap.count
        return Reconstruction(
            x=found.reshape(-1, *cap.input.shape),
            y=y,
            objective=left,
            status="converged" if left < self.cfg.tolerance and not some else "budget",
            iterations=1,
            restarts=1,
            labels=labels,
            hidden="none",
            note=f"{len(found)} of {cap.count} images are certain" if some else "",
        )


def linear_layers(cap: Capture) -> dict[str, bool]:
    """Return the linear layers by prefix, in the order of the forward pass, and whether each reads the image itself: only
    flattened, that is, not scaled, rectified or convolved."""
    x = example(cap.input.shape, cap.input.vocabulary)
    read = cap.net.linear_inputs(cap.net.fresh("linear layers"), x)
    return {name: torch.equal(z, x.flatten(1)) for name, z in read.items()}


def reading_layer(cap: Capture) -> str:
    """Return the prefix of the biased linear layer that reads the image. Raises NotApplicable where it was not sent."""
    reading = [name for name, reads in linear_layers(cap).items() if reads]
    if not reading:
        raise NotApplicable("no linear layer reads the image itself: its first one reads features")
    for name in reading:
        if f"{name}.weight" in cap.target:
            if f"{name}.bias" not in cap.target:
                raise NotApplicable(f"{name} has no bias on the wire, which leaves the image's scale open")
            return name
    raise NotApplicable(f"the layer that reads the image, {reading[0]}, is not sent")


def single_input(cap: Capture, layer: str) -> Tensor:
    """Return what a biased linear layer read for the only image of a batch, float64 [1, n].

    Exact for one local step, and for any number where the layer reads the image itself.
    """
    weight, bias = cap.target[f"{layer}.weight"].double(), cap.target[f"{layer}.bias"].double()
    return linear.single_input(weight, bias)[None]


def unexplained(cap: Capture, layer: str, x: Tensor) -> float:
    """Return the share of the layer's squared gradient that no mixture of the images x [R, n] makes up: 0 if they are all."""
    seen, images = _rows(cap, layer), torch.cat([x, torch.ones(len(x), 1).to(x)], 1)
    mixed = torch.linalg.lstsq(images.T, seen.T, driver="gelsd").solution.T @ images
    return float((seen - mixed).square().sum() / seen.square().sum())


def _rows(cap: Capture, layer: str) -> Tensor:
    """Return (dW, db), float64 [units, n + 1]: each row a mixture of the images with a 1 after each."""
    return torch.cat([cap.target[f"{layer}.weight"].double(), cap.target[f"{layer}.bias"].double()[:, None]], 1)


def _certain(cap: Capture, layer: str, rng: torch.Generator) -> Tensor:
    """Return the images [R, n], R <= B, that are no mixtures. Raises NotApplicable when there are none.

    All rows together span as many dimensions as there are images that left a trace. The rows of units at rest under an
    image know nothing of it: they span one dimension less, and the image is not among them. Under a mixture of images, both
    show in units at rest: there all dimensions remain, or, where the images always react together, more than one is lost.
    """
    rows = _rows(cap, layer)
    error = _rounding(rows, cap.count)
    rank = _rank(rows, error)
    found: list[Tensor] = []
    patterns: list[Tensor] = []
    for image in _candidates(cap, rows, error):
        active = _active(cap, layer, image, rng)
        rest = rows[~active]
        one = torch.cat([image, torch.ones(1).to(image)])
        scale = rows[active].norm() / one.norm() if active.any() else rows.norm() * 0
        if _rank(rest, error) == rank - 1 and _rank(torch.cat([rest, scale * one[None]]), error) == rank:
            if any(torch.equal(active, other) for other in patterns):
                raise NotApplicable(f"two images of the {cap.count} cannot be told from their mixture")
            found.append(image)
            patterns.append(active)
    if not found:
        raise NotApplicable(f"none of the {cap.count} images has units of {layer} to itself for certain")
    return torch.stack(found[: cap.count])


def _candidates(cap: Capture, rows: Tensor, error: float) -> list[Tensor]:
    """Return images or mixtures of images [n], one for every two or more rows that agree to rounding."""
    weight, bias = rows[:, :-1], rows[:, -1]
    telling = bias.abs() > FEW * bias.abs().max()
    weight, bias = weight[telling], bias[telling]
    ratio = weight / bias[:, None]
    blur = ALIKE * error * (1 + ratio.square().mean(1)).sqrt() / bias.abs()
    free, found = blur.argsort().tolist(), []
    while free:
        near = (ratio[free] - ratio[free[0]]).square().mean(1).sqrt() <= blur[free] + blur[free[0]]
        group = torch.tensor(free)[near]
        free = [j for j, taken in zip(free, near.tolist(), strict=True) if not taken]
        image = linear.single_input(weight[group], bias[group])
        pixels = cap.input.pixels(image.reshape(cap.input.shape))
        if len(group) > 1 and bool(((pixels > -OUTSIDE) & (pixels < 1 + OUTSIDE)).all()):
            found.append(image)
    return found


def _active(cap: Capture, layer: str, image: Tensor, rng: torch.Generator) -> Tensor:
    """Return which units of the layer pass a gradient on when the network sees this image, bool [units].

    What follows the layer may be hidden: it is drawn at random, which decides nothing about the layer's own units.
    """
    items = cap.began(cast(cap.newcomer(rng), torch.float64) | cast(cap.known or {}, torch.float64))
    bias = items[f"{layer}.bias"].detach().requires_grad_()
    logits = cap.net.logits(items | {f"{layer}.bias": bias}, image.reshape(1, *cap.input.shape))
    weights = torch.randn(logits.shape, generator=rng, dtype=logits.dtype)
    return torch.autograd.grad((logits * weights).sum(), bias)[0] != 0


def _rank(rows: Tensor, error: float) -> int:
    """Return in how many directions the rows stand out of the rounding of their entries."""
    return int((torch.linalg.svdvals(rows) > CLEAR * error * max(rows.shape) ** 0.5).sum()) if len(rows) else 0


def _rounding(rows: Tensor, count: int) -> float:
    """Return the error of one entry: what is left of the rows beyond the rank that so many images can give them."""
    rest = torch.linalg.svdvals(rows)[count:]
    if not len(rest):
        units, numbers = rows.shape
        raise NotApplicable(f"{count} images are too many for a layer of {units} units on {numbers - 1} numbers")
    return float((rest.square().sum() / ((len(rows) - count) * (rows.shape[1] - count))).sqrt())


def _labels(cap: Capture, policy: Literal["restore", "known"]) -> tuple[Tensor | None, str]:
    """Return the label of a single image and how it was found. In a batch, which label is whose would stay open."""
    if policy == "known":
        y = label_rules.hard(label_rules.granted(cap))
        return (y, "known") if cap.count == 1 else (None, "none")
    y = label_rules.of_one_image(cap)
    return y, "none" if y is None else "restore"
