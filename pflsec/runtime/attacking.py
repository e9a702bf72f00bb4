"""Attacks on the captures of a run. Each victim is attacked on its own: its result never depends on its neighbours."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pflsec.config.attack import AttackConfig, make_attack
from pflsec.config.train import TrainConfig
from pflsec.core import methodfile
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import build
from pflsec.core.errors import Inconclusive, NotApplicable, RunError, TrainingError
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.core.knowledge import Knows
from pflsec.core.streams import seed_of, stream
from pflsec.runtime import intake
from pflsec.runtime.controls import Control
from pflsec.runtime.executor import one_thread
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.replay import capture, conclusive, newcomer, rounding, visible_items
from pflsec.runtime.setup import rebuild
from pflsec.wire.capture import Capture
from pflsec.wire.store import CaptureStore


@dataclass(frozen=True)
class Target:
    """One capture to attack, with the truth that the threat model grants (None where it does not).

    doubt    why the capture cannot speak, where that is known before: it is not attacked then
    control  what takes the capture's place (see pflsec.runtime.controls), if anything
    """

    run: Path
    capture: str
    attack: str
    config: AttackConfig
    labels: Tensor | None
    state: Items | None
    doubt: str = ""
    control: Control | None = None


@dataclass(frozen=True)
class Attempt:
    """What came of one target: a reconstruction, or the reason why there is none. inconclusive: nothing follows from it."""

    capture: str
    result: Reconstruction | None
    reason: str
    seconds: float
    inconclusive: bool = False


def selected(folder: RunFolder, config: AttackConfig) -> list[str]:
    """Return the ids of the captures that an attack's options select, sorted. Raises RunError when there are none."""
    store = CaptureStore(folder.captures)
    places = {name: store.place(name) for name in store.ids()}
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


def check(folder: RunFolder, captures: Sequence[str], visible: Sequence[str] = ()) -> dict[str, torch.Size]:
    """Read captures, so that damage shows before the work begins. Raises PflsecError naming it.

    Returns the shapes of the private items that every client of this run has.

    visible  patterns each of which must match an item of every upload
    """
    config, spec = training_config(folder)
    for name in captures:
        intake.check_inputs(folder, name, spec)
    net, algorithm = rebuild(config, spec)
    for name in captures:
        visible_items(intake.read_record(folder, name, config, spec, algorithm), visible)
    return {name: v.shape for name, v in newcomer(algorithm, net, torch.Generator().manual_seed(0)).items()}


def attempt(target: Target) -> Attempt:
    """Attack one capture, if it can speak at all. The generator is keyed by seed, attack and capture alone."""
    began = time.perf_counter()
    if target.doubt:
        return Attempt(target.capture, None, target.doubt, 0.0, inconclusive=True)
    folder = RunFolder(target.run)
    config, spec = training_config(folder)
    net, algorithm = rebuild(config, spec)
    record = intake.read_record(folder, target.capture, config, spec, algorithm)
    if target.control is not None:
        algorithm, record = target.control.instead(algorithm, net, record)
    attack = make_attack(target.attack, target.config)
    given = partial(capture, algorithm, net, record, state=target.state)
    try:
        conclusive(rounding(algorithm, net, record, history=Knows.HISTORY in target.config.threat.knows), record.lr)
        found = reconstruct(target.attack, attack, target.config, given, target.labels, record.id)
    except NotApplicable as reason:
        seconds, nothing = time.perf_counter() - began, isinstance(reason, Inconclusive)
        return Attempt(target.capture, None, str(reason), seconds, inconclusive=nothing)
    return Attempt(target.capture, found, found.note, time.perf_counter() - began)


def reconstruct(
    name: str,
    attack: Attack[Any],
    config: AttackConfig,
    given: Callable[..., Capture],
    labels: Tensor | None,
    capture_id: str = "update",
) -> Reconstruction:
    """Return what an attack makes of a capture. Raises NotApplicable with the reason where there is nothing to work on.

    given  makes the capture of `history`, `seed`, `labels` and `visible`
    """
    with one_thread(), torch.random.fork_rng(devices=[]):
        seed, history = seed_of(config.seed, "replay", capture_id), Knows.HISTORY in config.threat.knows
        cap = given(history=history, seed=seed, labels=labels, visible=config.visible or ())
        return attack.reconstruct(cap, stream(config.seed, "attack", name, capture_id))


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


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, sorted(set(values))))
