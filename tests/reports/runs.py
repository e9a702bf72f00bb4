"""Run folders written by hand, in the format that training and attacking write."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.core.files import append_line, read_json, to_csv, to_json, write_json, write_text
from pflsec.core.inputs import InputSpec
from pflsec.core.tensors import read_items, write_items
from pflsec.core.vault import VaultWriter
from pflsec.reports.load import CLIENTS, SCORES, CaptureId

CAPTURES = tuple(f"r{t:03d}-c{c:02d}-v{v}-probe" for t in (0, 2) for c in range(3) for v in range(2))
MISSING = {
    "name": "lpips_alex64",
    "status": "weights-missing",
    "remedy": "Put alexnet-owt-7be5be79.pth into the folder of torch hub's checkpoints.",
}


def manifest(name: str, algo: str = "fedrep", shape: tuple[int, int, int] = (1, 8, 8)) -> dict[str, Any]:
    """Return a run.json; a test changes what it is about."""
    channels = shape[0]
    return {
        "schema": 1,
        "name": name,
        "state": "done",
        "reason": None,
        "started": "2026-01-02T03:04:05+00:00",
        "finished": "2026-01-02T03:05:05+00:00",
        "algorithm": {
            "key": algo,
            "family": "model_splitting",
            "title": f"{algo}: shared body, personal head.",
            "sections": {"Source": "somebody, 2021", "Leaks": "the body's gradient"},
            "settings": {"head_epochs": 10, "head_lr": None},
        },
        "config": {
            "algo": algo,
            "data": "digits",
            "clients": 4,
            "rounds": 3,
            "lr": 0.05,
            "seed": 0,
            "settings": {"head_epochs": 10},
            "defense": [],
            "capture_rounds": "first,last",
            "split": None,
        },
        "seed": 0,
        "versions": {"python": "3.11.7", "torch": "2.14.1"},
        "git": "abc1234",
        "device": "cpu",
        "threads": 1,
        "data": {
            "name": "digits",
            "source": "scikit-learn load_digits",
            "class_names": [str(i) for i in range(10)],
            "input": InputSpec(shape, 10, (0.3,) * channels, (0.4,) * channels).as_dict(),
            "partition": "85db8043",
        },
        "model": {"name": "cnn", "split": "fc", "parameters": 188810},
        "wire": [
            wire("down", "body.*", 6, 183680),
            wire("up", "body.*", 6, 183680),
            wire("up", "num_samples", 1, None) | {"kind": "counts", "optional": True},
            wire("private", "head.*", 2, 5130),
        ],
        "defenses": [],
        "dp": {"enabled": False, "coverage": {}},
        "captures": {"rounds": [0, 2], "clients": [0, 1, 2], "victims": 2, "batch": 1, "steps": 1, "kind": "probe"},
    }


def without_scripts(page: str) -> str:
    """Return a page without the scripts that stand in it: plotly's holds much that looks like markup, or like an address."""
    return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)


def wire(direction: str, item: str, tensors: int, numbers: int | None) -> dict[str, Any]:
    return {
        "direction": direction,
        "item": item,
        "kind": "weights",
        "optional": False,
        "shape": None,
        "tensors": tensors,
        "numbers": numbers,
    }


def write_run(
    path: Path,
    accuracies: Sequence[float | None] = (0.5, 0.75, 0.7),
    common: float | None = None,
    captures: Sequence[str] = CAPTURES,
    batch: int = 1,
    **changes: Any,
) -> Path:
    """Write a run: a round for each accuracy, a vault for the captures; `changes` replace parts of run.json."""
    shape = changes.pop("shape", (1, 8, 8))
    write_json(path / "run.json", manifest(path.name, changes.pop("algo", "fedrep"), shape) | changes)
    write_text(path / "clients.csv", to_csv(list(CLIENTS), []))
    for t, accuracy in enumerate(accuracies):
        append_line(path / "metrics.jsonl", to_json(round_of(t, accuracy, common), indent=None))
        row = {"round": t, "client": 0, "train_samples": 5, "test_samples": 2, "uploaded": True}
        append_line(path / "clients.csv", to_csv(list(CLIENTS), [row]).splitlines()[1])
    vault, spec = VaultWriter(path / "vault"), InputSpec.from_dict(read_json(path / "run.json", "")["data"]["input"])
    rng = np.random.default_rng(0)
    for number, capture in enumerate(captures):
        pixels = torch.as_tensor(rng.random((batch, *spec.shape)), dtype=torch.float32)
        index = torch.arange(batch) + number * batch
        vault.victim(capture, spec.normalise(pixels), index % 10, index, {}, {"replay_residual": 0.0})
    vault.pool(torch.rand(3, *spec.shape), torch.arange(3), torch.full(spec.shape, 0.5))
    return path


