"""Ray: the bits of the serial executor, and errors as they were raised. Skipped where Ray is not installed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pflsec import api
from pflsec.core.errors import ConfigError, TrainingError
from pflsec.runtime import cluster
from pflsec.runtime.cluster import Cluster
from pflsec.runtime.executor import Job
from pflsec.runtime.rounds import Federated
from tests.runtime.test_pool_and_resume import contents, setup


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster of this machine, shared by the tests."""
    found = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pflsec[ray]'")
    leave = cluster.join(2)
    yield found
    leave()


def test_without_ray_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'pflsec\[ray\]'"):
        api.run_training(setup("fedavg"), name="run", runs_dir=tmp_path, executor="ray")


@pytest.mark.parametrize("algo", ["fedrep", "fedproto"])
def test_a_run_on_a_cluster_has_the_bits_of_a_serial_one(ray: Any, algo: str, tmp_path: Path):
    alone = api.run_training(setup(algo), name="serial", runs_dir=tmp_path)
    together = api.run_training(setup(algo), name="ray", runs_dir=tmp_path, executor="ray")
    assert contents(together) == contents(alone)
    tables = [api.attack(run, "idlg", restarts=1, iterations=20, executor=how).table  # type: ignore[union-attr]
              for run, how in ((alone, "serial"), (together, "ray"))]  # fmt: skip
    clocks = ["run", "seconds"]
    assert tables[0].drop(columns=clocks).equals(tables[1].drop(columns=clocks))


def test_private_work_is_accounted_on_a_cluster(ray: Any, tmp_path: Path):
    options = {"defense": ["dp-sgd:epsilon=8"], "dp_seed": 1}
    alone = api.run_training(setup("fedavg", **options), name="serial", runs_dir=tmp_path)
    together = api.run_training(setup("fedavg", **options), name="ray", runs_dir=tmp_path, executor="ray")
    assert contents(together) == contents(alone)
    assert together.metrics["epsilon"].iloc[-1] > 0


def test_what_a_client_raises_arrives_as_it_was_raised(ray: Any):
    made = setup("fedavg")
    first, workers = Federated(made), Cluster(made, 1)
    try:
        with pytest.raises(TrainingError, match="round 0, client 1"):
            list(workers.run([Job(0, 1, first.states[1], {})]))
    finally:
        workers.close()


def test_a_worker_that_dies_is_replaced_and_its_task_done_again(ray: Any):
    made = setup("fedavg")
    first, workers = Federated(made), Cluster(made, 1)
    job = Job(0, 1, first.states[1], made.algorithm.downlink(first.server, 1))
    try:
        (before,) = workers.run([job])
        ray.kill(workers.workers[0], no_restart=False)
        (after,) = workers.run([job])
    finally:
        workers.close()
    assert all((before.done.up[k] == v).all() for k, v in after.done.up.items())
