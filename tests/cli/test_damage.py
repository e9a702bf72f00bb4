"""Runs that are incomplete, damaged, foreign or of another version: one line, and earlier results stay as they are."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pflsec.core.items import Items
from pflsec.core.tensors import read_items, to_bytes, write_items
from pflsec.wire.capture import capture_id
from tests.cli.conftest import QUICK, Cli, Damage, tree

CAPTURE = "captures/r000-c00-v0-probe.json"
ATTACK = ("attack", "ig", "fedavg", *QUICK)


def edit(path: Path, **changes: Any) -> None:
    """Change a JSON file's fields; None removes one."""
    facts = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in facts.items() if v is not None}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rename(run: Path, **place: int) -> None:
    """Change a capture's place, and its name with it."""
    edit(run / CAPTURE, **place)
    facts = json.loads((run / CAPTURE).read_text())
    own = capture_id(facts["round"], facts["client"], facts["victim"], facts["kind"])
    edit(run / CAPTURE, id=own)
    (run / CAPTURE).rename(run / f"captures/{own}.json")


def blobs(run: Path) -> list[Path]:
    return sorted((run / "captures/blobs").iterdir())


def message(run: Path, way: str, change: Callable[[Items], Items]) -> None:
    """Change a message of the first capture, with its hash and its list in the header set right: a file that was made."""
    header = json.loads((run / CAPTURE).read_text())
    blob = run / "captures/blobs" / f"{header['messages'][way]}.safetensors"
    items = change(read_items(blob, "message"))
    data = to_bytes(items)
    name = hashlib.sha256(data).hexdigest()
    blob.with_name(f"{name}.safetensors").write_bytes(data)
    listed = [{"name": k, "shape": list(v.shape), "dtype": str(v.dtype)} for k, v in items.items()]
    edit(run / CAPTURE, messages=header["messages"] | {way: name}, items=header["items"] | {way: listed})


def without(name: str) -> Callable[[Items], Items]:
    return lambda items: {k: v for k, v in items.items() if k != name}


def with_value(name: str, value: float) -> Callable[[Items], Items]:
    """Return the change of one number of an item."""

    def change(items: Items) -> Items:
        items[name].view(-1)[0] = value
        return items

    return change


def truth(run: Path, **items: torch.Tensor) -> None:
    """Change items of the first victim's truth."""
    path = run / "vault/r000-c00-v0-probe.safetensors"
    write_items(path, read_items(path, "truth") | items)


def inputs(run: Path, **changes: Any) -> None:
    """Change the description of the inputs in run.json."""
    facts = json.loads((run / "run.json").read_text())
    facts["data"]["input"] |= changes
    (run / "run.json").write_text(json.dumps(facts))


def configured(run: Path, **changes: Any) -> None:
    """Change the configuration in run.json."""
    edit(run / "run.json", config=json.loads((run / "run.json").read_text())["config"] | changes)


