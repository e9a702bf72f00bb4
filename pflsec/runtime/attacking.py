"""Attacks on the captures of a run. Each victim is attacked on its own: its result never depends on its neighbours."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflsec.config.attack import AttackConfig, make_attack
from pflsec.config.train import TrainConfig
from pflsec.core import methodfile
from pflsec.core.algorithm import Algorithm
from pflsec.core.attack import Reconstruction
from pflsec.core.config import build
from pflsec.core.errors import NotApplicable, RunError, TrainingError
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.core.knowledge import Knows
from pflsec.core.streams import seed_of, stream
from pflsec.runtime.defending import parse_defense
from pflsec.runtime.executor import one_thread
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.replay import capture
from pflsec.runtime.setup import rebuild
from pflsec.wire.capture import Record
from pflsec.wire.store import CaptureStore


@dataclass(frozen=True)
class Target:
    """One capture to attack, with the truth that the threat model grants (None where it does not)."""

    run: Path
    capture: str
    attack: str
    config: AttackConfig
    labels: Tensor | None
    state: Items | None


@dataclass(frozen=True)
class Attempt:
    """What came of one target: a reconstruction, or the reason why there is none."""

    capture: str
    result: Reconstruction | None
    reason: str
    seconds: float


def selected(folder: RunFolder, config: AttackConfig) -> list[str]:
    """Return the ids of the captures that an attack's options select, sorted. Raises RunError when there are none."""
    store = CaptureStore(folder.captures)
    places = {name: _place(name, store.header(name)) for name in store.ids()}
    found = [
        name
        for name, (t, client, kind) in places.items()
        if (config.rounds is None or t in config.rounds)
        and (config.clients is None or client in config.clients)
        and kind == config.kind
    ]
    if not found:
        named = zip(("rounds", "clients", "kind"), zip(*places.values(), strict=True), strict=False)
        there = ", ".join(f"{name} {_listed(values)}" for name, values in named) or "none at all"
        raise RunError(
            f"run '{folder.path.name}' has no capture for this choice of rounds, clients and kind; it has: {there}. "
            + ("" if places else "Train again with --capture-rounds.")
        )
    return found


def training_config(folder: RunFolder) -> tuple[TrainConfig, InputSpec]:
    """Return a run's configuration and inputs from its run.json. Raises RunError when they are damaged."""
    manifest = folder.manifest()
    try:
        values, data, made_with = dict(manifest["config"]), manifest["data"]["input"], manifest["algorithm"].get("file")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"run '{folder.path.name}' is damaged: run.json lacks or garbles {error}.") from error
    methodfile.check_unchanged(made_with, f"run '{folder.path.name}'")
    return build(TrainConfig, values, "run", f"{folder.path.name}/run.json"), InputSpec.from_dict(data)


def check(folder: RunFolder, captures: Sequence[str]) -> None:
    """Read captures, so that damage shows before the work begins. Raises PflsecError naming it."""
    config, spec = training_config(folder)
    _, algorithm = rebuild(config, spec)
    for name in captures:
        _record(folder, name, config, spec, algorithm)


def _record(folder: RunFolder, name: str, config: TrainConfig, spec: InputSpec, algorithm: Algorithm[Any]) -> Record:
    """Return a capture's record. Raises PflsecError when it is missing, damaged, or another run's."""
    record, what = CaptureStore(folder.captures).read(name), f"capture '{name}'"
    if record.algorithm != config.algo:
        raise RunError(f"{what} was made by {record.algorithm}; this run trains {config.algo}.")
    probed = record.batch, record.epochs
    if record.input != spec or (record.kind == "probe" and probed != (config.victim_batch, config.victim_steps)):
        raise RunError(f"{what} has other inputs, batches or steps than run '{folder.path.name}' trained with.")
    algorithm.contract.check("down", record.down, what)
    algorithm.contract.check("up", record.up, what)
    return record


def attempt(target: Target) -> Attempt:
    """Attack one capture. The generator is keyed by seed, attack and capture alone."""
    began = time.perf_counter()
    folder = RunFolder(target.run)
    config, spec = training_config(folder)
    net, algorithm = rebuild(config, spec)
    record = _record(folder, target.capture, config, spec, algorithm)
    attack = make_attack(target.attack, target.config)
    seed = target.config.seed
    with one_thread(), torch.random.fork_rng(devices=[]):
        cap = capture(
            algorithm,
            net,
            record,
            history=Knows.HISTORY in target.config.threat.knows,
            seed=seed_of(seed, "replay", record.id),
            labels=target.labels,
            state=target.state,
            defenses=() if target.config.naive else [parse_defense(text) for text in config.defense],
        )
        try:
            found = attack.reconstruct(cap, stream(seed, "attack", target.attack, record.id))
        except NotApplicable as reason:
            return Attempt(record.id, None, str(reason), time.perf_counter() - began)
    return Attempt(record.id, found, found.note, time.perf_counter() - began)


def attempts(targets: Sequence[Target], executor: str, workers: int | None) -> Iterator[Attempt]:
    """Yield the attempt at each target, in order; `processes` (or auto with several cores) works on several at once."""
    count = min(workers or os.cpu_count() or 1, len(targets))
    if executor == "serial" or count == 1:
        yield from map(attempt, targets)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pflsec.runtime.attacking"])
    with ProcessPoolExecutor(count, mp_context=context, initializer=_follow_parent) as pool:
        try:
            with _interrupts_held():
                futures = [pool.submit(attempt, target) for target in targets]
            for future, target in zip(futures, targets, strict=True):
                try:
                    yield future.result()
                except BrokenProcessPool as error:
                    raise TrainingError(
                        f"the process that attacked capture '{target.capture}' died (out of memory?). Use --workers 1."
                    ) from error
        except BaseException:
            _stop(pool)
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back while workers start: one that it meets half-way ends in a traceback. They inherit the mask."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it does: a killed parent must not leave work running."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _stop(pool: ProcessPoolExecutor) -> None:
    processes = list((pool._processes or {}).values())  # there is no public way to end running work
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _place(name: str, header: Mapping[str, Any]) -> tuple[int, int, str]:
    """Return a capture's round, client and kind."""
    try:
        return int(header["round"]), int(header["client"]), str(header["kind"])
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"capture '{name}' is damaged: its header lacks or garbles {error}.") from error


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(set(values))))
