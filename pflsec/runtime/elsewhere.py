"""An update from elsewhere: two sets of weights, checked before anything is searched, as a capture to attack.

The client is taken to have done what a FedAvg client does: plain SGD on the mean cross entropy, from the first weights.
BatchNorm layers whose running statistics have not moved were in evaluation mode, and are replayed in it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflsec.config.update import UpdateConfig
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import RunError, did_you_mean
from pflsec.core.items import Items, first_nonfinite
from pflsec.core.network import Statistics
from pflsec.core.tensors import read_items
from pflsec.models import batchnorm, catalogue
from pflsec.models.network import Network, from_module
from pflsec.runtime import replay
from pflsec.runtime.executor import one_thread
from pflsec.runtime.setup import make_algorithm
from pflsec.wire.capture import Capture, Record

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
LARGEST = 2.0  # sum over classes of |softmax - label|: at most 2, so also its mean over images and steps
SLACK = 1.05
COUNT = "num_batches_tracked"  # torch's BatchNorm counts its training steps; a state_dict holds it, we need it not
HOPELESS = 2.0  # times the largest: a defense's noise may go beyond what is possible, a wrong learning rate does


class Evaluating(Network):
    """A network whose BatchNorm layers read their running statistics in training too, and leave them as they are."""

    def __init__(self, net: Network):
        self.__dict__ |= vars(net)

    def training(self) -> AbstractContextManager[Statistics]:
        return batchnorm.training([])


@dataclass(frozen=True)
class Update:
    """An update whose weights fit the network; doubts: what speaks against the description, a sentence each."""

    algorithm: Algorithm
    net: Network
    record: Record
    doubts: list[str]

    def capture(self, **given: Any) -> Capture:
        """Return what an attack is given (see replay.capture)."""
        return replay.capture(self.algorithm, self.net, self.record, **given)

    def residual(self, x: Tensor, y: Tensor) -> float | None:
        """Return how far the replay of this batch is from the update, relative; None where the order of steps matters."""
        if self.record.batch > self.record.batch_size:
            return None
        with one_thread():
            return replay.residual(self.algorithm, self.net, self.record, x, y, {}, self.record.up, 0)


def load(before: Path, after: Path, model: str | nn.Module, cfg: UpdateConfig) -> Update:
    """Return an update from two safetensors files. Raises PflsecError with what is wrong with them, or between them."""
    if isinstance(model, nn.Module):
        net = from_module(model, cfg.shape, cfg.classes, cfg.split)
    else:
        net = catalogue.build(model, cfg.shape, cfg.classes, cfg.split)
    files = [_read(path, f"the weights {word}") for path, word in ((before, "before"), (after, "after"))]
    down, up = (_weights(file, net) for file in files)
    if all(torch.equal(down[k], up[k]) for k in down):
        raise RunError(f"{before} and {after} hold the same weights: nothing was learnt between them.")
    if net.buffers and all(torch.equal(down[k], up[k]) for k in net.buffers):
        net = Evaluating(net)
    algorithm = make_algorithm("fedavg", {"weighting": "uniform"}, net, 1)
    record = Record(
        id="update",
        algorithm="fedavg",
        round=0,
        client=0,
        victim=0,
        kind="update",
        down=down,
        up=up,
        memory={},
        input=cfg.input,
        batch=cfg.images,
        epochs=cfg.epochs,
        batch_size=cfg.per_step,
        lr=cfg.lr,
        personal_equals_public=False,
    )
    return Update(algorithm, net, record, [*_doubts(net, record), *_mode_doubts(net, record, *files)])


@dataclass(frozen=True)
class _File:
    """What a file of weights holds. what: how messages name it."""

    path: Path
    what: str
    items: Items


def _read(path: Path, what: str) -> _File:
    if path.suffix.lower() in PICKLES:
        raise RunError(
            f"{what} are not read from {path}: loading a pickle may run code. Write "
            "safetensors.torch.save_file(model.state_dict(), FILE) instead."
        )
    return _File(path, what, read_items(path, what))


def _weights(file: _File, net: Network) -> Items:
    """Return a file's weights under our names. Raises RunError where they are not the network's."""
    counts = {f"{name}.{COUNT}" for name in net.batchnorms}
    path, what, found = file.path, file.what, {k: v for k, v in file.items.items() if k not in counts}
    names = net.names if len(found.keys() & net.names.keys()) >= len(found.keys() & net.shapes.keys()) else None
    wanted = names or {name: name for name in net.shapes}
    if missing := [name for name in wanted if name not in found]:
        if all(wanted[name] in net.buffers for name in missing):
            raise RunError(
                f"{what}: {path} lacks the running statistics {_listed(missing)}. Write the module's whole state_dict(): its "
                "parameters alone do not say what the network computes."
            )
        raise RunError(f"{what}: {path} lacks {_listed(missing)}{did_you_mean(missing[0], found)}")
    if surplus := [name for name in found if name not in wanted]:
        raise RunError(
            f"{what}: {path} has {_listed(surplus)}, which the model does not have. Give the model it is of."
        )
    items = {item: found[name] for name, item in wanted.items()}
    for name, item in wanted.items():
        if tuple(items[item].shape) != net.shapes[item]:
            raise RunError(
                f"{what}: '{name}' in {path} is {list(items[item].shape)}; in this model, with this shape and these classes, "
                f"it is {list(net.shapes[item])}."
            )
        if not items[item].is_floating_point():
            raise RunError(f"{what}: '{name}' in {path} is {items[item].dtype}; weights are floating-point numbers.")
    if (bad := first_nonfinite(items)) is not None:
        raise RunError(f"{what}: '{bad}' in {path} holds a NaN or an infinity; there is nothing to learn from it.")
    return items


def _doubts(net: Network, record: Record) -> Iterator[str]:
    """Yield what speaks against the description. Raises RunError where the learning rate or the steps cannot be right."""
    down, up = ({k: v.double() for k, v in items.items()} for items in (record.down, record.up))
    seen = {k: (down[k] - up[k]) / (record.lr * record.steps) for k in down}
    coarse = max(torch.finfo(v.dtype).eps for v in record.up.values()) / (record.lr * record.steps)  # times a weight
    bias = seen.get(f"{net.last_layer}.bias")
    weight = seen.get(f"{net.last_layer}.weight")
    one = record.batch == record.steps == 1
    if bias is not None:
        rounding = coarse * float(down[f"{net.last_layer}.bias"].abs().sum())
        size, total = float(bias.abs().sum()), float(bias.sum().abs())
        if size > HOPELESS * LARGEST + rounding:
            raise RunError(
                f"with learning rate {record.lr:g} and {record.steps} steps, the gradient of the last layer's bias would have "
                f"the size {size:.3g}; under cross entropy it has at most {LARGEST:g}. Give a larger learning rate, or the steps."
            )
        if total > 0.01 * size + rounding:
            yield (
                "the gradient of the last layer's bias does not sum to zero over the classes: the loss is no cross entropy, or "
                "the client used weight decay, an adaptive optimiser or a defense"
            )
        elif one and weight is not None and size > 100 * rounding:
            yield from _rate_doubts(down, weight, bias, net, record)
        elif size > SLACK * LARGEST + rounding:
            yield f"the gradient of the last layer's bias has the size {size:.3g}; under cross entropy it has at most {LARGEST:g}"
    if one:
        yield from _input_doubts(net, seen, record)


def _rate_doubts(down: Items, weight: Tensor, bias: Tensor, net: Network, record: Record) -> Iterator[str]:
    """One image, one step: the last layer's input is dW_y / db_y whatever the rate; its softmax says what the rate was."""
    label = bias.argmin()
    logits = down[f"{net.last_layer}.weight"] @ (weight[label] / bias[label]) + down[f"{net.last_layer}.bias"]
    expected = logits.softmax(0)
    expected[label] -= 1
    scale = float(bias.norm() / expected.norm().clamp(min=1e-30))
    if float((bias - scale * expected).norm()) > 0.1 * float(bias.norm()):
        yield "the last layer's gradient is not that of one image with one label in one step under cross entropy"
    elif not 1 / SLACK <= scale <= SLACK:
        yield f"the last layer's gradient fits a learning rate of {scale * record.lr:.3g}, not {record.lr:g}"


