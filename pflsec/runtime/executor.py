"""Executors: who does the clients' local work. The result never depends on which one it is."""

import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from pflsec.core.algorithm import Done
from pflsec.core.defense import Guard, Spend
from pflsec.core.errors import PflsecError, TrainingError
from pflsec.core.items import Items, first_nonfinite
from pflsec.runtime.setup import Setup
from pflsec.training.local import LocalWork, for_method


@dataclass(frozen=True)
class Job:
    """One client's local work in one round."""

    round: int
    client: int
    state: Items
    down: Items
    guard: Guard | None = None


@dataclass(frozen=True)
class Outcome:
    """What a job gives back, and how it went."""

    client: int
    done: Done
    train_loss: float
    steps: int
    seconds: float
    spent: tuple[Spend, ...] = ()


def learning_rate(setup: Setup, t: int) -> float:
    """Return the learning rate of a round: a function of the round alone, the same for every participant."""
    return setup.config.lr * setup.config.lr_decay**t


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
def naming(setup: Setup, where: str) -> Iterator[None]:
    """Say of every error in a method's local work where it happened; one that is not ours keeps its traceback."""
    try:
        yield
    except PflsecError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:
        text = "".join(traceback.format_exception(error)).rstrip()
        raise TrainingError(
            f"{where}: {setup.config.algo}.local raised {type(error).__name__}: {error}\n{text}"
        ) from error


def work(setup: Setup, job: Job) -> Outcome:
    """Do one client's local work. Errors name round, client and item."""
    began = time.perf_counter()
    ctx = context(setup, job.round, job.client, job.guard)
    where = f"round {job.round}, client {job.client}"
    with naming(setup, where):
        done = setup.algorithm.local(for_method(ctx), job.state, job.down)
    for what, items in (("upload", done.up), ("state", done.state)):
        if bad := first_nonfinite(items):
            raise TrainingError(
                f"{where}: '{bad}' of the {what} is not finite after local training. Lower --lr (now {ctx.lr:g}); "
                "the results of earlier rounds are kept."
            )
    loss = float(torch.stack(ctx.losses).mean()) if ctx.losses else float("nan")
    spent = tuple(job.guard.spent) if job.guard is not None else ()
    return Outcome(job.client, done, loss, len(ctx.losses), time.perf_counter() - began, spent)


class Executor(Protocol):
    """Does jobs for one setup."""

    def run(self, jobs: Iterable[Job]) -> Iterator[Outcome]:
        """Yield the outcome of every job, in any order."""
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
            yield work(self.setup, job)

    def close(self) -> None:
        pass


@contextmanager
def one_thread():
    """Run with one thread, as every worker does, and put the number back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
