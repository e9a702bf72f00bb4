"""Executors: who does the clients' local work. The result never depends on which one it is."""

import math
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pflsec.core.algorithm import Done
from pflsec.core.defense import Guard, Spend
from pflsec.core.errors import PflsecError, PflsecWarning, TrainingError
from pflsec.core.items import Items, first_nonfinite
from pflsec.runtime.defending import inside
from pflsec.runtime.feeding import Log, feed
from pflsec.runtime.setup import Setup
from pflsec.training.local import LocalWork, for_method

TEST_BATCH = 100  # larger batches leave the CPU's cache and are slower


@dataclass(frozen=True)
class Job:
    """One client's local work in one round."""

    round: int
    client: int
    state: Items
    down: Items
    guard: Guard | None = None

    @property
    def messages(self) -> tuple[Items, ...]:
        return self.state, self.down

    def carrying(self, state: Items, down: Items) -> "Job":
        return replace(self, state=state, down=down)

    def rows(self, setup: Setup) -> int:
        """Return the number of rows that are worked on."""
        return len(setup.federation.shards[self.client].train)

    def do(self, setup: Setup) -> "Outcome":
        return work(setup, self)


@dataclass(frozen=True)
class Outcome:
    """What a job gives back, and how it went. train_loss: the mean over its steps, None where no step had a row."""

    client: int
    done: Done
    train_loss: float | None
    steps: int
    seconds: float
    spent: tuple[Spend, ...] = ()

    @property
    def messages(self) -> tuple[Items, ...]:
        return self.done.state, self.done.up

    def carrying(self, state: Items, up: Items) -> "Outcome":
        return replace(self, done=Done(state, up))


@dataclass(frozen=True)
class Trial:
    """A model to be tested before round `round`: on one client's test rows, fitted to its own training rows first where
    the method does so; or as it is on the global test rows, where there is no client."""

    round: int
    client: int | None
    items: Items

    @property
    def messages(self) -> tuple[Items, ...]:
        return (self.items,)

    def carrying(self, items: Items) -> "Trial":
        return replace(self, items=items)

    def rows(self, setup: Setup) -> int:
        """Return the number of rows that are worked on."""
        federation = setup.federation
        return len(federation.global_test if self.client is None else federation.shards[self.client].test)

    def do(self, setup: Setup) -> "Score":
        return test(setup, self)


@dataclass(frozen=True)
class Score:
    """How many test rows a model got right, of how many."""

    correct: int
    rows: int

    @property
    def accuracy(self) -> float:
        """In [0, 1]."""
        return self.correct / self.rows

    @property
    def messages(self) -> tuple[Items, ...]:
        return ()

    def carrying(self) -> "Score":
        return self


Task = Job | Trial
"""What an executor does: items go in, items come out."""


def learning_rate(setup: Setup, t: int) -> float:
    """Return the learning rate of a round: a function of the round alone, the same for every participant."""
    return setup.config.rate(t)


def context(setup: Setup, t: int, client: int, guard: Guard | None = None) -> LocalWork:
    """Return the context of a client's local work in round t."""
    x, y = setup.federation.train(client)
    return LocalWork(
        net=setup.net,
        x=x,
        y=y,
        lr=learning_rate(setup, t),
        epochs=setup.config.local_epochs,
        batch_size=setup.config.batch_size,
        seed=setup.config.seed,
        round=t,
        client=client,
        guard=guard,
    )


@contextmanager
def naming(setup: Setup, where: str, what: str = "local") -> Iterator[None]:
    """Say of every error in a method's own code where it happened; one that is not ours keeps its traceback."""
    try:
        yield
    except PflsecError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        raise TrainingError(
            f"{where}: {setup.config.algo}.{what} raised {type(error).__name__}: {error}\n{text}"
        ) from error


def defended(setup: Setup, job: Job, log: Log | None = None) -> LocalWork:
    """Return the context of a job under the run's defenses inside training. `log` gets what an input defense gives each step."""
    ctx = context(setup, job.round, job.client, job.guard)
    ctx = inside(ctx, setup.defenses, job.round, job.client)
    ctx.feed = feed(setup, job.round, job.client, train=(ctx.x, ctx.y), log=log)
    return ctx


