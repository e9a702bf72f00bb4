"""The round loop. It knows no method: it moves items between client work, channel, server step and store."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pflsec.core.errors import RunError, TrainingError
from pflsec.core.items import Items, first_nonfinite
from pflsec.core.vault import VaultWriter
from pflsec.runtime import checkpoint, evaluate, privacy
from pflsec.runtime import cohort as cohorts
from pflsec.runtime.checkpoint import State
from pflsec.runtime.executor import Executor, Job, Outcome, Serial, learning_rate, one_thread
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.probes import Prober
from pflsec.runtime.setup import Setup
from pflsec.wire.channel import Ledger
from pflsec.wire.store import CaptureStore

Report = Callable[[int, Mapping[str, Any]], None]
"""Called after every round with (round, metrics)."""


class Federated:
    """The changing part of a run: the server's items, each client's state, and what the wire log has told so far.

    `advance` plays one round; nothing of it remains unless the whole round succeeds.
    """

    def __init__(self, setup: Setup, executor: Executor | None = None):
        self.setup = setup
        self.executor = executor or Serial(setup)
        self.t = 0
        algorithm, public = setup.algorithm, setup.server_fresh
        self.server: Items = algorithm.init_server(public)
        self.states = {c: algorithm.init_client(setup.client_fresh(c), self.server) for c in range(setup.federation.clients)}
        watched = setup.config.captured_clients() if setup.config.captured_rounds() else []
        self.memories = {c: algorithm.init_client(public, self.server) for c in watched}
        self.last_trained: dict[int, int] = {}
        dp = privacy.mechanism(setup)
        self.ledger = privacy.Ledger(setup, dp, setup.config.dp_seed) if dp else None

    def state(self) -> State:
        """Return all that changes, for a checkpoint."""
        return State(self.t, self.server, self.states, self.memories, self.last_trained, self._facts())

    def restore(self, state: State) -> None:
        """Go on from a checkpoint. Raises RunError when it does not fit this run."""
        if set(state.states) != set(self.states) or set(state.memories) != set(self.memories):
            raise RunError("the checkpoint is of another run: its clients are not those of this one.")
        self.t, self.server, self.states = state.t, state.server, state.states
        self.memories, self.last_trained = state.memories, state.last_trained
        if self.ledger:
            self.ledger.restore(state.facts["privacy"])

    def _facts(self) -> dict[str, Any]:
        return {"privacy": self.ledger.facts()} if self.ledger else {}

    def advance(self) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
        """Play one round; return its metrics and its rows for clients.csv."""
        setup, t, began = self.setup, self.t, time.perf_counter()
        algorithm, config, ledger = setup.algorithm, setup.config, Ledger()
        weights = algorithm.sampling_weights(setup.federation.sizes())
        cohort = cohorts.draw(config.seed, t, setup.federation.clients, config.participation, weights)
        lost = cohorts.lost(config.seed, t, cohort, config.drop_rate)

        stopped = [c for c in cohort if self.ledger and self.ledger.exhausted(c)]
        cohort = [c for c in cohort if c not in stopped]
        downs = {c: setup.channel.send_down(algorithm.downlink(self.server, c), t, c, ledger) for c in cohort}
        # A lost upload leaves no trace anywhere, so the work behind it need not be done.
        guards = {c: self.ledger.guard(c, "round", t) for c in cohort} if self.ledger else {}
        jobs = [Job(t, c, self.states[c], downs[c], guards.get(c)) for c in cohort if c not in lost]
        outcomes = {o.client: o for o in self.executor.run(jobs)}
        ups = {c: setup.channel.send_up(o.done.up, downs[c], t, c, ledger) for c, o in sorted(outcomes.items())}

        server = setup.channel.release(algorithm.aggregate(self.server, ups), self.server, t) if ups else self.server
        if bad := first_nonfinite(server):
            raise TrainingError(f"round {t}: item '{bad}' is not finite after aggregation; results of earlier rounds are kept.")
        trained = {c: algorithm.deploy_trained(o.done.state, downs[c], ups[c]) for c, o in outcomes.items()}
        self._commit(server, outcomes, downs, ups)

        metrics = {"round": t, "lr": learning_rate(setup, t), "cohort": cohort, "lost": sorted(lost - set(stopped)), "stopped": stopped}
        losses = [o.train_loss for o in outcomes.values()]
        metrics["train_loss"] = sum(losses) / len(losses) if losses else None
        metrics["seconds_train"] = time.perf_counter() - began
        rows = self._evaluate(t, cohort, outcomes, trained, metrics)
        metrics["bytes_down"], metrics["bytes_up"] = ledger.total("down"), ledger.total("up")
        metrics["bytes_by_kind"] = {d: dict(kinds) for d, kinds in ledger.bytes.items()}
        spent = {c: self.ledger.epsilon(c) for c in self.states} if self.ledger else {}
        metrics["epsilon"] = max(spent.values(), default=None)
        rows = [row | {"epsilon": spent.get(row["client"])} for row in rows]
        metrics["seconds"] = time.perf_counter() - began
        return metrics, rows

    def _commit(self, server: Items, outcomes: Mapping[int, Outcome], downs: Mapping[int, Items], ups: Mapping[int, Items]):
        """Make the round count: server items, the state of clients whose upload was accepted, and the log."""
        for c in ups:
            if c in self.memories:
                self.memories[c] = self.setup.algorithm.observe(self.memories[c], downs[c], ups[c])
            self.states[c] = outcomes[c].done.state
            if self.ledger:
                self.ledger.spend(c, list(outcomes[c].spent))
            self.last_trained[c] = self.t
        self.server = server
        self.t += 1

    def _evaluate(
        self,
        t: int,
        cohort: list[int],
        outcomes: Mapping[int, Outcome],
        trained: Mapping[int, Items],
        metrics: dict[str, Any],
    ) -> list[Mapping[str, Any]]:
        """Add accuracies to the metrics where they are due; return a row for every client."""
        setup, federation = self.setup, self.setup.federation
        due = (t + 1) % setup.config.eval_every == 0 or t + 1 == setup.config.rounds
        before = time.perf_counter()
        personal: list[float] = []
        if due:
            personal, common = evaluate.everybody(setup, self.server, self.states, t + 1)
            metrics |= evaluate.summary(personal, evaluate.test_sizes(setup)) | {"global_accuracy": common}
        ready = {c: evaluate.ready(setup, items, c, t + 1) for c, items in trained.items()} if due else {}
        own = {c: evaluate.accuracy(setup, items, c) for c, items in ready.items()}
        metrics["seconds_eval"] = time.perf_counter() - before
        return [
            {
                "round": t,
                "client": c,
                "train_samples": len(federation.shards[c].train),
                "test_samples": len(federation.shards[c].test),
                "last_trained_round": self.last_trained.get(c),
                "accuracy_post_agg": personal[c] if due else None,
                "accuracy_post_local": own.get(c),
                "train_loss": outcomes[c].train_loss if c in outcomes else None,
                "uploaded": c in outcomes,
            }
            for c in range(federation.clients)
        ]


def play(setup: Setup, folder: RunFolder, report: Report, executor: Executor | None = None) -> Federated:
    """Play the rounds of a run that are left, writing metrics, captures, vault and checkpoints as it goes.

    A checkpoint is written after the round's metrics; what a killed process wrote beyond the last one is cut off and played
    again. Captures of a round that is played again have the same bits.
    """
    federated = Federated(setup, executor)
    if found := checkpoint.newest(folder):
        federated.restore(found)
    checkpoint.rewind(folder, federated.t)
    due = set(setup.config.captured_rounds())
    prober = Prober(setup, CaptureStore(folder.captures), VaultWriter(folder.vault)) if due else None
    with one_thread(), torch.random.fork_rng(devices=[]):
        if prober:
            prober.write_pool()
        for t in range(federated.t, setup.config.rounds):
            if prober and t in due:
                prober.probe_round(federated.state(), federated.ledger)
            metrics, rows = federated.advance()
            folder.add_clients(rows)
            folder.add_metrics(metrics)
            checkpoint.save(folder, federated.state())
            report(t, metrics)
    return federated