def _input_doubts(net: Network, seen: Items, record: Record) -> Iterator[str]:
    """One image, one step: a linear first layer's gradient gives its input, dW_j / db_j, which must be an image."""
    first = next(iter(net.shapes)).rpartition(".")[0]
    weight, bias = seen.get(f"{first}.weight"), seen.get(f"{first}.bias")
    if weight is None or bias is None or weight.shape[1:] != (torch.Size(record.input.shape).numel(),):
        return
    row = int(bias.abs().argmax())
    if float(bias[row]) == 0:
        return
    pixels = record.input.pixels((weight[row] / bias[row]).reshape(record.input.shape))
    low, high = float(pixels.min()), float(pixels.max())
    if low < -0.02 or high > 1.02:
        yield (
            f"with this mean and std, the pixels that the first layer's gradient shows run from {low:.2f} to {high:.2f}, not "
            "from 0 to 1: the normalisation is another one"
        )


def _mode_doubts(net: Network, record: Record, before: _File, after: _File) -> Iterator[str]:
    """BatchNorm layers in training mode move their statistics and count the steps."""
    if isinstance(net, Evaluating):
        yield (
            "the running statistics are the same before and after: the client is taken to have trained with its BatchNorm "
            "layers in evaluation mode"
        )
        return
    for name in (f"{layer}.{COUNT}" for layer in net.batchnorms):
        ends = [file.items.get(name) for file in (before, after)]
        if all(end is not None and end.numel() == 1 for end in ends):
            counted = int(ends[1]) - int(ends[0])  # type: ignore[arg-type]
            if counted != record.steps:
                yield f"'{name}' counts {counted} training steps, not {record.steps}"
            return


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more