ONES = torch.ones(10)
BEFORE_THE_ATTACK: dict[str, tuple[Damage, str]] = {
    "no run.json": (lambda run: (run / "run.json").unlink(), "does not exist"),
    "run.json is a folder": (lambda run: ((run / "run.json").unlink(), (run / "run.json").mkdir()), "does not exist"),
    "truncated run.json": (lambda run: truncate(run / "run.json"), "run.json is damaged or truncated"),
    "empty run.json": (lambda run: (run / "run.json").write_text(""), "run.json is damaged or truncated"),
    "binary run.json": (lambda run: (run / "run.json").write_bytes(b"\xff\xfe"), "run.json is damaged or truncated"),
    "deep run.json": (lambda run: (run / "run.json").write_text("[" * 100_000), "run.json is damaged or truncated"),
    "run.json is a list": (lambda run: (run / "run.json").write_text("[1]"), "has schema version None"),
    "run of another version": (lambda run: edit(run / "run.json", schema=99), "has schema version 99"),
    "run without configuration": (lambda run: edit(run / "run.json", config=None), "run.json lacks or garbles 'config'"),
    "run with words as configuration": (lambda run: edit(run / "run.json", config="abc"), "run.json lacks or garbles"),
    "run without data": (lambda run: edit(run / "run.json", data=None), "run.json lacks or garbles 'data'"),
    "run of an unknown method": (lambda run: edit(run / "run.json", config={"algo": "nope"}), "'nope' is not known"),
    "run with a rate that is none": (
        lambda run: edit(run / "run.json", config={"algo": "fedavg", "lr": "x"}), "lr is 'x'"),
    "no captures": (lambda run: shutil.rmtree(run / "captures"), "it has: none at all. Train again"),
    "captures is a file": (
        lambda run: (shutil.rmtree(run / "captures"), (run / "captures").write_text("x")), "none at all"),
    "truncated capture": (lambda run: truncate(run / CAPTURE), "r000-c00-v0-probe.json is damaged or truncated"),
    "empty capture": (lambda run: (run / CAPTURE).write_text('{"schema": 1}'), "header lacks or garbles 'round'"),
    "capture is a list": (lambda run: (run / CAPTURE).write_text("[]"), "has schema version None"),
    "capture of another version": (lambda run: edit(run / CAPTURE, schema=2), "has schema version 2"),
    "capture without kind": (lambda run: edit(run / CAPTURE, kind=None), "header lacks or garbles 'kind'"),
    "capture with a word as round": (lambda run: edit(run / CAPTURE, round="one"), "header lacks or garbles"),
    "capture of a negative round": (lambda run: edit(run / CAPTURE, round=-1), "garbles 'round', which is -1"),
    "capture with a negative rate": (lambda run: edit(run / CAPTURE, lr=-1.0), "has the learning rate -1.0"),
    "capture of a larger batch": (lambda run: edit(run / CAPTURE, batch=2), "capture 'r000-c00-v0-probe'"),
    "capture of a huge batch": (lambda run: edit(run / CAPTURE, batch=10**9), "capture 'r000-c00-v0-probe'"),
    "capture of other images": (
        lambda run: edit(run / CAPTURE, input={"shape": [1, 4, 4], "classes": 10, "mean": [0.1], "std": [1.0]}),
        "other inputs, batches or steps",
    ),
    "capture without messages": (lambda run: edit(run / CAPTURE, messages=None), "header lacks or garbles 'messages'"),
    "capture under another name": (
        lambda run: (run / CAPTURE).rename(run / "captures/r000-c07-v0-probe.json"), "its header is that of"),
    "missing messages": (lambda run: [blob.unlink() for blob in blobs(run)], "is missing"),
    "truncated messages": (lambda run: [truncate(blob) for blob in blobs(run)], "hash differs"),
    "captures of another run": (
        lambda run: (shutil.rmtree(run / "captures"), shutil.copytree(run.parent / "fedrep/captures", run / "captures")),
        "was made by fedrep; this run trains fedavg",
    ),
    "capture of version true": (lambda run: edit(run / CAPTURE, schema=True), "has schema version True"),
    "capture of round true": (lambda run: edit(run / CAPTURE, round=True), "garbles 'round', which is 'True'"),
    "capture of a huge round": (lambda run: edit(run / CAPTURE, round=10**30), "garbles 'round'"),
    "capture of a round too many": (lambda run: edit(run / CAPTURE, round=9), "its header is that of 'r009-c00"),
    "capture of a client that is none": (lambda run: rename(run, client=99), "client 99; the run has clients 0 to 3"),
    "capture of a victim that is none": (lambda run: rename(run, victim=5), "victim 5; the run has victims 0 to 0"),
    "capture of a round that is none": (lambda run: rename(run, round=7), "round 7; the run has rounds 0 to 0"),
    "capture of another kind": (lambda run: edit(run / CAPTURE, kind="update"), "is that of 'r000-c00-v0-update'"),
    "capture of no kind": (lambda run: edit(run / CAPTURE, kind="prob"), "garbles 'kind', which is 'prob'"),
    "capture of a batch true": (lambda run: edit(run / CAPTURE, batch=True), "garbles 'batch'"),
    "capture of a batch and a half": (lambda run: edit(run / CAPTURE, batch=1.5), "garbles 'batch', which is '1.5'"),
    "capture of huge minibatches": (lambda run: edit(run / CAPTURE, batch_size=10**6), "other inputs, batches or steps"),
    "capture with the rate true": (lambda run: edit(run / CAPTURE, lr=True), "garbles 'lr'"),
    "capture with another rate": (lambda run: edit(run / CAPTURE, lr=0.2), "learning rate 0.2; run 'fedavg' had 0.05"),
    "capture with a word as switch": (
        lambda run: edit(run / CAPTURE, personal_equals_public="false"), "garbles 'personal_equals_public'"),
    "upload without an item": (lambda run: message(run, "up", without("head.bias")), "a message without head.bias"),
    "downlink without an item": (lambda run: message(run, "down", without("head.bias")), "a message without head.bias"),
    "upload with an item": (lambda run: message(run, "up", lambda up: up | {"x": ONES}), "sent the item 'x' [10]"),
    "downlink with an item": (
        lambda run: message(run, "down", lambda down: down | {"x": ONES}), "was sent the item 'x' [10]"),
    "upload of another shape": (
        lambda run: message(run, "up", lambda up: up | {"head.bias": torch.ones(11)}), "[11]; it must be [10]"),
    "upload of integers": (
        lambda run: message(run, "up", lambda up: up | {"head.bias": ONES.long()}), "is torch.int64; weights are floating"),
    "upload of complex numbers": (
        lambda run: message(run, "up", lambda up: up | {"head.bias": ONES.to(torch.complex64)}), "is torch.complex64"),
    "upload with a NaN": (
        lambda run: message(run, "up", with_value("head.bias", math.nan)), "'head.bias' of its uplink holds a NaN"),
    "upload with an infinity": (
        lambda run: message(run, "up", with_value("head.bias", -math.inf)), "'head.bias' of its uplink holds a NaN"),
    "downlink with a NaN": (
        lambda run: message(run, "down", with_value("body.fc1.weight", math.nan)), "of its downlink holds a NaN"),
    "memory with a NaN": (
        lambda run: message(run, "memory", lambda memory: {"x": ONES * math.nan}), "memory of earlier messages holds a NaN"),
    "run with another model": (lambda run: configured(run, model="cnn"), "a message without body.conv1.bias"),
    "run with another cut": (lambda run: configured(run, split="fc1"), "the item 'body.fc1.weight'"),
    "run with other classes": (lambda run: inputs(run, classes=11), "other inputs, batches or steps"),
    "run with huge images": (lambda run: inputs(run, shape=[1, 10**9, 10**9]), "description of the inputs is damaged"),
    "run with large images": (lambda run: inputs(run, shape=[1, 60000, 60000]), "other inputs, batches or steps"),
    "run with a channel true": (lambda run: inputs(run, shape=[True, 8, 8]), "description of the inputs is damaged"),
    "truth of other images": (lambda run: truth(run, x=torch.zeros(1, 1, 9, 9)), "'x' is [1, 1, 9, 9]"),
    "truth of a larger batch": (
        lambda run: truth(run, x=torch.zeros(2, 1, 8, 8), y=torch.zeros(2).long(), dataset_index=torch.zeros(2).long()),
        "the capture is of [1, 1, 8, 8]",
    ),
    "truth of no class": (lambda run: truth(run, y=torch.tensor([10])), "'y' holds [10]; labels lie in 0 to 9"),
    "truth with a NaN": (lambda run: truth(run, x=torch.full((1, 1, 8, 8), math.nan)), "'x' holds a NaN"),
    "truth of an image that is none": (lambda run: truth(run, dataset_index=torch.tensor([10**9])), "lacks the victim's"),
    "truth with private items": (lambda run: truth(run, **{"state.x": ONES}), "are not those of the method (first: 'x')"),
    "check that is negative": (
        lambda run: edit(run / "vault/r000-c00-v0-probe.json", replay_residual=-1), "replay_residual must be"),
    "pool of other images": (
        lambda run: write_items(run / "vault/pool.safetensors", {
            "images": torch.zeros(3, 1, 4, 4), "mean": torch.zeros(1, 4, 4), "dataset_index": torch.arange(3)}),
        "the pool's images are [1, 4, 4]",
    ),
    "truncated pool": (lambda run: truncate(run / "vault/pool.safetensors"), "pool of candidate images is damaged"),
    "missing truth": (lambda run: (run / "vault/r000-c01-v0-probe.safetensors").unlink(), "truth of capture r000-c01"),
    "truncated truth": (lambda run: truncate(run / "vault/r000-c01-v0-probe.safetensors"), "truth of capture r000-c01"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "says"), BEFORE_THE_ATTACK.values(), ids=list(BEFORE_THE_ATTACK))
