"""Cases T7: the attack and the client it is about."""

import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from pflsec import api
from pflsec.cli.app import main
from pflsec.config.attack import AttackConfig, make_attack
from pflsec.core import registry
from pflsec.core.config import build
from pflsec.core.errors import ConfigError
from pflsec.core.files import read_json, write_json
from pflsec.core.items import squared_distance
from pflsec.reports import frontier
from pflsec.reports.load import load_run, load_runs
from tests import toys
from tests.attacks.victims import victim
from tests.reports.runs import CAPTURES, score, write_attack, write_run

# --- U067: one loss for client and attacker


@pytest.mark.parametrize("key", ["fedavg", "scaffold", "fedprox", "fedrep"])
def test_u067_client_and_attacker_have_one_loss(key: str, doubles: None):
    """At the truth the squared L2 distance of what was sent and what is replayed is rounding; at another batch it is not."""
    made = victim(key, batch=2, steps=2, after=1)
    cap = made.capture()

    def missed(x: torch.Tensor) -> float:
        return float(squared_distance(cap.replay(x, made.y, made.state), cap.target).detach())

    assert missed(made.x) < 1e-24
    assert missed(0.9 * made.x) > 1e-12


def update(folder: Path, count: int, scale: float) -> dict[str, Any]:
    """Write what a client leaves that scales its loss: weights before and after one step of torch's, and its images."""
    images, labels = (values[:count] for values in (toys.dataset().images, toys.dataset().labels))
    model = toys.tiny().fresh("client")
    leaves = {k: v.clone().requires_grad_() for k, v in model.items()}
    net = toys.tiny()
    loss = scale * F.cross_entropy(net.logits(leaves, torch.from_numpy(images) / 255), torch.from_numpy(labels))
    slopes = torch.autograd.grad(loss, list(leaves.values()))
    files = {name: folder / f"{name}.safetensors" for name in ("before", "after")}
    save_file(model, files["before"])
    save_file({k: v - 0.1 * g for (k, v), g in zip(model.items(), slopes, strict=True)}, files["after"])
    np.savez(folder / "truth.npz", images=images, labels=labels)
    return {**files, "model": toys.tiny_module(), "out": folder / "out"}


def doubts(folder: Path, count: int, scale: float, scored: bool) -> list[str]:
    given: dict[str, Any] = update(folder, count, scale) | ({"truth": folder / "truth.npz"} if scored else {})
    options = {"shape": toys.SHAPE, "classes": toys.CLASSES, "lr": 0.1, "lpips": "none", "images": count}
    return api.UpdateSession("idlg", **given, options=options).doubts


@pytest.mark.parametrize(("count", "scored"), [(1, False), (3, True)])
def test_u067_a_client_that_scales_its_loss_is_found_out_before_the_search(tmp_path: Path, count: int, scored: bool):
    """Of one image the update alone tells; of several the truth does, where there is one."""
    assert doubts(tmp_path, count, 1.0, scored) == []
    found = doubts(tmp_path, count, 0.5, scored)
    assert any("a learning rate of 0.05, not 0.1" in one or "misses what was sent" in one for one in found)


# --- U070: settings of one kind of data are not for the other


@pytest.mark.parametrize(
    ("attack", "foreign"), [("dlg", "most"), ("inverting-gradients", "most"), ("embedding-rows", "tv")]
)
def test_u070_a_setting_for_the_other_kind_of_data_is_refused_by_name(attack: str, foreign: str):
    make_attack(attack, AttackConfig())
    with pytest.raises(ConfigError, match=f"no setting '{foreign}'"):
        make_attack(attack, AttackConfig(settings={foreign: 1}))


# --- U073: the price of another norm is not the price of noise


def test_u073_a_frontier_over_batchnorm_and_groupnorm_says_that_the_networks_differ(tmp_path: Path):
    paths = []
    for name, model, policy, defense in (
        ("plain", "resnet18", "aggregate", []),
        ("private", "resnet18-gn", "n/a", ["dp-sgd:epsilon=8"]),
    ):
        run = write_run(tmp_path / name, model={"name": model, "parameters": 11_173_962, "bn_buffers": policy})
        facts = read_json(run / "run.json", "the run")
        write_json(run / "run.json", facts | {"config": facts["config"] | {"defense": defense}})
        write_attack(run, [score(run, c) for c in CAPTURES])
        paths.append(run)
    (caution,) = frontier.measure(load_runs(paths)).cautions
    assert "network" in caution
    assert "running statistics" in caution
    assert frontier.measure(load_runs(paths[:1])).cautions == []


# --- U079: what a fresh user reads


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> api.Run:
    """A run on the toy data with four captures."""
    return api.train(
        dataset=toys.dataset(), partition="natural", test="given", model="mlp", rounds=1, lr=0.1, batch_size=4,
        capture_clients="1,3", victims=2, name="toy", runs_dir=tmp_path_factory.mktemp("runs"),
    )  # fmt: skip


def test_u079_success_rate_and_best_psnr_are_printed(
    attacked: api.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pflsec.reports.figures.write_gallery", lambda path, attack: None)
    words = ["attack", "idlg", str(attacked.path), "--restarts", "2", "--iterations", "3", "--executor", "serial"]
    assert main([*words, "--seed", "0", "--lpips", "none", "--no-controls"]) == 0
    said = " ".join(capsys.readouterr().out.replace("\u00a0", " ").split())
    psnr = load_run(attacked.path).attacks[0].scores["psnr_capped"]
    assert len(psnr) == 4
    assert f"on what the wire shows: {psnr.max():.1f} dB by idlg" in said
    assert f"{100 * float((psnr >= 20).mean()):.1f} % (n too small) reach 20 dB" in said


# --- U084: every number of every attack has a range

NUMBERS = [
    (name, field)
    for name in registry.names("attacks")
    for field, info in registry.load("attacks", name).Config.model_fields.items()
    if {int, float} & {info.annotation, *get_args(info.annotation)}
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1])
@pytest.mark.parametrize(("name", "field"), NUMBERS)
def test_u084_no_number_of_an_attack_is_negative_or_not_finite(name: str, field: str, value: float):
    with pytest.raises(ConfigError, match=f"{field} is"):
        build(registry.load("attacks", name).Config, {field: value}, name)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0])
@pytest.mark.parametrize("field", ["iterations", "restarts", "workers"])
def test_u084_no_attack_is_made_of_nothing(field: str, value: float):
    with pytest.raises(ConfigError, match=f"{field} is"):
        build(AttackConfig, {field: value}, "attack")
