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
from pflsec.core.algorithm import Algorithm
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import build
from pflsec.core.defense import Defense
from pflsec.core.errors import Inconclusive, NotApplicable, RunError, TrainingError
from pflsec.core.inputs import InputSpec
from pflsec.core.items import Items
from pflsec.core.knowledge import Knows
from pflsec.core.streams import seed_of, stream
from pflsec.models.network import Network
from pflsec.runtime import intake
from pflsec.runtime.active import Client, exchanged
from pflsec.runtime.controls import Control
from pflsec.runtime.defending import parse_defense, why_unseen
from pflsec.runtime.executor import one_thread
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.replay import capture, conclusive, newcomer, rounding, visible_items
from pflsec.runtime.setup import rebuild
from pflsec.runtime.views import own_client, own_upload, seen
from pflsec.wire.capture import Capture, Record
from pflsec.wire.store import CaptureStore


@dataclass(frozen=True)
class Target:
    """One capture to attack, with the truth that the threat model grants (None where it does not).

    doubt    why the capture cannot speak, where that is known before: it is not attacked then
    control  what takes the capture's place (see pflsec.runtime.controls), if anything
    counts   the number of images of each class, int64 [classes], where granted
    own      the batch and private items with which the client's work is done again on a downlink of the attacker's choice:
             for the runtime, never for the attack
    others   the captures that the adversary sees only in one sum with this one
    """

    run: Path
    capture: str
    attack: str
    config: AttackConfig
    labels: Tensor | None
    state: Items | None
    doubt: str = ""
    control: Control | None = None
    counts: Tensor | None = None
    own: Client | None = None
    candidates: tuple[Tensor, Tensor] | None = None
    others: tuple["Target", ...] = ()

    @property
    def captures(self) -> list[str]:
        """The ids of all captures that are attacked as one."""
        return [self.capture, *(other.capture for other in self.others)]


@dataclass(frozen=True)
class Attempt:
    """What came of one target: a reconstruction, or the reason why there is none.

    inconclusive  nothing follows from it
    others        the captures that were attacked as one batch with this one, and stand after it in the reconstruction's truth
    """

    capture: str
    result: Reconstruction | None
    reason: str
    seconds: float
    inconclusive: bool = False
    others: tuple[str, ...] = ()


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
        if not places and (why := why_unseen(training_config(folder)[0].defense)):
            raise RunError(f"run '{folder.path.name}' has no captures: {why}.")
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
    """Attack one capture, or several that are seen as one, if they can speak at all.

    The generator is keyed by seed, attack and capture alone.
    """
    began = time.perf_counter()
    if target.doubt:
        return Attempt(target.capture, None, target.doubt, 0.0, inconclusive=True)
    found, inconclusive = None, False
    with one_thread(), torch.random.fork_rng(devices=[]):
        try:
            found, notes = _reconstructed(target)
        except NotApplicable as reason:
            notes, inconclusive = [str(reason)], isinstance(reason, Inconclusive)
    others = tuple(other.capture for other in target.others)
    said = "; ".join(filter(None, notes))
    return Attempt(target.capture, found, said, time.perf_counter() - began, inconclusive, others)


def _reconstructed(target: Target) -> tuple[Reconstruction, list[str]]:
    """Return what the attack makes of a target, and what its row is to say. Raises NotApplicable with the reason."""
    folder, threat, control = RunFolder(target.run), target.config.threat, target.control
    config, spec = training_config(folder)
    net, algorithm = rebuild(config, spec)
    read = partial(intake.read_record, folder, config=config, spec=spec, algorithm=algorithm)
    records = [read(name) for name in target.captures]
    own = _own_record(folder, target, records[0], read)
    if control is not None:
        algorithm, records[0] = control.instead(algorithm, net, records[0])
    # The positive control is an exchange without defenses.
    plain = target.config.naive or (control is not None and control.name == "positive")
    defenses = () if plain else [parse_defense(text) for text in config.defense]
    see = partial(_capture, target, algorithm, net, defenses)
    # A control takes the place of what the adversary has seen, whoever that is.
    cap, note = (see(records[0]), "") if control else seen(threat, records, own, see)
    attack = make_attack(target.attack, target.config)
    rng = stream(target.config.seed, "attack", target.attack, cap.record.id)
    if target.own is not None:
        cap = see(exchanged(config, net, algorithm, records[0], attack.craft(cap, rng), target.own))
    found = attack.reconstruct(cap, rng)
    chance = f"not compared, since it follows the client's own draws: {', '.join(cap.by_chance)}"
    return found, [found.note, note, chance if cap.by_chance else ""]


def _capture(
    target: Target, algorithm: Algorithm[Any], net: Network, defenses: Sequence[Defense[Any]], record: Record
) -> Capture:
    """Return one of a target's records with what the threat model grants of it. Raises Inconclusive for one that says nothing."""
    config, part = target.config, next((t for t in target.others if t.capture == record.id), target)
    history = Knows.HISTORY in config.threat.knows
    conclusive(rounding(algorithm, net, record, history=history), record.lr)
    return capture(
        algorithm,
        net,
        record,
        history=history,
        seed=seed_of(config.seed, "replay", record.id),
        labels=part.labels,
        state=part.state,
        counts=part.counts,
        candidates=part.candidates,
        visible=config.visible or (),
        defenses=defenses,
    )


def reconstruct(
    name: str, attack: Attack[Any], config: AttackConfig, given: Callable[..., Capture], labels: Tensor | None
) -> Reconstruction:
    """Return what an attack makes of an update from elsewhere. Raises NotApplicable where there is nothing to work on.

    given  makes the capture of `history`, `seed`, `labels` and `visible`
    """
    with one_thread(), torch.random.fork_rng(devices=[]):
        seed, history = seed_of(config.seed, "replay", "update"), Knows.HISTORY in config.threat.knows
        cap = given(history=history, seed=seed, labels=labels, visible=config.visible or ())
        return attack.reconstruct(cap, stream(config.seed, "attack", name, "update"))


def _own_record(folder: RunFolder, target: Target, first: Record, read: Callable[[str], Record]) -> Record | None:
    """Return the capture of the adversary's own upload in that round, where it is a client and that was captured."""
    if (to := own_client(target.config.threat, first)) is None:
        return None
    name = own_upload(first, to)
    return read(name) if name in CaptureStore(folder.captures).ids() else None


def attempts(targets: Sequence[Target], executor: str, workers: int | None) -> Iterator[Attempt]:
    """Yield the attempt at each target, in order; `processes` (or auto with several cores) works on several at once, `ray` on
    those machines of a cluster that see the run's folder."""
    count = min(workers or os.cpu_count() or 1, len(targets))
    if executor == "ray":
        from pflsec.runtime.cluster import each

        yield from each(attempt, targets, count)
        return
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
