"""Attacks on real images in the settings of the reference codes, beside the numbers that these reached there.

    python -m benchmarks.attack_baselines DATA [PART ...]

DATA holds mnist/mnist70k.npz, mnist/pfllib_dir01_order.npz and cifar10/cifar10_train10k.npz. The rows go
to docs/tables/attack-baselines.md; those of other parts stay. Mark: our median at or above the reference's.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.victims import attacked, cifar_of_each_class, decibels, message, mnist_of_client_0
from pflsec.core.inputs import InputSpec
from pflsec.models import catalogue

TABLE = Path(__file__).parents[1] / "docs" / "tables" / "attack-baselines.md"
HEAD = """# Attacks beside their reference codes

Untrained networks, one image, one step of FedAvg at lr 0.1, PSNR in dB of each victim. MNIST: the first training images of
PFLlib's client 0 (labels 1, 5, 8, 8); CIFAR-10: an airplane and an automobile, other ones than the reference's. The
references were run with the authors' code on the same kind of network with other weights. Made by
`benchmarks/attack_baselines.py`, part by part: rows may be from separate runs.

idlg and dlg search on a scaled objective: L-BFGS of torch forgets its curvature where steps and slopes are small in absolute
numbers. Before that, idlg reached a median of 47.9 on MNIST. On CIFAR-10, where 40 iterations end the search, it stays below the
reference's median (29.5). For modern and grad-inversion there is no reference.

| part | attack | network | settings | reference | ours | status | CPU s |
|---|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Case:
    """One row: which images are attacked how, and what the reference reached."""

    data: str
    images: tuple[int, ...]
    attack: str
    model: str
    settings: dict[str, Any]
    reference: str
    seeds: tuple[int, ...] = (0,)


KNOWN = {"labels": "known"}
CASES = {
    "classic": Case(
        "mnist", (0, 1), "dlg-classic", "lenet", {"iterations": 120}, "65.9 75.3 3.4 3.2 74.6 62.4 (median 64.2)", (0, 1, 2)
    ),
    "dlg": Case("mnist", (0, 1, 2, 3), "dlg", "lenet", {"iterations": 25, "restarts": 3, "rescue": 0}, ">= 30"),
    "idlg": Case(
        "mnist", (0, 1), "idlg", "lenet",
        {"iterations": 25, "restarts": 1, "rescue": 0, "tolerance": 1e-14}, "73.1 40.2 70.8 55.8", (0, 1),
    ),
    "idlg-cifar": Case(
        "cifar", (0, 1), "idlg", "lenet", {"iterations": 40, "restarts": 1, "rescue": 0} | KNOWN, "23.5 29.0 32.8 30.0", (0, 1)
    ),
    "ig": Case(
        "mnist", (0, 1, 2, 3), "inverting-gradients", "cnn",
        {"iterations": 500, "tv": 1e-4, "restarts": 1, "precision": "float32"} | KNOWN, "26.9 46.8 34.8 32.4",
    ),
    "modern": Case("mnist", (0, 1, 2, 3), "modern", "cnn", {"iterations": 500, "precision": "float32"} | KNOWN, ""),
    "grad-inversion": Case(
        "mnist", (0, 1, 2, 3), "grad-inversion", "cnn", {"iterations": 500, "precision": "float32"} | KNOWN, ""
    ),
    "analytic": Case("mnist", (0, 1, 2, 3), "analytic", "mlp", {}, ">= 80"),
}  # fmt: skip


def run(case: Case, data: Path) -> Iterator[tuple[float, str, float]]:
    """Yield PSNR, status and CPU seconds of every victim of a case."""
    pixels, y = mnist_of_client_0(data) if case.data == "mnist" else cifar_of_each_class(data)
    channels, height, width = pixels.shape[1:]
    size, plain = (channels, height, width), case.model == "lenet"  # the LeNet's references take pixels as they are
    spec = InputSpec(size, 10, (0.0 if plain else 0.5,) * channels, (1.0 if plain else 0.5,) * channels)
    net = catalogue.build(case.model, size, 10)
    for i in case.images:
        for seed in case.seeds:
            cap = message(net, net.fresh(seed), spec, pixels[i : i + 1], y[i : i + 1])
            began = time.process_time()
            found = attacked(case.attack, cap, seed, case.settings)
            yield decibels(cap, pixels[i : i + 1], found)[0], found.status, time.process_time() - began


def main() -> None:
    torch.set_num_threads(1)
    data, parts = Path(sys.argv[1]), sys.argv[2:]
    lines = {}
    if TABLE.exists():
        rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
        lines = {line.split(" | ")[0].strip("| "): line for line in rows[1:]}
    for name, case in CASES.items():
        if parts and name not in parts:
            continue
        values, endings, seconds = zip(*run(case, data), strict=True)
        said = " ".join(f"{k}={v:g}" if isinstance(v, float) else f"{k}={v}" for k, v in case.settings.items())
        ours = f"{' '.join(f'{min(v, 100):.1f}' for v in values)} (median {min(100, statistics.median(values)):.1f})"
        ended = ", ".join(f"{endings.count(e)} {e}" for e in dict.fromkeys(endings))
        where = f"{case.data} {case.model}"
        cells = [name, case.attack, where, said, case.reference, ours, ended, f"{sum(seconds):.0f}"]
        lines[name] = f"| {' | '.join(cells)} |"
        print(lines[name], flush=True)
        TABLE.write_text(HEAD + "\n".join(lines[part] for part in CASES if part in lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
