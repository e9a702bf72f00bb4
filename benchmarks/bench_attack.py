"""Victim-iterations a second of inverting-gradients on 8 victims, against plain loops over the same victims.

Reference: one victim at a time, torch.func-free double backward on a bare module in float32, default threads. Mark: >= 1.25.

    python -m benchmarks.bench_attack [REPEATS]
"""

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

import pflsec
from benchmarks.common import table
from pflsec.config.attack import AttackConfig
from pflsec.models.cnn import cnn
from pflsec.runtime import attacking
from pflsec.runtime.folder import RunFolder

ITERATIONS, VICTIMS, TV = 200, 8, 1e-4
SHAPE, CLASSES = (1, 8, 8), 10


def plain(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Do what inverting-gradients does, as short as it can be written for one image and one step."""
    parameters = list(module.parameters())
    seen = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), parameters)
    size = sum(float(g.square().sum()) for g in seen) ** 0.5
    guess = torch.randn_like(x).requires_grad_()
    optimiser = torch.optim.Adam([guess], lr=0.1)
    for _ in range(ITERATIONS):
        found = torch.autograd.grad(nn.functional.cross_entropy(module(guess), y), parameters, create_graph=True)
        inner = torch.stack([(f * g).sum() for f, g in zip(found, seen, strict=True)]).sum()
        norm = torch.stack([f.square().sum() for f in found]).sum().sqrt()
        across, down = guess.diff(dim=-1).abs().mean(), guess.diff(dim=-2).abs().mean()
        (slope,) = torch.autograd.grad(1 - inner / norm / size + TV * (across + down), [guess])
        guess.grad = slope.sign()
        optimiser.step()
        with torch.no_grad():
            guess.clamp_(-3, 3)


def reference() -> float:
    """Return victim-iterations a second of the plain loop with torch's default threads."""
    module = cnn(SHAPE, CLASSES)
    began = time.perf_counter()
    for victim in range(VICTIMS):
        plain(module, torch.rand(1, *SHAPE), torch.tensor([victim]))
    return VICTIMS * ITERATIONS / (time.perf_counter() - began)


def ours(run: pflsec.Run, precision: str, workers: int) -> float:
    """Return victim-iterations a second of the attack on a run's captures, the start of its workers included."""
    config = AttackConfig(
        iterations=ITERATIONS,
        settings={"precision": precision, "tv": TV, "tolerance": 0.0},
        executor="processes",
        workers=workers,
    )
    folder = RunFolder(run.path)
    targets = [
        attacking.Target(run.path, name, "inverting-gradients", config, None, None)
        for name in attacking.selected(folder, config)
    ]
    assert len(targets) == VICTIMS
    began = time.perf_counter()
    done = list(attacking.attempts(targets, "processes" if workers > 1 else "serial", workers))
    assert all(one.result and one.result.iterations == ITERATIONS for one in done)
    return VICTIMS * ITERATIONS / (time.perf_counter() - began)


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    with tempfile.TemporaryDirectory() as folder:
        run = pflsec.train(
            algo="fedavg", rounds=1, capture_rounds="first", capture_clients="0,1,2,3", victims=2, runs_dir=Path(folder)
        )
        ways = {
            f"{workers} worker{'s' * (workers > 1)}, {precision}": (precision, workers)
            for precision in ("float32", "float64")
            for workers in (1, os.cpu_count() or 1)
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        plainly: list[float] = []
        for _ in range(repeats):
            plainly.append(reference())
            for name, (precision, workers) in ways.items():
                found[name].append(ours(run, precision, workers))
    rows = [["plain loop, default threads", median(plainly), 1.0]]
    rows += [
        [name, median(rates), median(a / b for a, b in zip(rates, plainly, strict=True))]
        for name, rates in found.items()
    ]
    table("inverting-gradients, 8 victims", ["what", "victim-iterations/s", "ratio"], rows)


if __name__ == "__main__":
    main()