def work(setup: Setup, job: Job) -> Outcome:
    """Do one client's local work. Errors name round, client and item."""
    began = time.perf_counter()
    ctx = defended(setup, job)
    where = f"round {job.round}, client {job.client}"
    with naming(setup, where):
        done = setup.algorithm.local(for_method(ctx), job.state, job.down)
    for what, items in (("upload", done.up), ("state", done.state)):
        if bad := first_nonfinite(items):
            raise TrainingError(
                f"{where}: '{bad}' of the {what} is not finite after local training. Lower --lr (now {ctx.lr:g}); "
                "the results of earlier rounds are kept."
            )
    loss = float(torch.stack(ctx.losses).mean()) if ctx.losses else None
    if loss is not None and not math.isfinite(loss):
        raise TrainingError(
            f"{where}: the training loss is not finite. Lower --lr (now {ctx.lr:g}); the results of earlier rounds are kept."
        )
    spent = tuple(job.guard.spent) if job.guard is not None else ()
    return Outcome(job.client, done, loss, len(ctx.losses), time.perf_counter() - began, spent)


def test(setup: Setup, trial: Trial) -> Score:
    """Test a model on a client's rows, or on the global ones. Errors name round and client."""
    algorithm, items = setup.algorithm, trial.items
    if trial.client is None:
        with naming(setup, f"round {trial.round}, global model", "scores"):
            return _count(setup, items, *setup.federation.global_test_set())
    where = f"round {trial.round}, client {trial.client}"
    if algorithm.personalises:
        with naming(setup, where, "personalise"):
            items = algorithm.personalise(context(setup, trial.round, trial.client), items)
    with naming(setup, where, "scores"):
        return _count(setup, items, *setup.federation.test(trial.client))


@torch.inference_mode()
def _count(setup: Setup, items: Items, x: Tensor, y: Tensor) -> Score:
    right = 0
    for some, labels in zip(x.split(TEST_BATCH), y.split(TEST_BATCH), strict=True):
        scores = setup.algorithm.scores(items, setup.net.laid_out(some))
        right += int((scores.argmax(1) == labels).sum())
    return Score(right, len(y))


def noting(task: Task, setup: Setup) -> tuple[Any, list[str]]:
    """Return a task's result, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PflsecWarning)
        result = task.do(setup)
    return result, [str(w.message) for w in caught if issubclass(w.category, PflsecWarning)]


class Executor(Protocol):
    """Does tasks for one setup."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield the outcome of every job, in any order."""
        ...

    def test(self, trials: Sequence[Trial]) -> list[Score]:
        """Return the score of every trial, in their order."""
        ...

    def close(self) -> None:
        """Give back what the executor holds."""
        ...


class Serial:
    """One after the other, in this process. One thread: two would change bits."""

    def __init__(self, setup: Setup):
        self.setup = setup

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        for job in jobs:
            yield job.do(self.setup)

    def test(self, trials: Sequence[Trial]) -> list[Score]:
        return [trial.do(self.setup) for trial in trials]

    def close(self) -> None:
        pass


class Parallel:
    """Base of executors that work on several tasks at once, in workers that warn through the parent."""

    def __init__(self, setup: Setup):
        self.setup = setup

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield outcomes as they come. Raises what a client raised, or TrainingError when workers die."""
        for _, outcome in self._do(list(jobs)):
            yield outcome

    def test(self, trials: Sequence[Trial]) -> list[Score]:
        """Return the score of every trial, in their order. Raises as `run` does."""
        found = dict(self._do(trials))
        return [found[place] for place in range(len(trials))]

    def _do(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """Hand out tasks, the longest first; yield (place of the task, its result) as they come."""
        raise TypeError(f"{type(self).__name__} does not define _do().")

    def _shortest_first(self, tasks: Sequence[Task]) -> list[int]:
        """Return the places of tasks, so that the longest is the last; of equals the first."""
        return sorted(range(len(tasks)), key=lambda place: (tasks[place].rows(self.setup), -place))


def warn_again(notes: Iterable[str]) -> None:
    """Warn here of what a worker warned of."""
    for text in notes:
        warnings.warn(text, PflsecWarning, stacklevel=3)


@contextmanager
def one_thread():
    """Run with one thread, as every worker does, and put the number back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
