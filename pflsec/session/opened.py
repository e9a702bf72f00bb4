"""A run, opened for one set of an attack's options: all that can be wrong shows before the work begins."""

from functools import cached_property
from pathlib import Path

import torch

from pflsec.config.attack import AttackConfig
from pflsec.core import registry
from pflsec.leakage.perceptual import Perceptual
from pflsec.leakage.score import check_pool
from pflsec.leakage.vault import Mixtures, Outsiders, Pool, Vault
from pflsec.runtime import attacking, cluster
from pflsec.runtime.defending import mixing, parse_defense
from pflsec.runtime.folder import RunFolder
from pflsec.wire.store import CaptureStore


class OpenRun:
    """A run folder with the captures that the options select, the vault, and the metrics that they are scored by.

    naive   the attacker does not know of the run's defenses      mixing  the defense that mixes the clients' images, or None
    pool    None where the run has no vault, and nothing is scored
    """

    def __init__(self, folder: RunFolder, config: AttackConfig):
        self.folder, self.config = folder, config
        if config.executor == "ray":
            cluster.library()
        self.train, self.spec = attacking.training_config(folder)
        self.card = registry.card("algorithms", self.train.algo)
        self.naive = config.naive and bool(self.train.defense)
        self.mixing = mixing([parse_defense(text) for text in self.train.defense])
        self.epsilon = folder.last_metrics().get("epsilon")
        self.captures = attacking.selected(folder, config)
        weights = Path(config.lpips_weights) if config.lpips_weights else None
        self.perceptual = Perceptual.find(config.lpips if self.spec.vocabulary is None else "none", weights)
        self.vault = Vault(folder.vault)
        self.pool: Pool | None = self.vault.pool() if (folder.vault / "pool.safetensors").exists() else None
        self.private = attacking.check(folder, self.captures, config.visible or ())
        store = CaptureStore(folder.captures)
        self.headers = {name: store.header(name) for name in self.captures}
        if self.pool is not None:
            self._check_vault(self.pool)

    def _check_vault(self, pool: Pool) -> None:
        for name, header in self.headers.items():
            sent = {item["name"]: torch.Size(item["shape"]) for item in header["items"]["up"]}
            check_pool(pool, self.vault.check(name, self.spec, header["batch"], self.private, sent))
            self.mixtures(name)

    def mixtures(self, capture: str) -> Mixtures | None:
        """Return what a capture's steps trained on in place of its batch, or None where they did not, or it was not stored."""
        return self.vault.mixtures(capture, self.spec) if self.mixing is not None else None

    @cached_property
    def outsiders(self) -> Outsiders:
        """The images that are in no batch. Raises RunError where the run's vault has none."""
        return self.vault.outsiders()
