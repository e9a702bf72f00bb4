"""The recorder: captures of what crosses the wire, with the truth about them in the vault, apart.

A probe is what the wire would carry if a client trained on a small victim batch: the client's data become that batch, every
phase of the method runs its configured epochs on it, the number of steps applies to the phase that produces what is sent,
and all of it is thrown away. An update is the real upload of a round, after all local epochs on all of the client's data.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.core.change import origin
from pflsec.core.defense import ModelDefense, of_kind
from pflsec.core.errors import TrainingError
from pflsec.core.items import Items
from pflsec.core.streams import numpy_stream
from pflsec.core.vault import VaultWriter
from pflsec.runtime import sight
from pflsec.runtime.checkpoint import State
from pflsec.runtime.defending import inside
from pflsec.runtime.executor import Job, defended, learning_rate, naming
from pflsec.runtime.feeding import Log, feed, stored
from pflsec.runtime.privacy import Ledger
from pflsec.runtime.replay import local_work, residual
from pflsec.runtime.setup import Setup
from pflsec.training.local import Training, for_method
from pflsec.wire.capture import MOST_STEPS, Record, capture_id
from pflsec.wire.store import CaptureStore


def victim_rows(setup: Setup, client: int) -> list[np.ndarray]:
    """Return the dataset rows of a client's victim batches: the same for every method and round, classes in turn.

    Batches take new rows as long as there are some; within a batch no row is repeated.
    """
    config, shard = setup.config, setup.federation.shards[client]
    order = _classes_in_turn(shard.train, setup.federation.dataset.labels, numpy_stream(config.seed, "victims", client))
    batches = []
    for victim in range(config.victims):
        start = victim * config.victim_batch
        batches.append(np.array([order[(start + i) % len(order)] for i in range(config.victim_batch)]))
    return batches


def _classes_in_turn(rows: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the rows shuffled so that the classes take turns."""
    rows = rng.permutation(rows)
    seen: dict[int, int] = {}
    turn = []
    for row in rows:
        label = int(labels[row])
        turn.append(seen.get(label, 0))
        seen[label] = turn[-1] + 1
    return rows[np.argsort(turn, kind="stable")]


OUTSIDERS = 100
"""Most test rows of a captured client that are stored as images from outside the batches."""


def _with_sight(record: Record, shown: sight.Shown) -> Record:
    """Return a record that says what another client sees of the exchange, or why nothing."""
    return replace(record, shown=shown.items, facts={**record.facts, "shown": dict(shown.facts)})


