"""Attacks on the captures of a run. Each victim is attacked on its own: its result never depends on its neighbours."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflsec.config.attack import AttackConfig, make_attack
from pflsec.config.train import TrainConfig
from pflsec.core.attack import Reconstruction
from pflsec.core.config import build
from pflsec.core.errors import NotApplicable, RunError, TrainingError
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.core.knowledge import Knows
from pflsec.core.streams import seed_of, stream
from pflsec.runtime.executor import one_thread
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.replay import capture
from pflsec.runtime.setup import rebuild
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
    headers = {name: store.header(name) for name in store.ids()}
    found = [
        name
        for name, h in headers.items()
        if (config.rounds is None or h["round"] in config.rounds)
        and (config.clients is None or h["client"] in config.clients)
        and h["kind"] == config.kind
    ]
    if not found:
        there = f"rounds {_listed(headers, 'round')}, clients {_listed(headers, 'client')}" if headers else "none at all"
        raise RunError(
            f"run '{folder.path.name}' has no capture for this choice of rounds, clients and kind; it has: {there}. "
            + ("" if headers else "Train again with --capture-rounds.")
        )
    return found


def training_config(folder: RunFolder) -> tuple[TrainConfig, InputSpec]:
    """Return a run's configuration and inputs from its run.json. Raises RunError when they are damaged."""
    manifest = folder.manifest()
    try:
        values, data = dict(manifest["config"]), manifest["data"]["input"]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"run '{folder.path.name}' is damaged: run.json lacks {error}.") from error
    return build(TrainConfig, values, "run", f"{folder.path.name}/run.json"), InputSpec.from_dict(data)


def attempt(target: Target) -> Attempt:
    """Attack one capture. The generator is keyed by seed, attack and capture alone."""
    began = time.perf_counter()
    folder = RunFolder(target.run)
    config, spec = training_config(folder)
    net, algorithm = rebuild(config, spec)
    record = CaptureStore(folder.captures).read(target.capture)
    if record.algorithm != config.algo:
        raise RunError(f"capture '{record.id}' was made by {record.algorithm}; this run trains {config.algo}.")
    algorithm.contract.check("down", record.down, f"capture '{record.id}'")
    algorithm.contract.check("up", record.up, f"capture '{record.id}'")
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
    with ProcessPoolExecutor(count, mp_context=context, initializer=_ignore_interrupts) as pool:
        futures = [pool.submit(attempt, target) for target in targets]
        try:
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


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle


def _stop(pool: ProcessPoolExecutor) -> None:
    processes = list((pool._processes or {}).values())  # there is no public way to end running work
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()


def _listed(headers: dict[str, dict[str, Any]], name: str) -> str:
    return ", ".join(str(v) for v in sorted({h[name] for h in headers.values()}))
