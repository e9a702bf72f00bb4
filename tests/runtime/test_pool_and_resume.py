"""Same bits on any executor, and after any interruption."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import pflsec
from pflsec import api
from pflsec.core import registry
from pflsec.core.errors import RunError, TrainingError
from pflsec.runtime import checkpoint
from pflsec.runtime.executor import Job
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.pool import Arena, Processes, take
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup
from tests import toys

OPTIONS: dict[str, Any] = {
    "model": "mlp",
    "clients": 5,
    "rounds": 3,
    "alpha": 1.0,
    "batch_size": 40,
    "participation": 0.8,
    "drop_rate": 0.25,
    "capture_rounds": "first,last",
    "capture_clients": "0,1",
    "victims": 1,
}
TIMES = ("seconds", "seconds_train", "seconds_eval")


def setup(algo: str, **more: Any) -> Setup:
    return api.plan_training(OPTIONS | {"algo": algo} | more)


def contents(run: pflsec.Run) -> dict[str, bytes]:
    """Return all that a run wrote except run.json, clocks and locks."""
    found = {
        str(p.relative_to(run.path)): p.read_bytes()
        for p in sorted(run.path.rglob("*"))
        if p.is_file() and p.name not in ("run.json", "metrics.jsonl", ".lock")
    }
    metrics = run.metrics.drop(columns=[c for c in TIMES if c in run.metrics])
    return found | {"metrics": metrics.to_json().encode()}


@pytest.fixture(scope="module")
def pool_setup() -> Setup:
    return setup("fedrep")


@pytest.mark.parametrize("algo", registry.names("algorithms"))
def test_a_resumed_run_equals_an_uninterrupted_one(algo: str, tmp_path: Path):
    whole = api.run_training(setup(algo), name="whole", runs_dir=tmp_path)
    with pytest.raises(toys.Stop):
        api.run_training(setup(algo), name="cut", runs_dir=tmp_path, on_round=toys.stopping(1))
    assert api.load_run("cut", tmp_path).manifest["state"] == "failed"
    resumed = api.resume("cut", runs_dir=tmp_path)
    assert resumed.manifest["state"] == "done"
    assert contents(resumed) == contents(whole)


def test_a_private_run_resumes_with_the_noise_and_the_accounts_it_had(tmp_path: Path):
    more = {"defense": ["dp-sgd:noise_multiplier=1.0"], "dp_seed": 4}
    whole = api.run_training(setup("fedavg", **more), name="whole", runs_dir=tmp_path)

    with pytest.raises(toys.Stop):
        api.run_training(setup("fedavg", **more), name="cut", runs_dir=tmp_path, on_round=toys.stopping(0))
    assert contents(api.resume("cut", runs_dir=tmp_path)) == contents(whole)


@pytest.mark.parametrize("algo", ["fedproto", "perfedavg", "fedala"])
def test_workers_give_the_bits_of_the_serial_executor(algo: str, tmp_path: Path):
    """Of prototypes, of a model that is fitted before it is tested, and of a loop that stops on its loss."""
    serial = api.run_training(setup(algo), name="serial", runs_dir=tmp_path)
    for workers in (1, 3):
        made = setup(algo, workers=workers)
        run = api.run_training(made, name=f"workers{workers}", runs_dir=tmp_path, executor="processes")
        assert contents(run) == contents(serial)


def test_a_killed_run_resumes_exactly(tmp_path: Path):
    """kill -9 at some moment of training: nothing may be half-written."""
    command = [
        sys.executable,
        "-m",
        "pflsec.cli.app",
        "train",
        "--algo",
        "scaffold",
        "--model",
        "mlp",
        "--clients",
        "5",
    ]
    command += ["--alpha", "1", "--runs-dir", str(tmp_path), "--capture-rounds", "0,20", "--victims", "1"]
    subprocess.run([*command, "--rounds", "21", "--name", "whole"], check=True, capture_output=True)
    victim = subprocess.Popen([*command, "--rounds", "21", "--name", "killed"], stderr=subprocess.DEVNULL)
    folder = tmp_path / "killed" / "checkpoints"
    while victim.poll() is None and len(list(folder.glob("*.json"))) < 2:
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    assert api.load_run("killed", tmp_path).manifest["state"] == "running"
    resumed = api.resume("killed", runs_dir=tmp_path)
    assert contents(resumed) == contents(api.load_run("whole", tmp_path))


@pytest.mark.parametrize("room", [8, 16, 24])
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_where_there_is_room(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The disk is full after so many files, wherever that is: in captures, logs or checkpoints."""
    whole = api.run_training(setup("scaffold"), name="whole", runs_dir=tmp_path)
    written, fsync = [0], os.fsync

    def full(handle: int) -> None:
        written[0] += 1
        if written[0] > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*No space left on device"):
        api.run_training(setup("scaffold"), name="cut", runs_dir=tmp_path)
    monkeypatch.setattr(os, "fsync", fsync)
    assert not list((tmp_path / "cut").rglob(".*.*"))  # no half file is left
    assert contents(api.resume("cut", runs_dir=tmp_path)) == contents(whole)


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path):
    whole = api.run_training(setup("fedavg"), name="whole", runs_dir=tmp_path)
    wanted = contents(whole)
    newest = max(whole.path.glob("checkpoints/*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:100])
    folder = RunFolder(whole.path)
    folder.write_manifest(folder.manifest() | {"state": "interrupted"})
    with pytest.warns(match="damaged"):
        again = api.resume("whole", runs_dir=tmp_path)
    assert contents(again) == wanted


def test_with_all_checkpoints_damaged_the_run_is_refused(tmp_path: Path):
    run = api.run_training(setup("fedavg"), name="run", runs_dir=tmp_path)
    for path in run.path.glob("checkpoints/*.safetensors"):
        path.write_bytes(b"")
    with pytest.warns(match="damaged"), pytest.raises(RunError, match="all its checkpoints are damaged"):
        checkpoint.newest(RunFolder(run.path))


def test_only_the_newest_two_checkpoints_are_kept(tmp_path: Path):
    run = api.run_training(setup("fedavg"), name="run", runs_dir=tmp_path)
    names = sorted(p.name for p in run.path.glob("checkpoints/*"))
    assert names == [f"round-{t:06d}.{end}" for t in (2, 3) for end in ("json", "safetensors")]


def test_a_complete_run_is_not_resumed(tmp_path: Path):
    api.run_training(setup("fedavg"), name="run", runs_dir=tmp_path)
    with pytest.raises(RunError, match="complete"):
        api.resume("run", runs_dir=tmp_path)


def test_a_run_that_another_process_trains_is_refused(tmp_path: Path):
    run = api.run_training(setup("fedavg"), name="run", runs_dir=tmp_path)
    folder = RunFolder(run.path)
    with checkpoint.alone(folder), pytest.raises(RunError, match="another process"), checkpoint.alone(folder):
        pass


def test_a_dead_worker_is_an_error_that_names_the_client(pool_setup: Setup):
    run = Federated(pool_setup)
    pool = Processes(pool_setup, 1)
    try:
        jobs = [Job(0, 3, run.states[3], pool_setup.algorithm.downlink(run.server, 3))]
        assert [o.client for o in pool.run(jobs)] == [3]
        pool.workers[0].process.kill()
        with pytest.raises(TrainingError, match="round 0, client 3: the worker process died"):
            list(pool.run(jobs))
    finally:
        pool.close()


def test_what_a_client_raises_in_a_worker_keeps_its_kind_and_text(pool_setup: Setup):
    pool = Processes(pool_setup, 1)
    try:
        bad = Job(2, 1, {"head.weight": torch.full((10, 256), torch.nan), "head.bias": torch.zeros(10)}, {})
        run = Federated(pool_setup)
        bad = Job(2, 1, bad.state, pool_setup.algorithm.downlink(run.server, 1))
        with pytest.raises(TrainingError, match=r"round 2, client 1: .* not finite"):
            list(pool.run([bad]))
    finally:
        pool.close()


def test_an_arena_keeps_values_shapes_and_dtypes_and_writes_equal_tensors_once():
    shared = torch.randn(1000)
    items = {"a": shared, "b": shared.detach(), "c": torch.tensor(3), "d": torch.zeros(0, 4), "e": torch.tensor([True])}
    arena = Arena(0)
    try:
        places = arena.write(items)
        assert places is not None
        found = take(arena.block, places)
        assert all(torch.equal(found[k], v) and found[k].dtype == v.dtype for k, v in items.items())
        assert arena.used < 2 * 4000
        assert arena.write({"big": torch.zeros(10**6)}) is None
    finally:
        arena.close()
