"""Probes: what the wire would carry if a client trained on a small victim batch. Thrown away afterwards.

The client's data become the victim batch. Every phase of the method runs its configured epochs on it; the number of steps
applies to the phase that produces what is sent.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from pflsec.core.errors import TrainingError
from pflsec.core.items import Items
from pflsec.core.streams import numpy_stream
from pflsec.core.vault import VaultWriter
from pflsec.runtime.executor import learning_rate
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

    def probe_round(self, t: int, server: Items, states: Mapping[int, Items], memories: Mapping[int, Items]) -> int:
        """Probe every captured client at the start of round t; return the number of captures written."""
        newcomer = self._public_newcomer()
        count = 0
        for client, batches in self.victims.items():
            down = self.setup.channel.send_down(self.setup.algorithm.downlink(server, client), t, client)
            for victim, rows in enumerate(batches):
                self._probe(t, client, victim, rows, down, states[client], memories[client], newcomer)
                count += 1
        return count

    def _probe(
        self, t: int, client: int, victim: int, rows: np.ndarray, down: Items, state: Items, memory: Items, newcomer: Items
    ) -> None:
        setup, name = self.setup, f"r{t:03d}-c{client:02d}-v{victim}-probe"
        x, y = self._batch(rows)
        public = bool(state) and all(torch.equal(v, newcomer[k]) for k, v in state.items())
        revealed = public or setup.algorithm.reconstruct_state(memory) is not None
        record = Record(
            id=name,
            algorithm=setup.config.algo,
            round=t,
            client=client,
            victim=victim,
            kind="probe",
            down=down,
            up={},
            memory=memory if revealed else {},
            input=setup.federation.input,
            batch=len(rows),
            steps=setup.config.victim_steps,
            lr=learning_rate(setup, t),
            personal_equals_public=public,
        )
        ctx = local_work(setup.net, record, x, y, setup.config.seed, driver=Training)
        done = setup.algorithm.local(ctx, state, down)
        up = setup.channel.send_up(done.up, down, t, client)
        distance = residual(setup.algorithm, setup.net, record, x, y, state, done.up, setup.config.seed)
        if not np.isfinite(distance):
            raise TrainingError(
                f"capture {name}: {setup.config.algo}.local does not repeat itself on the same batch (its replay sends other "
                "items). Local work must be a pure function of its arguments."
            )
        self.store.write(Record(**{**record.__dict__, "up": up}))
        facts = {"replay_residual": distance, "dataset_index": [int(r) for r in rows]}
        self.vault.victim(name, x, y, torch.as_tensor(rows), state, facts)

    def _batch(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        federation = self.setup.federation
        x = federation.input.normalise(federation.dataset.pixels(rows))
        return x, torch.as_tensor(federation.dataset.labels[rows])

    def _public_newcomer(self) -> Items:
        algorithm, fresh = self.setup.algorithm, self.setup.server_fresh
        return algorithm.init_client(fresh, algorithm.init_server(fresh))
