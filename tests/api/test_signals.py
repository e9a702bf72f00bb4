"""Signals from end to end: windows of body-worn sensors as inputs of height 1, trained on, attacked and drawn."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import pflsec
from pflsec.reports.figures import gallery
from pflsec.reports.load import load_run

FOLDER = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    """An .npz file with windows of three people, every channel scaled into [0, 1]."""
    if not (FOLDER / "har").is_dir():
        pytest.skip(f"real data are not available here: {FOLDER / 'har'} does not exist")
    spec = importlib.util.spec_from_file_location("shared_load", FOLDER / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, y, person, segment = module.har()
    few = person <= 3
    x, y, person, segment = x[few], y[few], person[few], segment[few]
    low, high = (fn(x, axis=(0, 2, 3), keepdims=True) for fn in (np.min, np.max))
    pixels = ((x - low) / (high - low)).clip(0, 1).astype(np.float32)
    file = tmp_path / "har.npz"
    np.savez(file, images=pixels, labels=y, client=person.astype(np.int64) - 1, is_test=segment % 5 == 0)
    return file


def test_sensor_windows_are_rebuilt_and_drawn_as_curves(windows: Path, tmp_path: Path):
    run = pflsec.train(
        algo="fedavg", data=f"npz:{windows}", model="mlp", partition="natural", test="given", rounds=1,
        capture_clients="0", victims=1, runs_dir=tmp_path,
    )  # fmt: skip
    scores = pflsec.attack(run, "ig", iterations=150, executor="serial", lpips="none", controls=False)
    assert isinstance(scores, pflsec.Scores)
    (row,) = scores.table.to_dict("records")
    assert row["attack_valid"] is True
    assert row["excess_psnr"] > 3
    assert (row["ssim_variant"], np.isnan(row["ssim"])) == ("image-too-small", True)
    loaded = load_run(run.path)
    figure = gallery(loaded, loaded.attacks[0])
    assert [len(axes.get_lines()) for axes in figure.axes] == [3, 3, 3]
