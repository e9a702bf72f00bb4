"""Victims made of given images: one client's message about them, under FedAvg, without a run around it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.core import registry
from pflsec.core.attack import Reconstruction
from pflsec.core.config import build
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.core.streams import stream
from pflsec.leakage.images import psnr
from pflsec.leakage.matching import assign
from pflsec.models.network import Network
from pflsec.runtime.replay import capture, local_work
from pflsec.training.local import Training
from pflsec.wire.capture import Capture, Record

LR = 0.1


def mnist_of_client_0(data: Path) -> tuple[Tensor, Tensor]:
    """Return the training images [n, 1, 28, 28] in [0, 1] and labels of PFLlib's first client, in its order."""
    with np.load(data / "mnist" / "mnist70k.npz") as mnist, np.load(data / "mnist" / "pfllib_dir01_order.npz") as order:
        rows = order["train_0"]
        return torch.tensor(mnist["images"][rows])[:, None].float() / 255, torch.tensor(mnist["labels"][rows])


def cifar_of_each_class(data: Path) -> tuple[Tensor, Tensor]:
    """Return the first image of each class, [10, 3, 32, 32] in [0, 1], and the classes."""
    with np.load(data / "cifar10" / "cifar10_train10k.npz") as cifar:
        labels = cifar["labels"]
        first = [int((labels == c).argmax()) for c in range(10)]
        return torch.tensor(cifar["images"][first]).permute(0, 3, 1, 2).float() / 255, torch.arange(10)


def message(net: Network, items: Items, spec: InputSpec, pixels: Tensor, y: Tensor) -> Capture:
    """Return the capture of one local step of FedAvg on this batch, its labels granted."""
    kind = registry.load("algorithms", "fedavg")
    method = kind(build(kind.Config, {}, "fedavg"), net, 1)
    server, x, count = method.init_server(items), spec.normalise(pixels), len(y)
    state, down = method.init_client(items, server), method.downlink(server, 0)
    record = Record("victim", "fedavg", 0, 0, 0, "probe", down, {}, {}, spec, count, 1, count, LR, False)
    up = method.local(local_work(net, record, x, y, 0, driver=Training), state, down).up
    return capture(method, net, replace(record, up=up), history=True, seed=0, labels=y)


def attacked(name: str, cap: Capture, seed: int, settings: Mapping[str, Any]) -> Reconstruction:
    """Return what an attack makes of a capture."""
    kind = registry.load("attacks", name)
    return kind(build(kind.Config, dict(settings), name)).reconstruct(cap, stream(seed, name))


def decibels(cap: Capture, pixels: Tensor, found: Reconstruction) -> list[float]:
    """Return the PSNR of each true image, 0 for those without a reconstruction."""
    assert found.x is not None
    rec = cap.input.pixels(found.x.double()).clamp(0, 1)
    return [psnr(pixels[i].double(), rec[j]) if j >= 0 else 0.0 for i, j in enumerate(assign(pixels.double(), rec))]