def test_a_damaged_run_is_refused_in_one_line_before_any_work(
    cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, says: str
):
    damage(runs / "fedavg")
    before = tree(runs)
    monkeypatch.setattr("pflsec.runtime.attacking.attempt", None)
    assert says in cli.mistake(*ATTACK)
    assert tree(runs) == before


RUN_JSON = [name for name in BEFORE_THE_ATTACK if "run.json" in name or name.startswith("run of another version")]


@pytest.mark.parametrize("name", RUN_JSON)
def test_every_command_refuses_a_run_without_a_readable_description(cli: Cli, runs: Path, name: str):
    damage, _ = BEFORE_THE_ATTACK[name]
    damage(runs / "fedavg")
    for words in (("report", "fedavg"), ("train", "--resume", "fedavg")):
        cli.mistake(*words)
    if name not in ("no run.json", "run.json is a folder"):
        assert "run 'fedavg'" in cli.mistake("show", "runs/fedavg")
        row, other = json.loads(cli.succeed("list", "runs", "--json").out)
        assert (row["run"], row["state"], other["state"]) == ("fedavg", "damaged", "done")


@pytest.mark.parametrize(
    "changes",
    [{"model": {"name": "mlp", "parameters": "many"}}, {"state": {}}, {"wire": None}, {"config": 3}, {"data": {}}],
    ids=str,
)
def test_a_description_with_garbled_parts_is_shown_in_no_part(cli: Cli, runs: Path, changes: dict[str, Any]):
    edit(runs / "fedavg/run.json", **changes)
    assert "run.json lacks or garbles" in cli.mistake("show", "runs/fedavg")


