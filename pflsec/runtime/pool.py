"""Worker processes for local work and tests. Tensors cross through shared memory; results have the bits of the serial executor.

Each worker runs one thread, does one task at a time, and ignores Ctrl-C, which is the parent's to handle. The parent owns all
shared memory: nothing is left behind when a worker dies.
"""

import multiprocessing
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.config.train import TrainConfig
from pflsec.core import errors
from pflsec.core.errors import PflsecError, PflsecWarning, TrainingError
from pflsec.core.items import Items, cloned
from pflsec.data.datasets import Dataset
from pflsec.runtime.executor import Outcome, Parallel, Score, Task, noting, warn_again
from pflsec.runtime.setup import Setup, prepare

ALIGN = 64
SPARE = 1 << 16

Place = tuple[str, int, torch.dtype, tuple[int, ...]]
"""Where a tensor lies in an arena: name, offset, dtype, shape."""


class Arena:
    """A block of shared memory into which tensors are written one after the other."""

    def __init__(self, size: int):
        self._adopt(SharedMemory(create=True, size=max(size, SPARE)))

    @classmethod
    def over(cls, block: SharedMemory) -> "Arena":
        """Return an empty arena in a block that somebody else owns."""
        arena = object.__new__(cls)
        arena._adopt(block)
        return arena

    def _adopt(self, block: SharedMemory) -> None:
        self.block = block
        self.used = 0
        self._resident: dict[tuple[int, int, torch.dtype], tuple[Tensor, int]] = {}

    def write(self, items: Mapping[str, Tensor]) -> list[Place] | None:
        """Return the places of the items, writing those that do not lie here already; None when they do not fit."""
        places: list[Place] = []
        for name, value in items.items():
            flat = value.detach().contiguous()
            key = (flat.data_ptr(), flat.numel(), flat.dtype)  # a downlink that all clients share is written once
            if key not in self._resident:
                offset = self._append(flat)
                if offset is None:
                    return None
                self._resident[key] = (flat, offset)
            places.append((name, self._resident[key][1], value.dtype, tuple(value.shape)))
        return places

    def clear(self) -> None:
        """Forget what lies here."""
        self.used = 0
        self._resident.clear()

    def close(self) -> None:
        """Give the memory back."""
        self.block.close()
        self.block.unlink()

    def _append(self, value: Tensor) -> int | None:
        size = value.numel() * value.element_size()
        offset = -(-self.used // ALIGN) * ALIGN
        if offset + size > self.block.size:
            return None
        if size:
            _view(self.block, offset, value.dtype, value.numel()).copy_(value.reshape(-1))
        self.used = offset + size
        return offset


def look(block: SharedMemory, places: Iterable[Place]) -> Items:
    """Return the tensors at these places, as views of the block."""
    return {
        name: _view(block, offset, dtype, int(np.prod(shape))).reshape(shape) for name, offset, dtype, shape in places
    }


def take(block: SharedMemory, places: Iterable[Place]) -> Items:
    """Return copies of the tensors at these places."""
    return cloned(look(block, places))


def _view(block: SharedMemory, offset: int, dtype: torch.dtype, count: int) -> Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(block.buf, dtype=dtype, count=count, offset=offset)


@dataclass
class Worker:
    """One process, the line to it, and the memory that leads there (inbox) and back (outbox)."""

    process: BaseProcess
    line: Connection
    inbox: Arena
    outbox: Arena
    task: Task | None = field(default=None)


class Processes(Parallel):
    """The executor that runs clients on several cores, the one with most data first."""

    def __init__(self, setup: Setup, workers: int):
        super().__init__(setup)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "pflsec.runtime.pool"])
        model = 4 * setup.net.size()
        self.workers: list[Worker] = []
        for _ in range(workers):
            here, there = context.Pipe()
            worker = Worker(
                context.Process(target=serve, args=(there, setup.config, setup.own_dataset), daemon=True),
                here,
                Arena(4 * model),
                Arena(4 * model),
            )
            worker.process.start()
            there.close()
            self.workers.append(worker)

    def _do(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        for worker in self.workers:
            worker.inbox.clear()
        waiting = self._shortest_first(tasks)
        idle, busy = list(self.workers), dict[int, Worker]()
        while waiting or busy:
            while waiting and idle:
                place, worker = waiting.pop(), idle.pop()
                self._send(worker, tasks[place])
                busy[place] = worker
            ready = wait([w.line for w in busy.values()] + [w.process.sentinel for w in busy.values()])
            for place, worker in list(busy.items()):
                if worker.line in ready or worker.process.sentinel in ready:
                    result = self._receive(worker)
                    del busy[place]
                    idle.append(worker)
                    yield place, result

    def close(self) -> None:
        """End the workers and give their memory back."""
        for worker in self.workers:
            worker.line.close()
            worker.process.terminate()
        for worker in self.workers:
            worker.process.join()
            worker.inbox.close()
            worker.outbox.close()
        self.workers = []

    def _send(self, worker: Worker, task: Task) -> None:
        worker.task = task
        messages = task.messages
        places = [worker.inbox.write(items) for items in messages]
        if None in places:
            worker.inbox = _with_room(worker.inbox, messages)
            places = [worker.inbox.write(items) for items in messages]
        names = worker.inbox.block.name, worker.outbox.block.name
        self._tell(worker, (_emptied(task), names, places))

    def _receive(self, worker: Worker) -> Any:
        kind, *rest = self._hear(worker)
        if kind == "more":
            worker.outbox.close()
            worker.outbox = Arena(2 * rest[0])
            self._tell(worker, worker.outbox.block.name)
            kind, *rest = self._hear(worker)
        if kind == "error":
            raise _error(*rest)
        result, places, notes = rest
        warn_again(notes)
        return result.carrying(*(take(worker.outbox.block, found) for found in places))

    def _tell(self, worker: Worker, message: Any) -> None:
        try:
            worker.line.send(message)
        except (BrokenPipeError, ConnectionError) as error:
            raise self._dead(worker) from error

    def _hear(self, worker: Worker) -> tuple[Any, ...]:
        try:
            return worker.line.recv()
        except (EOFError, ConnectionError) as error:
            raise self._dead(worker) from error

    def _dead(self, worker: Worker) -> TrainingError:
        worker.process.join(timeout=1)
        task, code = worker.task, worker.process.exitcode
        assert task is not None
        who = "global model" if task.client is None else f"client {task.client}"
        return TrainingError(
            f"round {task.round}, {who}: the worker process died (exit code {code}; -9 is often the system "
            "running out of memory). Rounds that were finished are kept: continue with --resume, or use fewer --workers."
        )


def _emptied(carrier: Task | Outcome | Score) -> Any:
    """Return a task or a result without its items, which travel through an arena."""
    return carrier.carrying(*({} for _ in carrier.messages))


def _size(messages: Iterable[Items]) -> int:
    return sum(v.numel() * v.element_size() + ALIGN for items in messages for v in items.values())


def _with_room(arena: Arena, messages: Sequence[Items]) -> Arena:
    """Return an empty arena with room for these messages: the given one if it is large enough."""
    size = _size(messages)
    if size <= arena.block.size:
        arena.clear()
        return arena
    arena.close()
    return Arena(2 * size)


def _error(kind: str, text: str) -> PflsecError:
    found = getattr(errors, kind, TrainingError)
    return found(text) if issubclass(found, PflsecError) else TrainingError(text)


def serve(line: Connection, config: TrainConfig, dataset: Dataset | None) -> None:
    """A worker's life: build the same setup, then do tasks until the line closes."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    blocks = Blocks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PflsecWarning)  # the parent has said it
        setup = prepare(config, dataset)
    while True:
        try:
            task, (inbox, outbox), places = line.recv()
        except (EOFError, ConnectionError):
            return
        # Views, not copies: local work leaves its inputs alone, and what it returns is written out before the next task.
        task = task.carrying(*(look(blocks[inbox], found) for found in places))
        try:
            result, notes = noting(task, setup)
        except PflsecError as error:
            line.send(("error", type(error).__name__, str(error)))
            continue
        messages = result.messages
        if _size(messages) > blocks[outbox].size:
            line.send(("more", _size(messages)))
            outbox = line.recv()
        arena = Arena.over(blocks[outbox])
        line.send(("done", _emptied(result), [arena.write(items) for items in messages], notes))


class Blocks(dict[str, SharedMemory]):
    """The parent's blocks by name, attached when first asked for."""

    def __missing__(self, name: str) -> SharedMemory:
        self[name] = SharedMemory(name=name)
        return self[name]
