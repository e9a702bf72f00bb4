"""`--visible`: an attacker that sees some items of the upload reads nothing from the others."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pflsec import api
from pflsec.attacks import label_rules
from pflsec.cli.app import main
from pflsec.core.errors import ConfigError, NotApplicable
from pflsec.runtime.replay import capture
from pflsec.wire.capture import Capture
from tests import toys
from tests.attacks.victims import Victim, attack, victim

FIRST, LAST = "body.fc1.*", "head.*"
QUICK: dict[str, Any] = {"lpips": "none", "clients": [1], "controls": False}


def limited(made: Victim, *visible: str, history: bool = True, **given: Any) -> Capture:
    return capture(made.setup.algorithm, made.setup.net, made.record, history=history, seed=0, visible=visible, **given)


# --- what is left of a capture


def test_target_record_and_replay_shrink_to_what_is_seen():
    made = victim()
    cap, whole = limited(made, FIRST), made.capture()
    names = ["body.fc1.weight", "body.fc1.bias"]
    assert list(cap.target) == list(cap.record.up) == list(cap.kinds) == names
    assert all(torch.equal(cap.target[name], whole.target[name]) for name in names)
    again, everything = (c.replay(made.x, made.y, made.state) for c in (cap, whole))
    assert list(again) == names
    assert all(torch.equal(again[name], everything[name]) for name in names)
    assert cap.record.down.keys() == whole.record.down.keys()


def test_a_model_ends_where_it_began_where_nothing_is_seen():
    made = victim()
    cap = limited(made, LAST)
    began, ended = cap.began({}), cap.ended({})
    moved = {name for name in began if not torch.equal(began[name], ended[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "key", ["fedavg", "scaffold", "feddyn", "fedproto", "fedrep", "pfedme", "apfl", "fedgen", "fedpac", "fedcac"]
)
def test_nothing_follows_from_what_is_hidden(key: str):
    """Other values of the hidden items leave the capture as it was, whatever the method makes of its upload."""
    made = victim(key, after=1)
    seen = next(name for name, v in made.record.up.items() if v.is_floating_point() and v.dim())
    other = {
        k: v if k == seen else v + 1 if v.is_floating_point() else ~v if v.dtype == torch.bool else v + 1
        for k, v in made.record.up.items()
    }
    one, two = limited(made, seen), limited(made.with_upload(other), seen)
    assert toys.same(one.target, two.target)
    assert toys.same(one.record.up, two.record.up)
    assert list(one.record.up) == [seen]
    assert one.held_classes is None
    assert one.label_counts is None


def test_what_a_method_does_not_read_from_an_item_is_not_there():
    """SCAFFOLD's change is read from the control variates alone: each from its own item."""
    made = victim("scaffold", after=2)
    assert made.capture().known
    cap = limited(made, "control.head.*")
    assert set(cap.target) == {"head.weight", "head.bias"}
    assert limited(made, "delta.*").target == {}


def test_earlier_uploads_were_not_seen_in_full_either():
    made = victim("scaffold", after=2)
    cap = limited(made, "delta.*")
    assert cap.known is None
    assert cap.record.memory == {}


def test_a_label_set_that_is_not_seen_tells_no_labels():
    made = victim("fedproto", batch=2)
    rng = torch.Generator().manual_seed(0)
    assert label_rules.from_label_set(made.capture(), rng) is not None
    assert label_rules.from_label_set(limited(made, "proto*"), rng) is None


def test_what_says_nothing_about_the_data_is_not_attacked():
    made = victim("fedavg", settings={"weighting": "samples"})
    with pytest.raises(NotApplicable, match="depends on its data"):
        attack("idlg", limited(made, "num_samples"))


# --- U078: is one layer enough?


