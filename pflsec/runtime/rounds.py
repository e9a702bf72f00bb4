"""The round loop. It knows no method: it moves items between client work, channel, server step and store."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pflsec.core.change import origin
from pflsec.core.errors import RunError, TrainingError
from pflsec.core.items import Items, cloned, first_nonfinite
from pflsec.core.streams import stream
from pflsec.core.vault import VaultWriter
from pflsec.runtime import checkpoint, evaluate, health, privacy
from pflsec.runtime import cohort as cohorts
from pflsec.runtime.checkpoint import State
from pflsec.runtime.executor import Executor, Job, Outcome, Serial, learning_rate, one_thread
from pflsec.runtime.folder import RunFolder
from pflsec.runtime.recorder import Recorder
from pflsec.runtime.setup import Setup
from pflsec.wire.channel import Ledger
from pflsec.wire.store import CaptureStore

Report = Callable[[int, Mapping[str, Any]], None]
"""Called after every round with (round, metrics)."""


@dataclass(frozen=True)
class Exchanged:
    """What happened in a round before anything is committed: who was asked, whose upload was lost, who has no budget left,
    the messages of the others, and what their defenses keep back for the next ones."""

    cohort: list[int]
    lost: list[int]
    stopped: list[int]
    downs: dict[int, Items]
    references: dict[int, Items]
    outcomes: dict[int, Outcome]
    ups: dict[int, Items]
    unsent: dict[int, Items]


class Federated:
    """The changing part of a run: the server's items, each client's state, and what the wire log has told so far.

    `advance` plays one round; nothing of it remains unless the whole round succeeds.
    """

    def __init__(self, setup: Setup, executor: Executor | None = None):
        self.setup = setup
        self.executor = executor or Serial(setup)
        self.on_exchanged: Callable[[State, Exchanged, Items], None] = lambda before, played, server: None
        """Called in every round with the state before it, its messages and the server's next items, before they count."""
        self.t = 0
        algorithm, public = setup.algorithm, setup.server_fresh
        self.server: Items = setup.server_first
        self.states = {
            # Copies: what is kept must not lie between the large blocks of the draws that it was cut from.
            c: cloned(algorithm.init_client(setup.client_fresh(c), self.server))
            for c in range(setup.federation.clients)
        }
        self.unsent: dict[int, Items] = {c: {} for c in self.states}
        watched = setup.config.captured_clients() if setup.config.captured_rounds() else []
        self.memories = {c: algorithm.init_client(public, self.server) for c in watched}
        self.last_trained: dict[int, int] = {}
        privacy.check(setup)
        dp, users = privacy.mechanism(setup), privacy.user_mechanism(setup)
        self.ledger = privacy.Ledger(setup, dp, setup.config.dp_seed) if dp else None
        self.users = privacy.UserLedger(setup, users, setup.config.dp_seed) if users else None

    def state(self) -> State:
        """Return all that changes, for a checkpoint."""
        return State(self.t, self.server, self.states, self.unsent, self.memories, self.last_trained, self._facts())

    def restore(self, state: State) -> None:
        """Go on from a checkpoint. Raises RunError when it does not fit this run."""
        if set(state.states) != set(self.states) or set(state.memories) != set(self.memories):
            raise RunError("the checkpoint is of another run: its clients are not those of this one.")
        self.t, self.server, self.states = state.t, state.server, state.states
        self.unsent, self.memories, self.last_trained = state.unsent, state.memories, state.last_trained
        if self.ledger:
            self.ledger.restore(state.facts["privacy"])
        if self.users:
            self.users.restore(state.facts["users"])

    def _facts(self) -> dict[str, Any]:
        ledgers = {"privacy": self.ledger, "users": self.users}
        return {name: ledger.facts() for name, ledger in ledgers.items() if ledger}

    def advance(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Play one round; return its metrics and its rows for clients.csv."""
        setup, t, began, wire = self.setup, self.t, time.perf_counter(), Ledger()
        played = self._exchange(wire)
        server = self._aggregate(played)
        trained = {
            c: setup.algorithm.deploy_trained(o.done.state, played.downs[c], played.ups[c])
            for c, o in played.outcomes.items()
        }
        self._warn_if_still(played, trained)
        self.on_exchanged(self.state(), played, server)
        self._commit(server, played)
        found = [played.outcomes[c].train_loss for c in sorted(played.outcomes)]  # workers end in any order
        losses = [loss for loss in found if loss is not None]
        metrics: dict[str, Any] = {
            "round": t,
            "lr": learning_rate(setup, t),
            "cohort": played.cohort,
            "lost": played.lost,
            "stopped": played.stopped,
            "train_loss": sum(losses) / len(losses) if losses else None,
            "seconds_train": time.perf_counter() - began,
        }
        rows = self._evaluate(t, played.outcomes, trained, metrics)
        spent = self._spent()
        metrics |= {
            "bytes_down": wire.total("down"),
            "bytes_up": wire.total("up"),
            "bytes_by_kind": {d: dict(kinds) for d, kinds in wire.bytes.items()},
            "norms": health.state_norms(self.server, [self.states[c] for c in played.ups]),
            "epsilon": max(spent.values(), default=None),
            "epsilon_unit": "record" if self.ledger else "user" if self.users else None,
            "seconds": time.perf_counter() - began,
        }
        return metrics, [row | {"epsilon": spent.get(row["client"])} for row in rows]

    def _exchange(self, wire: Ledger) -> Exchanged:
        """Ask the cohort, do its local work, and take in what arrives. Nothing is committed."""
        setup, t, config = self.setup, self.t, self.setup.config
        asked = self._asked()
        stopped = [c for c in asked if self._exhausted(c)]
        cohort = [c for c in asked if c not in stopped]
        lost = cohorts.lost(config.seed, t, cohort, config.drop_rate)
        if len(cohort) - len(lost) < setup.channel.least:
            lost = set(cohort)
        downs = {c: setup.channel.send_down(setup.algorithm.downlink(self.server, c), t, c, wire) for c in cohort}
        guards = {c: self.ledger.guard(c, "round", t) for c in cohort} if self.ledger else {}
        # A lost upload leaves no trace anywhere, so the work behind it need not be done.
        jobs = [Job(t, c, self.states[c], downs[c], guards.get(c)) for c in cohort if c not in lost]
        outcomes = {o.client: o for o in sorted(self.executor.run(jobs), key=lambda o: o.client)}
        over = [c for c, o in outcomes.items() if self.ledger and self.ledger.exceeds(c, o.spent)]
        outcomes = {c: o for c, o in outcomes.items() if c not in over}  # nothing of their work has left them
        cohort, stopped = [c for c in cohort if c not in over], sorted(stopped + over)
        references = {c: origin(setup.algorithm, self.states[c], downs[c], o.done.up) for c, o in outcomes.items()}
        send = setup.channel.send_up
        sent = {c: send(o.done.up, references[c], t, c, wire, unsent=self.unsent[c]) for c, o in outcomes.items()}
        ups, unsent = ({c: getattr(one, part) for c, one in sent.items()} for part in ("up", "unsent"))
        return Exchanged(cohort, sorted(lost), stopped, downs, references, outcomes, ups, unsent)

    def _asked(self) -> list[int]:
        """Return whom the server asks in this round."""
        config, sizes = self.setup.config, self.setup.federation.sizes()
        if self.users and (asked := self.users.cohort(self.t)) is not None:
            return asked
        weights = self.setup.algorithm.sampling_weights(sizes)
        return cohorts.draw(config.seed, self.t, len(sizes), config.participation, weights)

    def _exhausted(self, client: int) -> bool:
        """Return whether there is no budget left for a client to take part."""
        return bool((self.ledger and self.ledger.exhausted(client)) or (self.users and self.users.exhausted))

    def _spent(self) -> dict[int, float]:
        """Return the epsilon of every client; empty without private training."""
        if self.users:
            return dict.fromkeys(self.states, self.users.epsilon())
        return {c: self.ledger.epsilon(c) for c in self.states} if self.ledger else {}

    def _noisy_sum(self, users: privacy.UserLedger, played: Exchanged) -> dict[int, Items]:
        """Return the uploads that the server step is given: always as many, the noisy mean each, or none without budget left.

        How many clients took part, and whether any did, would say more than the account knows of.
        """
        if users.exhausted:
            return {}
        nobody, still = users.nobody(self.server)
        ups, references = (played.ups, played.references) if played.ups else ({0: still}, {0: nobody})
        expected = users.rate * users.clients
        found = self.setup.channel.gather(ups, references, expected, users.noise(self.t))
        return dict.fromkeys(range(max(1, round(expected))), next(iter(found.values())))

    def _aggregate(self, played: Exchanged) -> Items:
        """Return the server's next items: unchanged where no upload arrived."""
        if self.users is not None:
            fresh = self._noisy_sum(self.users, played)
        else:
            channel, draws = self.setup.channel, stream(self.setup.config.seed, "defense", "sum", self.t)
            fresh = channel.gather(played.ups, played.references, len(played.cohort), draws) if played.ups else {}
        if not fresh:
            return self.server
        server = self.setup.algorithm.aggregate(self.server, fresh)
        if bad := first_nonfinite(server):
            raise TrainingError(
                f"round {self.t}: item '{bad}' is not finite after aggregation; results of earlier rounds are kept."
            )
        return server

    def _commit(self, server: Items, played: Exchanged) -> None:
        """Make the round count: server items, the state of clients whose upload was accepted, and the log."""
        for c, up in played.ups.items():
            if c in self.memories:
                self.memories[c] = self.setup.algorithm.observe(self.memories[c], played.downs[c], up)
            self.states[c], self.unsent[c] = played.outcomes[c].done.state, played.unsent[c]
            if self.ledger:
                self.ledger.spend(c, played.outcomes[c].spent)
            self.last_trained[c] = self.t
        if self.users and not self.users.exhausted:
            self.users.spend()
        self.server = server
        self.t += 1

    def _warn_if_still(self, played: Exchanged, trained: Mapping[int, Items]) -> None:
        """Warn where clients have made steps, and none of them has moved a weight."""
        algorithm, contract = self.setup.algorithm, self.setup.algorithm.contract
        weights = {name for name in contract.items("up") if contract.kind("up", name).startswith("weights")}
        # A method that sends weights may have a round in which it sends none: what was trained is then not kept.
        worked = [
            c for c, o in played.outcomes.items() if o.steps and (not weights or not weights.isdisjoint(o.done.up))
        ]
        if worked:
            models = ((algorithm.deploy(self.states[c], played.downs[c]), trained[c]) for c in worked)
            health.warn_if_still(self.setup.net, self.t, learning_rate(self.setup, self.t), models)

    def _evaluate(
        self,
        t: int,
        outcomes: Mapping[int, Outcome],
        trained: Mapping[int, Items],
        metrics: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Add accuracies to the metrics where they are due; return a row for every client."""
        setup, federation = self.setup, self.setup.federation
        due = (t + 1) % setup.config.eval_every == 0 or t + 1 == setup.config.rounds
        before = time.perf_counter()
        personal: list[float] = []
        own: dict[int, float] = {}
        if due:
            personal, own, common = evaluate.everybody(setup, self.executor, self.server, self.states, trained, t + 1)
            metrics |= evaluate.summary(personal, evaluate.test_sizes(setup)) | {"global_accuracy": common}
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
    recorder = Recorder(setup, CaptureStore(folder.captures), VaultWriter(folder.vault))
    if recorder.kinds & {"update"}:
        federated.on_exchanged = lambda before, played, server: recorder.updates(
            before, played.downs, {c: o.done.up for c, o in played.outcomes.items()}, played.ups, server
        )
    with one_thread(), torch.random.fork_rng(devices=[]):
        recorder.write_pool()
        for t in range(federated.t, setup.config.rounds):
            if recorder.kinds & {"probe"}:
                recorder.probes(federated.state(), federated.ledger)
            metrics, rows = federated.advance()
            folder.add_clients(rows)
            folder.add_metrics(metrics)
            checkpoint.save(folder, federated.state())
            report(t, metrics)
    return federated