def round_of(t: int, accuracy: float | None, common: float | None = None) -> dict[str, Any]:
    row: dict[str, Any] = {"round": t, "train_loss": 1.0 / (t + 1), "bytes_up": 1_500_000, "bytes_down": 2_000_000}
    if accuracy is not None:
        row |= {
            "personal_accuracy_mean": accuracy,
            "personal_accuracy_weighted": accuracy + 0.05,
            "personal_accuracy_std": 0.1,
            "personal_accuracy_worst10": accuracy - 0.25,
            "global_accuracy": common,
        }
    norms = {"server": {"body": 9.0 + t}, "clients": {"head": 2.0, "control": None if t else 0.0}}
    return row | {"norms": norms, "epsilon": None, "seconds": 0.5}


def truth(run: Path, capture: str) -> Tensor:
    """Return a victim batch's pixels [B, C, H, W] from the vault."""
    spec = InputSpec.from_dict(read_json(run / "run.json", "")["data"]["input"])
    return spec.pixels(read_items(run / "vault" / f"{capture}.safetensors", "")["x"]).clamp(0, 1)


def score(run: Path, capture: str, attack: str = "dlg", **values: Any) -> dict[str, Any]:
    """Return a row of scores.csv for a victim that was reconstructed at 30 dB; `values` replace cells."""
    parts = CaptureId.parse(capture, run)
    psnr = values.pop("psnr", 30.0)
    label = str(parts.victim + parts.client)
    row = dict.fromkeys(SCORES) | {"run": run.name, "algo": "fedrep", "family": "model_splitting", "defense": "none"}
    row |= {"attack": attack, "adversary": "server", "knowledge": "wire", "labels": "restore", "hidden": "joint"}
    row |= {"kind": parts.kind, "round": parts.round, "client": parts.client, "victim": parts.victim}
    row |= {"dataset_index": "7", "batch": 1, "steps": 1, "iterations": 100, "restarts": 1, "seconds": 0.25}
    row |= {"psnr": psnr, "psnr_capped": None if psnr is None else min(psnr, 100.0), "psnr_blind": 12.0}
    row |= {"excess_psnr": None if psnr is None else min(psnr, 100.0) - 12.0, "ssim": 0.9, "ssim_variant": "uniform7"}
    row |= {"lpips_status": "weights-missing", "label_true": label, "label_found": label, "label_correct": 1.0}
    return row | {"identified": 1.0, "attack_valid": True, "reason": "", "status": "converged"} | values


def not_applicable(run: Path, capture: str, reason: str, attack: str = "dlg") -> dict[str, Any]:
    """Return a row of scores.csv for a victim on which the attack had nothing to work."""
    row = score(run, capture, attack, psnr=None, status="not-applicable", reason=reason)
    empty = ("ssim", "label_found", "label_correct", "identified", "labels", "hidden", "iterations")
    return row | dict.fromkeys(empty)


def write_attack(
    run: Path,
    rows: Sequence[Mapping[str, Any]],
    attack: str = "dlg",
    number: str = "1a2b3c4d",
    noise: float = 0.02,
    **changes: Any,
) -> Path:
    """Write an attack's folder: the rows, and for those with a PSNR the truth plus noise as reconstruction."""
    folder = run / "attacks" / f"{attack}-{number}"
    captures = [f"r{r['round']:03d}-c{r['client']:02d}-v{r['victim']}-{r['kind']}" for r in rows]
    rng = torch.Generator().manual_seed(0)
    images = {
        capture: (x + noise * torch.randn(x.shape, generator=rng)).clamp(0, 1)
        for capture, row in zip(captures, rows, strict=True)
        if row["psnr"] is not None
        for x in [truth(run, capture)]
    }
    write_items(folder / "reconstructions.safetensors", images)
    write_text(folder / "scores.csv", to_csv(list(SCORES), rows))
    meta = {
        "schema": 1,
        "id": folder.name,
        "attack": attack,
        "title": f"{attack}: find the image whose gradient was seen.",
        "config": {"iterations": 100, "restarts": 8, "labels": "restore", "hidden": "auto", "tv": 1e-6},
        "threat_model": {"adversary": "server", "knowledge": "wire", "knows": ["arch", "uplink", "hyper"]},
        "captures": captures,
        "seed": 0,
        "lpips": MISSING,
        "state": "done",
        "started": "2026-01-02T04:00:00+00:00",
        "finished": "2026-01-02T04:00:09+00:00",
        "seconds": 9.0,
    }
    write_json(folder / "attack.json", meta | changes)
    return folder
