"""What the attacks rebuild: digits, untrained CNN, one image, one step, 16 victims; and the two controls that must fail.

Marks: fedavg, median PSNR of dlg and of inverting-gradients >= 30 dB. fedrep under inverting-gradients: joint within 8 dB
of oracle, guess at least 10 dB below joint (400 iterations). An uplink of another victim, or noise of equal norm: no
better than blind.
"""

import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pflsec
from benchmarks.common import row, table
from pflsec.attacks.optimisation.inverting_gradients import InvertingGradients, InvertingGradientsConfig
from pflsec.core.items import Items
from pflsec.core.streams import stream
from pflsec.leakage.images import psnr
from pflsec.leakage.vault import Vault
from pflsec.runtime import attacking, replay
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.setup import rebuild
from pflsec.wire.capture import Record
from pflsec.wire.store import CaptureStore


def medians(run: pflsec.Run, attack: str, **options: Any) -> list[object]:
    """Return [victims, median PSNR, lowest, highest, median above blind] of an attack."""
    scores = pflsec.attack(run, attack, executor="auto", lpips="none", **options)
    t = scores.table  # type: ignore[union-attr]
    quantiles = [float(t.psnr_capped.quantile(q)) for q in (0.5, 0, 1)]
    return [len(t), *quantiles, float(t.excess_psnr.median())]


def control(run: pflsec.Run, spoil) -> list[object]:
    """Attack captures whose uplink was replaced; return the same columns as `medians`."""
    torch.set_num_threads(1)
    folder = RunFolder(run.path)
    config, spec = attacking.training_config(folder)
    net, algorithm = rebuild(config, spec)
    store, vault = CaptureStore(folder.captures), Vault(folder.vault)
    records = [store.read(name) for name in store.ids()]
    mean = vault.pool().mean
    attack = InvertingGradients(InvertingGradientsConfig(iterations=300))
    found, blind = [], []
    for i, record in enumerate(records):
        changed = dataclasses.replace(record, up=spoil(records, i))
        cap = replay.capture(algorithm, net, changed, history=True, seed=1)
        guess = attack.reconstruct(cap, stream("control", i)).x
        truth = spec.pixels(vault.truth(record.id).x.double()).clamp(0, 1)[0]
        assert guess is not None
        found.append(psnr(truth, spec.pixels(guess.detach().double()).clamp(0, 1)[0]))
        blind.append(psnr(truth, mean.double()))
    above = np.subtract(found, blind)
    return [len(found), float(np.median(found)), min(found), max(found), float(np.median(above))]


def of_another_client(records: list[Record], i: int) -> Items:
    return records[(i + 4) % len(records)].up


def noise_of_equal_norm(records: list[Record], i: int) -> Items:
    record, rng = records[i], stream("noise", i)
    up = dict(record.up)
    for name, sent in record.up.items():
        if name in record.down:
            change = record.down[name] - sent
            draw = torch.randn(change.shape, generator=rng)
            up[name] = record.down[name] - draw * (change.norm() / draw.norm())
    return up


def main() -> None:
    columns = ["method", "attack", "hidden", "mark", "n", "median dB", "min", "max", "above blind"]
    table("Digits, untrained CNN, one image, one step", columns, [])
    parts = sys.argv[1:] or ["fedavg", "fedrep"]
    with tempfile.TemporaryDirectory() as folder:
        common = {"rounds": 1, "capture_rounds": "first", "victims": 4, "runs_dir": Path(folder)}
        if "fedavg" in parts:
            fedavg = pflsec.train(algo="fedavg", **common)
            row(["fedavg", "idlg", "none", ""], medians(fedavg, "idlg"))
            row(["fedavg", "dlg", "none", ">= 30 dB"], medians(fedavg, "dlg", restarts=3))
            row(["fedavg", "inverting-gradients", "none", ">= 30 dB"], medians(fedavg, "ig"))
            row(["fedavg", "IG, another client's uplink", "none", "blind"], control(fedavg, of_another_client))
            row(["fedavg", "IG, noise of equal norm", "none", "blind"], control(fedavg, noise_of_equal_norm))
        if "fedrep" in parts:
            fedrep = pflsec.train(algo="fedrep", **common)
            for hidden, knowledge in (("guess", "wire"), ("joint", "wire"), ("oracle", "wire+personal_params")):
                found = medians(fedrep, "ig", hidden=hidden, knowledge=knowledge, iterations=400)
                row(["fedrep", "inverting-gradients", hidden, ""], found)


if __name__ == "__main__":
    main()
