"""Ray for many machines: local work, tests and attacks on the workers of a cluster, with the bits of the serial executor.

Joins the cluster of RAY_ADDRESS where that is set; else starts one on this machine alone, which ends with the run. Tasks are
pure, so one whose machine is lost is done again elsewhere. Data travel with the run: other machines need the package, not
the files. Bits are those of the serial executor where the processors are of one kind.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import torch

from pflsec.config.train import TrainConfig
from pflsec.core.errors import ConfigError, PflsecError, PflsecWarning, TrainingError, first_line
from pflsec.data.datasets import Dataset
from pflsec.runtime.executor import Parallel, Task, noting, warn_again
from pflsec.runtime.setup import Setup, prepare

TRIES = 3  # machines on which a task is tried before the run gives up

T = TypeVar("T")


def library() -> ModuleType:
    """Return Ray. Raises ConfigError where it is not installed."""
    try:
        return import_module("ray")
    except ImportError:
        raise ConfigError("--executor ray needs Ray, which is not installed: pip install 'pflsec[ray]'.") from None


def join(workers: int) -> Callable[[], None]:
    """Join the cluster of RAY_ADDRESS, or start one here with so many workers; return what leaves it again."""
    ray = library()
    if ray.is_initialized():  # by the program that calls us: not ours to end
        return lambda: None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports to its makers
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what goes wrong is raised as well
    address = os.environ.get("RAY_ADDRESS")
    local = {} if address else {"num_cpus": workers, "include_dashboard": False}
    try:
        ray.init(
            address=address or "local", log_to_driver=False, logging_level="ERROR", configure_logging=True, **local
        )
    except ConnectionError as error:
        raise ConfigError(f"no Ray cluster answers at RAY_ADDRESS {address}: {first_line(error)}.") from error
    return ray.shutdown


class Machine:
    """A worker: the same setup as the run's, on one thread."""

    def __init__(self, config: TrainConfig, dataset: Dataset):
        torch.set_num_threads(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PflsecWarning)  # the run has said it
            self.setup = prepare(config, dataset)

    def do(self, place: int, task: Task) -> tuple[int, Any, list[str]]:
        """Return the task's place, its result, and what it warned of."""
        return place, *noting(task, self.setup)


class Cluster(Parallel):
    """The executor that runs clients on the machines of a Ray cluster, the one with most data first."""

    def __init__(self, setup: Setup, workers: int):
        super().__init__(setup)
        self._leave = join(workers)
        ray = library()
        actor = ray.remote(num_cpus=1, max_restarts=TRIES - 1, max_task_retries=TRIES - 1)(Machine)
        self._dataset = ray.put(setup.federation.dataset)  # held for workers that are started again
        config = setup.config.model_copy(update={"executor": "serial"})
        self.workers = [actor.remote(config, self._dataset) for _ in range(workers)]

    def close(self) -> None:
        """End the workers, and the cluster where it is ours."""
        ray = library()
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        self._leave()

    def _do(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        ray, waiting = library(), self._shortest_first(tasks)
        idle, busy = list(self.workers), dict[Any, Any]()
        while waiting or busy:
            while waiting and idle:
                place, worker = waiting.pop(), idle.pop()
                busy[worker.do.remote(place, tasks[place])] = worker
            (ready,), _ = ray.wait(list(busy))
            idle.append(busy.pop(ready))
            place, result, notes = fetched(ready)
            warn_again(notes)
            yield place, result


def each(function: Callable[[Any], T], arguments: Sequence[Any], workers: int) -> Iterator[T]:
    """Yield function(argument) in order, computed on the cluster. What it reads from disk must be there on all machines."""
    leave, ray = join(workers), library()
    try:
        remote = ray.remote(num_cpus=1, max_retries=TRIES - 1)(function)
        yield from map(fetched, [remote.remote(argument) for argument in arguments])
    finally:
        leave()


def fetched(reference: Any) -> Any:
    """Return a result from the cluster. Raises our own errors as they were raised there; TrainingError for lost machines."""
    ray = library()
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PflsecError):
            raise type(error.cause)(str(error.cause)) from error
        raise
    except ray.exceptions.RayError as error:
        raise TrainingError(
            f"{TRIES} machines of the Ray cluster died over one task: {first_line(error)} Rounds that were finished are kept: "
            "continue with --resume, or use fewer --workers."
        ) from error