def test_the_first_layer_gives_the_input_away_and_the_last_one_the_label():
    """dL/dW = d x^T and dL/db = d for the first linear layer, so x = dW_j / db_j: exact, in no search at all."""
    for first in range(3):
        made = victim(first=first)
        seen = limited(made, FIRST).target
        row = int(seen["body.fc1.bias"].abs().argmax())
        x = (seen["body.fc1.weight"][row] / seen["body.fc1.bias"][row]).reshape(made.x.shape)
        assert float((x - made.x.double()).abs().max()) < 1e-5
        assert label_rules.of_one_image(limited(made, FIRST)) is None
        assert label_rules.of_one_image(limited(made, LAST)) == made.y


SEARCH: dict[str, Any] = {"iterations": 20, "restarts": 3, "rescue": 0}


def test_a_search_finds_the_image_from_the_first_layer_and_not_from_five_features():
    """16 pixels through 5 features: the last layer's gradient gives the features, and many images have the same ones."""
    for first in range(3):
        made = victim(first=first)
        one, other = (
            attack("idlg", limited(made, view, labels=made.y), labels="known", **SEARCH) for view in (FIRST, LAST)
        )
        assert made.psnr(one.x) >= 40
        assert other.objective < 1e-6
        assert made.psnr(other.x) <= 15


def test_the_last_layer_alone_is_enough_where_features_outnumber_pixels(run: api.Run):
    """The run's network has 256 features of 16 pixels. The label follows from the last layer by rule."""
    search = {"iterations": 20, "restarts": 3, "settings": {"rescue": 0}}
    for row in rows(run, "idlg", visible=LAST, **search):
        assert (row["label_correct"], row["labels"]) == ("1", "restore")
        assert float(row["psnr_capped"]) >= 40


# --- options, rows and refusals


def rows(run: api.Run, name: str, **options: Any) -> list[dict[str, str]]:
    scores = api.attack(run, name, **(QUICK | options))
    assert isinstance(scores, api.Scores)
    with (scores.path / "scores.csv").open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


def test_rows_and_attack_json_say_what_was_seen(run: api.Run):
    (first, _), (other, _) = (rows(run, "ig", iterations=1, visible=v) for v in (f"{LAST}, {FIRST}", None))
    assert first["reason"] == "visible alone: head.*, body.fc1.*"
    assert other["reason"] == ""
    said = {json.loads(f.read_text())["visible"] and 1 for f in run.path.glob("attacks/*/attack.json")}
    assert said == {None, 1}
    assert len(list(run.path.glob("attacks/*"))) == 2  # side by side


def test_all_items_by_a_pattern_are_all_items(run: api.Run):
    (a, _), (b, _) = (rows(run, "ig", iterations=5, visible=v) for v in ("*", None))
    assert (a["objective"], a["psnr"]) == (b["objective"], b["psnr"])


@pytest.mark.parametrize("text", ["head.wieght", "head.*,fc9.*", "", "head.weight,", "HEAD.*"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_names(
    run: api.Run, capsys: pytest.CaptureFixture[str], text: str
):
    assert main(["attack", "ig", str(run.path), "--lpips", "none", "--visible", text]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert "matches no item of the upload" in line
    assert "Its items: body.fc1.weight, body.fc1.bias, " in line
    assert list(run.path.joinpath("attacks").iterdir()) == []


def test_an_update_from_elsewhere_is_limited_as_well(tmp_path: Path):
    from tests.attacks.test_elsewhere import GIVEN, Client

    client = Client(tmp_path).train()
    where = {"before": client.before, "after": client.after, "model": toys.tiny_module()}
    with pytest.raises(ConfigError, match="matches no item of the upload"):
        api.attack_update("idlg", **where, out=tmp_path / "out", visible="fc7*", **GIVEN)
    found = api.attack_update(
        "idlg", **where, out=tmp_path / "out", visible=LAST, iterations=1, restarts=1, settings={"rescue": 0}, **GIVEN
    )
    assert found.labels is not None
    assert found.labels.tolist() == client.labels.tolist()
