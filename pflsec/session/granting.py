"""What an attack is given of a run's captures: what the wire shows, and of the truth what the threat model grants."""

from dataclasses import replace

import torch
from torch import Tensor

from pflsec.config.attack import narrowed
from pflsec.core import registry
from pflsec.core.knowledge import POWERS, Knows
from pflsec.core.streams import stream
from pflsec.leakage import membership, results
from pflsec.leakage.vault import Truth
from pflsec.runtime import attacking
from pflsec.runtime.active import Client
from pflsec.runtime.views import groups
from pflsec.session.opened import OpenRun


def acts(name: str) -> bool:
    """Return whether an attack chooses what the client receives, so that the exchange is done again with the client's data."""
    return bool(registry.load("attacks", name).needs & POWERS)


class Granting:
    """Makes the targets of attacks on an opened run."""

    def __init__(self, run: OpenRun):
        self.run = run
        self.groups = groups(run.config.threat, run.headers)
        self._drawn: dict[str, membership.Candidates | None] = {}

    def targets(self, name: str) -> list[attacking.Target]:
        """Return what an attack is to work on: a target for each capture, or for all that its adversary sees as one."""
        targets = [[self.target(name, capture) for capture in group] for group in self.groups]
        return [replace(first, others=tuple(others)) for first, *others in targets]

    def target(self, name: str, capture: str) -> attacking.Target:
        """Return one capture to attack, with the truth that the threat model grants, and why it cannot speak, if so."""
        target = attacking.Target(self.run.folder.path, capture, name, narrowed(name, self.run.config), None, None)
        knows = self.run.config.threat.knows
        granted = knows & {Knows.LABELS, Knows.LABEL_HIST, Knows.PRIVATE, Knows.CANDIDATES}
        if self.run.pool is None and not granted and not acts(name):
            return target
        truth = self.run.vault.truth(capture)
        valid, why = results.validity(truth.replay_residual)
        own, gone = self._own(capture, truth) if acts(name) else (None, "")
        put = self.candidates(name, capture)
        return replace(
            target,
            candidates=(put.x, put.y) if put else None,
            labels=self._labels(capture, truth) if Knows.LABELS in knows else None,
            state=truth.state if Knows.PRIVATE in knows else None,
            counts=torch.bincount(truth.y, minlength=self.run.spec.classes) if Knows.LABEL_HIST in knows else None,
            own=own,
            doubt=why if valid is False else gone,
        )

    def _labels(self, capture: str, truth: Truth) -> Tensor | None:
        """Return the labels that are granted: those that were trained with, unless the attacker knows of no mixing."""
        if self.run.mixing is None or self.run.naive:
            return truth.y
        found = self.run.mixtures(capture)
        return None if found is None else found.labels(truth.dataset_index)

    def _own(self, capture: str, truth: Truth) -> tuple[Client, str]:
        """Return with what a client's work is done again on another downlink, and why that would be no such work, if so."""
        if self.run.mixing is None:
            return Client(truth.x, truth.y, truth.state, truth.unsent), ""
        found = self.run.mixtures(capture)
        places = [] if found is None else [found.of(row) for row in truth.dataset_index.tolist()]
        if found is None or self.run.headers[capture]["steps"] > 1 or not all(len(some) for some in places):
            why = (
                f"the exchange cannot be done again under {self.run.mixing.key}: its steps mix anew, or were not stored"
            )
            return Client(truth.x, truth.y, truth.state, truth.unsent), why
        first = torch.stack([some[0] for some in places])
        return Client(found.x[first], found.y[first], truth.state, truth.unsent), ""

    def candidates(self, name: str, capture: str) -> membership.Candidates | None:
        """Return what an attack that judges candidates is asked about: the same for every call; None for other attacks.

        Raises RunError where the run's vault has no images from outside the batches.
        """
        if Knows.CANDIDATES not in registry.load("attacks", name).needs:
            return None
        if capture not in self._drawn:
            rng, client = stream(self.run.config.seed, "candidates", capture), int(self.run.headers[capture]["client"])
            self._drawn[capture] = membership.candidates(self.run.vault.truth(capture), self.run.outsiders, client, rng)
        return self._drawn[capture]
