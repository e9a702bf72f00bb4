"""Updates that no run of ours has made: torch's own optimiser trains, two files of weights are all that there is."""

import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.image import imread
from safetensors.torch import save_file
from torch import nn

from pflsec import api
from pflsec.core.errors import PflsecError
from pflsec.core.tensors import read_items
from pflsec.reports import figures
from tests import toys

GIVEN: dict[str, Any] = {"shape": toys.SHAPE, "classes": toys.CLASSES, "lr": 0.1, "lpips": "none"}
QUICK: dict[str, Any] = {"iterations": 3, "restarts": 1, "settings": {"rescue": 0}}
SEARCH: dict[str, Any] = {"iterations": 20, "restarts": 3, "settings": {"rescue": 0}}


@pytest.fixture(autouse=True)
def _no_sheets(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all the rest; one test draws its own."""
    monkeypatch.setattr(figures, "write_sheet", lambda *arguments: None)


def pictures(count: int, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return 8-bit toy images [count, 1, 4, 4], and their labels."""
    data = toys.dataset()
    return data.images[first : first + count], data.labels[first : first + count]


class Client:
    """Somebody's client: torch's SGD on the mean cross entropy of all its images, and what it leaves on disk."""

    def __init__(
        self, folder: Path, count: int = 1, first: int = 0, module: Callable[[], nn.Module] = toys.tiny_module
    ):
        self.folder, self.module = folder, module
        self.images, self.labels = pictures(count, first)
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.model = module()
        self.before, self.after, self.truth = (
            folder / name for name in ("a.safetensors", "b.safetensors", "truth.npz")
        )
        np.savez(self.truth, images=self.images, labels=self.labels)

    def train(self, steps: int = 1, mean: float = 0.0, std: float = 1.0, weight_decay: float = 0.0) -> "Client":
        save_file(self.model.state_dict(), self.before)
        x = (torch.from_numpy(self.images) / 255 - mean) / std
        sgd = torch.optim.SGD(self.model.parameters(), lr=0.1, weight_decay=weight_decay)
        for _ in range(steps):
            sgd.zero_grad()
            F.cross_entropy(self.model(x), torch.from_numpy(self.labels)).backward()
            sgd.step()
        save_file(self.model.state_dict(), self.after)
        return self

    def attack(self, name: str = "idlg", **options: Any) -> api.Found:
        common = {"before": self.before, "after": self.after, "model": self.module(), "out": self.folder / "out"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return api.attack_update(name, **(common | GIVEN | options))

    def doubts(self, **options: Any) -> list[str]:
        out = self.folder / f"doubts{len(list(self.folder.iterdir()))}"
        return self.attack(out=out, **(QUICK | options)).doubts


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path).train()


# --- what is found


@pytest.mark.parametrize("name", ["dlg", "idlg"])
def test_the_image_behind_torchs_own_step_is_found(client: Client, name: str):
    found = client.attack(name, **SEARCH, truth=client.truth)
    assert found.scores is not None
    assert found.scores["psnr"] >= 40
    assert found.scores["attack_valid"] is True
    assert found.labels is not None
    assert found.labels.tolist() == client.labels.tolist()
    assert found.doubts == []


def test_several_images_and_steps_are_unrolled(tmp_path: Path):
    client = Client(tmp_path, count=2).train(steps=3)
    options = {"images": 2, "steps": 3, "knowledge": "wire+labels", "known_labels": client.labels.tolist()}
    found = client.attack("dlg", iterations=40, restarts=4, settings={"rescue": 0}, truth=client.truth, **options)
    assert found.scores is not None
    assert (found.scores["attack_valid"], found.scores["steps"], found.scores["labels"]) == (True, 3, "known")
    assert found.scores["psnr"] >= 30


def test_another_image_is_not_found_and_the_row_says_that_the_truth_does_not_fit(client: Client):
    np.savez(client.truth, images=pictures(1, first=3)[0], labels=client.labels)
    found = client.attack(**SEARCH, truth=client.truth)
    assert found.scores is not None
    assert found.scores["psnr"] < 25
    assert found.scores["attack_valid"] is False
    assert "misses what was sent" in found.scores["reason"]


def test_our_names_and_torchs_give_the_same_bits(client: Client):
    torchs = client.attack(**QUICK)
    names = {
        "fc1.weight": "body.fc1.weight",
        "fc1.bias": "body.fc1.bias",
        "fc.weight": "head.weight",
        "fc.bias": "head.bias",
    }
    for file in (client.before, client.after):
        save_file({names[k]: v for k, v in read_items(file, "weights").items()}, file)
    ours = client.attack(out=client.folder / "ours", **QUICK)
    assert torchs.images is not None
    assert ours.images is not None
    assert torch.equal(torchs.images, ours.images)


def test_truth_is_for_scoring_alone(client: Client):
    blind = client.attack(**QUICK)
    seen = client.attack(out=client.folder / "seen", truth=client.truth, **QUICK)
    assert blind.images is not None
    assert seen.images is not None
    assert torch.equal(blind.images, seen.images)
    assert blind.scores is None
    assert sorted(p.name for p in blind.path.iterdir()) == ["attack.json", "reconstructions.safetensors"]
    assert {p.name for p in seen.path.iterdir()} >= {"scores.csv", "images.csv"}
    for unknown in ("identified", "psnr_blind", "excess_psnr"):
        assert seen.scores is not None
        assert seen.scores[unknown] is None


def test_what_is_written_can_be_read_again(client: Client):
    found = client.attack(**QUICK)
    (picture,) = read_items(found.path / "reconstructions.safetensors", "reconstructions").values()
    assert found.images is not None
    assert torch.equal(picture, found.images)
    facts = json.loads((found.path / "attack.json").read_text())
    assert (facts["attack"], facts["update"]["lr"], facts["update"]["steps"]) == ("idlg", 0.1, 1)
    assert facts["result"]["label_found"] == client.labels.tolist()
    assert found.path.stat().st_mode & 0o077 == 0


def test_a_picture_is_drawn_with_a_row_more_where_the_truth_is_known(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    ways = {"alone": None, "scored": client.truth}
    alone, scored = (
        imread(client.attack(truth=truth, out=client.folder / name, **QUICK).path / "gallery.png")
        for name, truth in ways.items()
    )
    assert min(alone.std(), scored.std()) > 0.05  # neither is blank
    assert scored.shape[0] > 1.5 * alone.shape[0]


# --- BatchNorm


def normed(folder: Path, training: bool, steps: int = 1) -> Client:
    client = Client(folder, count=4, module=toys.normed_module)
    client.model.train(training)
    return client.train(steps)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("training", [True, False])
def test_batchnorm_is_replayed_in_the_clients_mode(tmp_path: Path, training: bool, steps: int):
    """torch's own training, with its count of batches in the files, is met by the replay of the truth."""
    client = normed(tmp_path, training, steps)
    found = client.attack(truth=client.truth, images=4, steps=steps, **QUICK)
    assert found.scores is not None
    assert found.scores["attack_valid"] is True
    assert [("evaluation mode" in doubt) for doubt in found.doubts] == [True] * (not training)


def test_the_count_of_batches_speaks_against_a_wrong_number_of_steps(tmp_path: Path):
    (doubt,) = normed(tmp_path, True, steps=2).doubts(images=4, steps=1, lr=0.2)
    assert "'bn.num_batches_tracked' counts 2 training steps, not 1" in doubt


def test_parameters_without_running_statistics_are_refused_by_name(tmp_path: Path):
    client = normed(tmp_path, True)
    save_file(dict(client.model.named_parameters()), client.after)
    with pytest.raises(PflsecError, match=r"lacks the running statistics 'bn.running_mean', .* whole state_dict"):
        client.attack(images=4)


def test_every_name_of_a_module_stands_for_an_item():
    """Of parameters and buffers alike, whatever the cut."""
    for split in (None, "fc1", "bn"):
        net, theirs = toys.normed(split), toys.normed_module().state_dict()
        assert sorted(net.names.values()) == sorted(net.shapes)
        assert set(net.names) == {name for name in theirs if not name.endswith("num_batches_tracked")}
        assert all(tuple(theirs[name].shape) == net.shapes[item] for name, item in net.names.items())
        assert all(item.endswith(name.rpartition(".")[2]) for name, item in net.names.items())


# --- what speaks against the description is said before the search


@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("count", [1, 3])
def test_a_right_description_raises_no_doubts(tmp_path: Path, first: int, count: int):
    client = Client(tmp_path, count, first).train(mean=0.5, std=0.25)
    assert client.doubts(mean=(0.5,), std=(0.25,), images=count) == []


def test_a_wrong_normalisation_is_named(tmp_path: Path):
    client = Client(tmp_path).train(mean=0.5, std=0.25)
    (doubt,) = client.doubts()
    assert "the normalisation is another one" in doubt
    (doubt,) = client.doubts(mean=(0.5,), std=(0.5,))  # (p - 0.5) / 0.25 read as (p - 0.5) / 0.5
    low, high = (2 * float(p) / 255 - 0.5 for p in (client.images.min(), client.images.max()))
    assert f"run from {low:.2f} to {high:.2f}" in doubt


def test_a_truth_that_does_not_replay_is_said_before_the_search(client: Client):
    session = api.UpdateSession(
        "idlg", before=client.before, after=client.after, model=toys.tiny_module(), out=client.folder / "out",
        truth=client.truth, options=GIVEN | QUICK | {"mean": (0.1,), "std": (1.0,)},
    )  # fmt: skip
    assert "misses what was sent" in session.doubts[-1]
    assert not session.out.exists()


@pytest.mark.parametrize("lr", [0.05, 0.3, 10.0])
def test_a_wrong_learning_rate_is_named_with_the_right_one(client: Client, lr: float):
    (doubt,) = client.doubts(lr=lr)
    assert f"fits a learning rate of 0.1, not {lr:g}" in doubt


def test_weight_decay_is_noticed(tmp_path: Path):
    assert any("does not sum to zero" in doubt for doubt in Client(tmp_path).train(weight_decay=0.5).doubts())


def test_a_gradient_that_is_larger_than_possible_is_noticed(tmp_path: Path):
    """Of three images' gradient nothing but its size can be checked: under cross entropy its bias part is at most 2."""
    client = Client(tmp_path, count=3).train()
    bias = (read_items(client.before, "before")["fc.bias"] - read_items(client.after, "after")["fc.bias"]).double()
    (doubt,) = client.doubts(images=3, lr=float(bias.abs().sum()) / 3)
    assert "has the size 3" in doubt


def test_two_images_that_are_called_one_are_noticed(tmp_path: Path):
    assert any("not that of one image" in doubt for doubt in Client(tmp_path, count=4).train().doubts())


# --- what cannot be attacked is refused in a line, and nothing is written


def changed(which: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Client], dict[str, Any]]:
    def damage(client: Client) -> dict[str, Any]:
        file = getattr(client, which)
        items = read_items(file, "weights")
        change(items)
        save_file(items, file)
        return {}

    return damage


def not_a_number(items: dict[str, torch.Tensor]) -> None:
    items["fc.bias"][1] = float("nan")


def as_pickle(client: Client, name: str) -> dict[str, Any]:
    (client.folder / name).write_bytes(pickle.dumps({"fc.bias": [1.0]}))
    return {"after": client.folder / name}


def told(**options: Any) -> Callable[[Client], dict[str, Any]]:
    return lambda client: options


REFUSED: list[tuple[Callable[[Client], dict[str, Any]], str]] = [
    (changed("before", lambda items: items.pop("fc1.bias")), "lacks 'fc1.bias'"),
    (changed("after", lambda items: items.update(extra=torch.ones(1))), "has 'extra', which the model does not have"),
    (changed("after", lambda items: items.update({"fc.bias": torch.ones(4)})), r"'fc.bias' in .* is \[4\]"),
    (changed("after", lambda items: items.update({"fc.bias": torch.ones(3).int()})), "is torch.int32"),
    (changed("after", not_a_number), "holds a NaN"),
    (lambda client: {"after": client.before}, "hold the same weights"),
    (lambda client: {"after": client.folder / "c.safetensors"}, "does not exist"),
    (lambda client: as_pickle(client, "c.pt"), "loading a pickle may run code"),
    (lambda client: as_pickle(client, "c.safetensors"), "no safetensors file"),
    (told(lr=0.0), "lr is 0"),
    (told(lr=float("nan")), "lr is nan"),
    (told(lr=1e-4), "Give a larger learning rate"),
    (told(classes=4), r"it is \[4, 5\]|it must return \[4\]"),
    (told(shape=(1, 5, 4)), "does not run on inputs"),
    (told(shape=(1, 4)), "shape"),
    (told(mean=(0.1, 0.2)), "mean has 2 values for 1 channels"),
    (told(std=(0.0,)), "std"),
    (told(images=3, batch_size=2, steps=3), "no whole number of epochs"),
    (told(steps=51), "unrolling stops at 50"),
    (told(known_labels=[0]), "--knowledge wire.labels"),
    (told(knowledge="wire+labels"), "give them with --known-labels"),
    (told(knowledge="wire+labels", known_labels=[3]), "labels end at 2"),
    (told(knowledge="wire+labels", known_labels=[0, 1]), "2 labels for 1 images"),
    (told(kind="probe"), "selects captures of a run"),
    (told(images_=3), "no setting 'images_'"),
    (told(model="lennet"), "did you mean lenet"),
    (told(truth="nothing.npz"), "does not exist"),
    (lambda client: {"images": 2, "truth": client.truth}, r"the images in .* are \[1, 1, 4, 4\]"),
    (lambda client: {"out": client.before}, "is there already"),
]


@pytest.mark.parametrize(("damage", "says"), REFUSED)
def test_what_cannot_be_attacked_is_refused_and_nothing_is_written(
    client: Client, damage: Callable[[Client], dict[str, Any]], says: str
):
    options = damage(client)
    before = sorted(client.folder.iterdir())
    with pytest.raises(PflsecError, match=says) as refusal:
        client.attack(**(QUICK | options))
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == 2
    assert sorted(client.folder.iterdir()) == before


def test_one_attack_at_a_time(client: Client):
    with pytest.raises(PflsecError, match="one attack at a time, not by dlg, idlg"):
        client.attack("dlg,idlg")
