"""Which images were in the batch: told by what was sent, and by nothing else."""

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pflsec import api
from pflsec.core.errors import KnowledgeError, NotApplicable, RunError
from pflsec.core.tensors import read_items
from pflsec.data.datasets import from_arrays
from pflsec.leakage import membership
from pflsec.leakage.results import COLUMNS
from pflsec.wire.capture import Capture
from tests import toys
from tests.attacks.test_controls import shuffled
from tests.attacks.victims import Victim, attack, victim

CLIENTS, TRAIN, TEST = 6, 12, 12


def noise():
    """Return images of noise with labels at random: a network can learn them by heart alone."""
    rng = np.random.default_rng(5)
    count = CLIENTS * (TRAIN + TEST)
    images = rng.integers(0, 256, (count, *toys.SHAPE), dtype=np.uint8)
    owner = np.repeat(np.arange(CLIENTS), TRAIN + TEST)
    is_test = np.tile(np.arange(TRAIN + TEST) >= TRAIN, CLIENTS)
    return from_arrays(
        images, rng.integers(0, 3, count), client_ids=owner, is_test=is_test, class_names=["a", "b", "c"], name="noise"
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return api.train(
        dataset=noise(), partition="natural", test="given", model="mlp", rounds=4, lr=0.2, batch_size=4, local_epochs=10,
        capture_rounds="last", capture_clients="0,1,2,3,4,5", victims=1, kind="both", name="heart",
        runs_dir=tmp_path_factory.mktemp("runs"),
    ).path  # fmt: skip


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> api.Run:
    return api.Run(shutil.copytree(trained, tmp_path / "heart"))


def attacked(run: api.Run, **options: Any) -> api.Scores:
    settled: dict[str, Any] = {"knowledge": "wire+candidates", "lpips": "none"}
    scores = api.attack(run, "membership", **(settled | options))
    assert isinstance(scores, api.Scores)
    return scores


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def test_members_of_real_uploads_are_told_from_others(run: api.Run):
    found = attacked(run, kind="update").membership
    assert found.keys() == {"alignment", "loss_drop"}
    for name in found:
        assert found[name]["auc"] > 0.7, name
        assert found[name]["verdict"] == "above chance"
        assert (found[name]["n_victims"], found[name]["n_members"]) == (CLIENTS, CLIENTS * TRAIN)


def test_the_one_image_of_a_probe_is_told_from_all_others(run: api.Run):
    found = attacked(run, kind="probe").membership["alignment"]
    assert (found["auc"], found["tpr_1pct"], found["n_members"]) == (1, 1, CLIENTS)


def test_the_area_follows_from_the_scores_that_are_stored(run: api.Run):
    scores = attacked(run, kind="update")
    stored = rows(scores.path / "membership.csv")
    assert list(stored[0])[: len(membership.COLUMNS)] == list(membership.COLUMNS)
    member = np.array([row["member"] == "true" for row in stored])
    for name, found in scores.membership.items():
        again = membership.auc(member, np.array([float(row[name]) for row in stored]))
        assert again == pytest.approx(found["auc"], abs=1e-9)


def test_members_are_the_batch_and_others_are_test_rows_of_the_same_client(run: api.Run):
    data, scores = noise(), attacked(run, kind="update")
    assert data.is_test is not None
    assert data.client_ids is not None
    for row in rows(scores.path / "membership.csv"):
        index = int(row["dataset_index"])
        assert data.is_test[index] == (row["member"] == "false")
        assert data.client_ids[index] == int(row["client"])
        assert data.labels[index] == int(row["label"])


def test_rows_of_the_scores_have_no_picture_and_say_how_they_ended(run: api.Run):
    scores = attacked(run, kind="update")
    found = rows(scores.path / "scores.csv")
    assert list(found[0]) == list(COLUMNS)
    assert len(found) == CLIENTS
    for row in found:
        assert (row["status"], row["labels"], row["hidden"], row["knowledge"]) == (
            "converged", "none", "none", "wire+candidates",
        )  # fmt: skip
        assert {row[name] for name in ("psnr", "ssim", "mse", "identified", "label_found", "objective")} == {""}
    assert read_items(scores.path / "reconstructions.safetensors", "") == {}


def test_processes_and_another_time_give_the_same_scores(run: api.Run):
    first = (attacked(run).path / "membership.csv").read_text()
    again = attacked(run, executor="processes", workers=2)
    assert (again.path / "membership.csv").read_text() == first
    assert (attacked(run, seed=1).path / "membership.csv").read_text() != first


def test_candidates_must_be_granted_and_an_older_run_must_be_trained_again(run: api.Run):
    with pytest.raises(KnowledgeError, match=r"Grant it with --knowledge wire\+candidates") as refusal:
        attacked(run, knowledge="wire")
    assert "\n" not in str(refusal.value)
    (run.path / "vault" / "outsiders.safetensors").unlink()
    with pytest.raises(RunError, match=r"Train again with --capture-rounds"):
        attacked(run)
    assert list(run.path.joinpath("attacks").iterdir()) == []
    assert api.attack(run, "ig", iterations=1, knowledge="oracle", lpips="none")


def test_others_than_this_attack_are_shown_no_candidates(run: api.Run):
    session = api.AttackSession(api.RunFolder(run.path), api.build(api.AttackConfig, {"knowledge": "oracle"}, "attack"))
    assert all(target.candidates is None for target in session.granting.targets("dlg"))
    shown = session.granting.targets("membership")
    assert all(target.candidates is not None for target in shown)


def test_what_it_is_worth_stands_in_the_attacks_file_and_on_the_page(run: api.Run):
    scores = attacked(run, kind="update")
    meta = json.loads((scores.path / "attack.json").read_text(encoding="utf8"))
    assert meta["membership"] == scores.membership
    page = api.report(run)
    text = page.read_text(encoding="utf8")
    assert '<h2 id="membership">Membership</h2>' in text
    assert "above chance" in text
    table = rows(page.parent / "tables" / "membership.csv")
    assert {row["statistic"]: float(row["auc"]) for row in table} == pytest.approx(
        {name: found["auc"] for name, found in meta["membership"].items()}, abs=1e-5
    )
    meta["membership"]["alignment"]["auc"] = "high"
    (scores.path / "attack.json").write_text(json.dumps(meta))
    with pytest.raises(RunError, match=r"attack\.json is damaged: 'alignment'"):
        api.report(run)


# --- one capture


def candidates(v: Victim, *others: Victim) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([o.x for o in (v, *others)]), torch.cat([o.y for o in (v, *others)])


def scored(v: Victim, **granted: Any) -> dict[str, torch.Tensor]:
    x, y = candidates(v, *(victim(client=3, first=first) for first in (3, 6)))
    return dict(attack("membership", replace(v.capture(**granted), candidates=(x, y))).membership)


def shown(cap: Capture, order: list[int]) -> dict[str, torch.Tensor]:
    assert cap.candidates is not None
    x, y = cap.candidates
    return dict(attack("membership", replace(cap, candidates=(x[order], y[order]))).membership)


def test_candidates_in_another_order_get_their_scores_in_that_order():
    v = victim("fedpac", batch=2)
    cap = replace(v.capture(), candidates=candidates(v, victim(client=3, first=3), victim(client=3, first=4)))
    straight, order = shown(cap, [0, 1, 2, 3]), [2, 0, 3, 1]
    assert straight.keys() == {"alignment", "loss_drop", "prototype", "replay"}
    for name, scores in shown(cap, order).items():
        assert toys.distance({"s": scores}, {"s": straight[name][order]}) < 1e-12


@pytest.mark.usefixtures("doubles")
def test_each_statistic_is_what_it_says_it_is():
    v = victim("fedpac")
    found = scored(v)
    x, y = candidates(v, *(victim(client=3, first=first) for first in (3, 6)))
    down = {k: w for k, w in v.record.down.items() if k.startswith(("body", "head"))}
    ended = {k: v.record.up[k] for k in down}
    change = {k: v.capture().target[k] for k in down}
    for i, (image, label) in enumerate(zip(x[:, None], y[:, None], strict=True)):
        slope = toys.hand_gradient(down, image, label)
        inner = sum(float((slope[k] * change[k]).sum()) for k in down)
        size = [sum(float(g[k].square().sum()) for k in down) ** 0.5 for g in (slope, change)]
        assert float(found["alignment"][i]) == pytest.approx(inner / size[0] / size[1], abs=1e-9)
        drop = toys.hand_loss(down, image, label) - toys.hand_loss(ended, image, label)
        assert float(found["loss_drop"][i]) == pytest.approx(float(drop), abs=1e-9)
        gap = (toys.hand_features(ended, image)[0] - v.record.up["prototype"][int(label)]).norm()
        assert float(found["prototype"][i]) == pytest.approx(-float(gap), abs=1e-9)
    assert float(found["replay"][0]) == pytest.approx(0, abs=1e-9)


def test_a_shuffled_upload_ranks_members_no_higher_than_others():
    """Over many victims, the share of pairs in which the member is ahead, of a candidate of the same class."""
    own, mixed = [], []
    for client in (1, 3):
        many = [victim(client=client, first=first) for first in range(8)]
        for v in many:
            rivals = [o for o in many if int(o.y) == int(v.y) and o is not v]
            for ahead, seen in ((own, v), (mixed, shuffled(v))):
                cap = replace(seen.capture(), candidates=candidates(v, *rivals))
                scores = shown(cap, list(range(1 + len(rivals))))["alignment"]
                ahead.extend((scores[0] > scores[1:]).tolist())
    assert np.mean(own) == 1
    assert 0.25 < np.mean(mixed) < 0.75


@pytest.mark.parametrize(
    ("key", "wire", "oracle"),
    [
        ("fedavg", {"alignment", "loss_drop"}, {"alignment", "loss_drop"}),
        ("fedrep", set(), {"alignment", "loss_drop"}),
        ("fedproto", set(), {"prototype", "replay"}),
        ("fedpcl", set(), {"replay"}),
        ("fd", set(), {"replay"}),
    ],
)
def test_which_statistics_apply_depends_on_what_is_sent_and_known(key: str, wire: set[str], oracle: set[str]):
    v = victim(key, after=2)
    if wire:
        assert scored(v).keys() == wire
    else:
        with pytest.raises(NotApplicable, match="private items that the adversary does not have") as refusal:
            scored(v)
        assert "\n" not in str(refusal.value)
    assert scored(v, state=True).keys() == oracle


def test_without_candidates_there_is_nothing_to_score():
    with pytest.raises(NotApplicable, match="no image from outside the batch"):
        attack("membership", victim().capture())