@pytest.fixture
def attacked(cli: Cli, runs: Path) -> dict[str, bytes | None]:
    """The results of an attack on the run `fedavg`, as they were written."""
    cli.succeed(*ATTACK)
    return tree(runs / "fedavg/attacks")


@pytest.mark.parametrize("name", ["truncated messages", "missing truth", "captures of another run", "empty run.json"])
def test_earlier_results_outlive_a_later_attack_that_fails(cli: Cli, runs: Path, attacked: dict[str, bytes], name: str):
    damage, says = BEFORE_THE_ATTACK[name]
    damage(runs / "fedavg")
    assert says in cli.mistake(*ATTACK)
    assert tree(runs / "fedavg/attacks") == attacked


@pytest.mark.parametrize("file", ["metrics.jsonl", "clients.csv"])
def test_garbled_numbers_of_training_are_named_and_the_attacks_results_kept(
    cli: Cli, runs: Path, attacked: dict[str, bytes], file: str
):
    (runs / "fedavg" / file).write_text("garbage\nmore garbage\n")
    for words in (("report", "fedavg"), ATTACK):
        assert f"{file} is damaged" in cli.mistake(*words, announced=True)
    assert sorted(tree(runs / "fedavg/attacks")) == sorted(attacked)


def test_a_damaged_attack_is_named_and_mended_by_running_it_again(cli: Cli, runs: Path, attacked: dict[str, bytes]):
    (folder,) = (runs / "fedavg/attacks").iterdir()
    truncate(folder / "attack.json")
    assert "attack.json is damaged or truncated" in cli.mistake("report", "fedavg")
    cli.succeed(*ATTACK)
    assert json.loads((folder / "attack.json").read_text())["state"] == "done"
    cli.succeed("report", "fedavg")


def test_without_a_vault_everything_goes_on_and_nothing_is_scored(cli: Cli, runs: Path):
    shutil.rmtree(runs / "fedavg/vault")
    (found,) = json.loads(cli.succeed(*ATTACK, "--json").out)
    assert {row["reason"] for row in found["scores"]} == {"not scored: the run has no vault"}
    assert {row["psnr"] for row in found["scores"]} == {None}
    assert {row["attack_valid"] for row in found["scores"]} == {None}
    cli.succeed(*ATTACK)
    cli.succeed("report", "fedavg")
    assert "truth of capture" in cli.mistake(*ATTACK, "--knowledge", "oracle", announced=True)


def test_files_that_are_not_runs_are_left_out_of_the_list(cli: Cli, runs: Path):
    runs.joinpath("notes.txt").write_text("x")
    runs.joinpath("empty").mkdir()
    assert [row["run"] for row in json.loads(cli.succeed("list", "runs", "--json").out)] == ["fedavg", "fedrep"]


def test_a_run_that_cannot_be_written_to_is_said_in_one_line(cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch):
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pflsec.core.tensors.write_bytes", full)
    said = cli.mistake(*ATTACK, announced=True)
    assert "No space left on device" in said
    assert "reconstructions.safetensors" in said