class Recorder:
    """Writes the captures and the vault of a run, for the configured clients, rounds and kinds."""

    def __init__(self, setup: Setup, store: CaptureStore, vault: VaultWriter):
        self.setup, self.store, self.vault = setup, store, vault
        config = setup.config
        self.rounds = set(config.captured_rounds())
        self.kinds = ({"probe", "update"} if config.kind == "both" else {config.kind}) if self.rounds else set()
        self.clients = config.captured_clients() if self.rounds else []
        self.victims = {c: victim_rows(setup, c) for c in self.clients} if "probe" in self.kinds else {}

    def write_pool(self) -> None:
        """Store what scoring compares with: training images of the federation, the victims among them, and their mean; and
        test images of the captured clients, which are in no batch."""
        if not self.kinds:
            return
        federation = self.setup.federation
        sought = [int(r) for batches in self.victims.values() for batch in batches for r in batch]
        if "update" in self.kinds:
            sought += [int(r) for c in self.clients for r in federation.shards[c].train]
        rows = federation.pool(include=sought)
        images = federation.dataset.pixels(rows)
        self.vault.pool(images, torch.as_tensor(rows), torch.as_tensor(federation.mean_image()))
        labels, seed = federation.dataset.labels, self.setup.config.seed
        outside = {
            c: _classes_in_turn(federation.shards[c].test, labels, numpy_stream(seed, "outsiders", c))[:OUTSIDERS]
            for c in self.clients
        }
        rows = np.concatenate(list(outside.values()))
        client = torch.tensor([c for c, many in outside.items() for _ in many])
        self.vault.outsiders(*self._batch(rows), torch.as_tensor(rows), client)

    def probes(self, now: State, ledger: Ledger | None = None) -> None:
        """Probe every captured client, if this round is to be captured.

        ledger  private training goes into the probes too; they put nothing on the accounts, which speak of the run
        """
        if now.t not in self.rounds:
            return
        for client, batches in self.victims.items():
            down = self._down(now.server, now.t, client)
            for victim, rows in enumerate(batches):
                record = self._record(now, client, victim, "probe", down, len(rows), len(rows))
                self._probe(record, rows, now, ledger)

    def updates(
        self,
        before: State,
        downs: Mapping[int, Items],
        made: Mapping[int, Items],
        ups: Mapping[int, Items],
        server: Items,
    ) -> None:
        """Capture the real uploads of the captured clients that took part, if this round is to be captured.

        before     the run's state when the round began
        made, ups  the uploads before and after the defenses of the wire
        server     the server's items when it ends
        """
        captured = [c for c in self.clients if c in ups] if before.t in self.rounds else []
        mean = self._averaged(before.t, downs, ups, server) if captured and not self._forwards else None
        for client in captured:
            rows = self.setup.federation.shards[client].train
            record = self._record(before, client, 0, "update", downs[client], len(rows), self.setup.config.batch_size)
            x, y = self._batch(rows)
            undefended = None if self.setup.defenses else ups[client]
            replayed = record.steps <= MOST_STEPS
            seen = self._check(record, x, y, before.states[client], undefended) if replayed else None
            shown = mean or self._forwarded(before, client, downs[client], ups[client], server)
            record = replace(record, up=ups[client], facts={"cohort": sorted(ups)})
            log = self._fed(Job(before.t, client, before.states[client], downs[client])) if replayed else []
            self._write(_with_sight(record, shown), rows, before, made[client], seen, log)

    def _fed(self, job: Job) -> Log:
        """Return what an input defense gave each step of a client's work, which is done once more; nothing without one."""
        log: Log = []
        if self.setup.mixing is not None:
            ctx = defended(self.setup, job, log)
            self.setup.algorithm.local(for_method(ctx), job.state, job.down)
        return log

    @cached_property
    def _forwards(self) -> bool:
        return sight.forwards(self.setup.algorithm.contract)

    def _down(self, server: Items, t: int, client: int) -> Items:
        return self.setup.channel.send_down(self.setup.algorithm.downlink(server, client), t, client)

    def _forwarded(self, now: State, victim: int, down: Items, up: Items, server: Items) -> sight.Shown:
        """Return what the first client that sees an upload sees of it, once the server's items are these."""
        contract, found = self.setup.algorithm.contract, sight.unseen("there is no other client")
        for other in now.states:
            if other == victim:
                continue
            before, after = self._down(now.server, now.t, other), self._down(server, now.t + 1, other)
            found = sight.forwarded(contract, up, down, before, now.states[other], after, other)
            if found.items:
                break
        return found

    def _averaged(self, t: int, downs: Mapping[int, Items], ups: Mapping[int, Items], server: Items) -> sight.Shown:
        """Return what a client of the cohort sees of all uploads: the one with the lowest number, if it is captured too."""
        to = min(ups)
        if len(ups) < 2:
            return sight.unseen("nobody else took part, so there is no other client's share to take away")
        sizes = self.setup.federation.sizes()
        return sight.averaged(ups, downs, {c: sizes[c] for c in ups}, self._down(server, t + 1, to), to)

    def _record(
        self, now: State, client: int, victim: int, kind: str, down: Items, count: int, batch_size: int
    ) -> Record:
        """Return a record of an exchange, without its upload."""
        setup, state, memory = self.setup, now.states[client], now.memories[client]
        newcomer = self._public_newcomer
        public = bool(state) and all(torch.equal(v, newcomer[k]) for k, v in state.items())
        revealed = public or setup.algorithm.reconstruct_state(memory) is not None
        epochs = setup.config.victim_steps if kind == "probe" else setup.config.local_epochs
        return Record(
            id=capture_id(now.t, client, victim, kind),
            algorithm=setup.config.algo,
            round=now.t,
            client=client,
            victim=victim,
            kind=kind,
            down=down,
            up={},
            memory=memory if revealed else {},
            input=setup.federation.input,
            batch=count,
            epochs=epochs,
            batch_size=batch_size,
            lr=learning_rate(setup, now.t),
            personal_equals_public=public,
        )

    def _probe(self, record: Record, rows: np.ndarray, now: State, ledger: Ledger | None) -> None:
        """Do the exchange that a record describes on a victim batch, check it, and write capture and truth."""
        setup, state, (x, y) = self.setup, now.states[record.client], self._batch(rows)
        distance = self._check(record, x, y, state)
        ctx = local_work(setup.net, record, x, y, setup.config.seed, Training)
        ctx = inside(ctx, setup.defenses, record.round, record.client, record.id)
        log = Log()
        places = np.searchsorted(setup.federation.shards[record.client].train, rows)
        ctx.feed = feed(setup, record.round, record.client, "probe", record.victim, places=places, log=log)
        if ledger is not None:
            key = "probe", record.round, record.victim
            ctx.guard = ledger.guard(record.client, *key, samples=len(rows), batch_size=len(rows))
        with naming(setup, f"round {record.round}, client {record.client}"):
            sent = setup.algorithm.local(for_method(ctx), state, record.down).up
        where = record.round, record.client
        begun, unsent = origin(setup.algorithm, state, record.down, sent), now.unsent[record.client]
        up = setup.channel.send_up(sent, begun, *where, probe=record.id, unsent=unsent).up
        if self._forwards:
            after = setup.algorithm.aggregate(now.server, {record.client: up})
            shown = self._forwarded(now, record.client, record.down, up, after)
        else:
            shown = sight.unseen(
                "a probe has no cohort whose mean another client could see; capture real uploads (--kind update)"
            )
        self._write(_with_sight(replace(record, up=up), shown), rows, now, sent, distance, log)

    def _check(self, record: Record, x: Tensor, y: Tensor, state: Items, sent: Items | None = None) -> float:
        """Return how far the replay of the truth is from what was sent, relative.

        sent  None: what local work without defenses sends
        Raises TrainingError when the two are not even the same items.
        """
        setup = self.setup
        with naming(setup, f"round {record.round}, client {record.client}"):
            if sent is None:
                ctx = local_work(setup.net, record, x, y, setup.config.seed, Training)
                sent = setup.algorithm.local(ctx, state, record.down).up
            distance = residual(setup.algorithm, setup.net, record, x, y, state, sent, setup.config.seed)
        if not np.isfinite(distance):
            raise TrainingError(
                f"capture {record.id}: {setup.config.algo}.local does not repeat itself on the same batch (its replay sends "
                "other items). Local work must be a pure function of its arguments."
            )
        return distance

    def _write(
        self, record: Record, rows: np.ndarray, now: State, made: Items, distance: float | None, log: Log
    ) -> None:
        """Write a capture, and the truth about it.

        now   the run's state before the exchange
        made  the upload before the defenses of the wire
        log   what its steps were given by an input defense
        """
        x, y = self._batch(rows)
        facts: dict[str, Any] = {"replay_residual": distance, "dataset_index": [int(r) for r in rows]}
        self.store.write(record)
        state, unsent = now.states[record.client], now.unsent[record.client]
        if log:
            train = self.setup.federation.shards[record.client].train
            self.vault.mixtures(record.id, stored(log, self._batch(train)[0], train))
            facts["mixed_residual"] = self._check_mixed(record, log, state, made)
        up = made if self.setup.channel.uplink else {}
        self.vault.victim(record.id, x, y, torch.as_tensor(rows), state, facts, up=up, unsent=unsent)

    def _check_mixed(self, record: Record, log: Log, state: Items, sent: Items) -> float | None:
        """Return how far the replay on the mixed batch of the first step is from what was sent, relative; None where that step
        took a part of the batch, or another defense changed its gradient."""
        first = next((made for phase, made in log if phase == "main"), None)
        setup = self.setup
        others = setup.shaping is not None or of_kind(setup.defenses, ModelDefense) is not None
        if first is None or len(first.x) != record.batch or others:
            return None
        with naming(setup, f"round {record.round}, client {record.client}"):
            found = residual(setup.algorithm, setup.net, record, first.x, first.y, state, sent, setup.config.seed)
        return found if np.isfinite(found) else None

    def _batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        federation = self.setup.federation
        x = federation.input.normalise(federation.dataset.pixels(rows))
        return x, torch.as_tensor(federation.dataset.labels[rows])

    @cached_property
    def _public_newcomer(self) -> Items:
        """The state of a client that starts from the public draw: the same for every capture of the run."""
        return self.setup.algorithm.init_client(self.setup.server_fresh, self.setup.server_first)
