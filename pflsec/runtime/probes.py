"""Probes: what the wire would carry if a client trained on a small victim batch. Thrown away afterwards.

The client's data become the victim batch. Every phase of the method runs its configured epochs on it; the number of steps
applies to the phase that produces what is sent.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pflsec.core.errors import TrainingError
from pflsec.core.items import Items
from pflsec.core.streams import numpy_stream
from pflsec.core.vault import VaultWriter
from pflsec.runtime.checkpoint import State
from pflsec.runtime.executor import learning_rate
from pflsec.runtime.privacy import Ledger
from pflsec.runtime.replay import local_work, residual
from pflsec.runtime.setup import Setup
from pflsec.training.local import Training
from pflsec.wire.capture import Record
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


class Prober:
    """Takes the probes of a run and writes captures and vault."""

    def __init__(self, setup: Setup, store: CaptureStore, vault: VaultWriter):
        self.setup, self.store, self.vault = setup, store, vault
        self.victims = {c: victim_rows(setup, c) for c in setup.config.captured_clients()}

    def write_pool(self) -> None:
        """Store what scoring compares with: training images of the federation, the victims among them, and their mean."""
        federation = self.setup.federation
        rows = federation.pool(include=[int(r) for batches in self.victims.values() for b in batches for r in b])
        images = federation.dataset.pixels(rows)
        self.vault.pool(images, torch.as_tensor(rows), torch.as_tensor(federation.mean_image()))

    def probe_round(self, now: State, ledger: Ledger | None = None) -> int:
        """Probe every captured client at the start of a round; return the number of captures written.

        ledger  private training goes into the probes too; they put nothing on the accounts, which speak of the run
        """
        setup, newcomer = self.setup, self._public_newcomer()
        count = 0
        for client, batches in self.victims.items():
            down = setup.channel.send_down(setup.algorithm.downlink(now.server, client), now.t, client)
            state, memory = now.states[client], now.memories[client]
            public = bool(state) and all(torch.equal(v, newcomer[k]) for k, v in state.items())
            revealed = public or setup.algorithm.reconstruct_state(memory) is not None
            for victim, rows in enumerate(batches):
                record = Record(
                    id=f"r{now.t:03d}-c{client:02d}-v{victim}-probe",
                    algorithm=setup.config.algo,
                    round=now.t,
                    client=client,
                    victim=victim,
                    kind="probe",
                    down=down,
                    up={},
                    memory=memory if revealed else {},
                    input=setup.federation.input,
                    batch=len(rows),
                    steps=setup.config.victim_steps,
                    lr=learning_rate(setup, now.t),
                    personal_equals_public=public,
                )
                self._probe(record, rows, state, ledger)
                count += 1
        return count

    def _probe(self, record: Record, rows: np.ndarray, state: Items, ledger: Ledger | None) -> None:
        """Do the exchange that a record describes on a victim batch; check it, and write capture and truth."""
        setup, (x, y) = self.setup, self._batch(rows)
        algorithm, seed = setup.algorithm, setup.config.seed
        plain = algorithm.local(local_work(setup.net, record, x, y, seed, Training), state, record.down).up
        distance = residual(algorithm, setup.net, record, x, y, state, plain, seed)
        if not np.isfinite(distance):
            raise TrainingError(
                f"capture {record.id}: {setup.config.algo}.local does not repeat itself on the same batch (its replay sends "
                "other items). Local work must be a pure function of its arguments."
            )
        sent = plain
        if ledger is not None:
            ctx = local_work(setup.net, record, x, y, seed, Training)
            key = "probe", record.round, record.victim
            ctx.guard = ledger.guard(record.client, *key, samples=len(rows), batch_size=len(rows))
            sent = algorithm.local(ctx, state, record.down).up
        up = setup.channel.send_up(sent, record.down, record.round, record.client)
        self.store.write(replace(record, up=up))
        facts = {"replay_residual": distance, "dataset_index": [int(r) for r in rows]}
        self.vault.victim(record.id, x, y, torch.as_tensor(rows), state, facts)

    def _batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        federation = self.setup.federation
        x = federation.input.normalise(federation.dataset.pixels(rows))
        return x, torch.as_tensor(federation.dataset.labels[rows])

    def _public_newcomer(self) -> Items:
        algorithm, fresh = self.setup.algorithm, self.setup.server_fresh
        return algorithm.init_client(fresh, algorithm.init_server(fresh))
