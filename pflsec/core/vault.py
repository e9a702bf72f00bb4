"""The vault's writer. The vault holds the victims' true data; only `pflsec.leakage` reads it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from pflsec.core.files import write_json
from pflsec.core.items import Items, prefixed
from pflsec.core.tensors import write_items


class VaultWriter:
    """Writes what the attacker must not see into `folder`, beside the captures.

    <capture>.safetensors   x [B, C, H, W] as the network saw it (normalised), or tokens [B, T], y [B], dataset_index [B],
                            state.* (the client's private items before its local work); under defenses of the wire up.* (the
                            upload before they acted), unsent.<defense>.* (what they had left out of earlier ones)
    <capture>.json          replay_residual: relative distance of the replayed from the captured uplink, at the truth;
                            mixed_residual: of the replay on the mixed batch of the first step, under a defense that mixes
    <capture>.mixed.safetensors  under a defense that mixes images, what every step trained on: x [N, C, H, W] as the network saw
                            it, y [N, classes] probabilities, step [N], main [N] bool (a step of the phase that is sent), parts
                            [N, k] dataset rows of which x is mixed, its own first, weights [N, k]; and of all parts images
                            [P, C, H, W] as the network sees them, dataset_index [P]
    pool.safetensors        images [P, C, H, W] in pixel space [0, 1], dataset_index [P], mean [C, H, W] (the mean image); of
                            texts images are tokens [P, T], mean the commonest ones [T]
    outsiders.safetensors   x [N, C, H, W] as the network saw it, y [N], dataset_index [N], client [N]: test rows of the captured
                            clients, which are in no batch
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def victim(
        self,
        capture: str,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        state: Items,
        facts: Mapping[str, Any],
        up: Items | None = None,
        unsent: Items | None = None,
    ) -> None:
        """Store one victim batch under its capture's id, with what the client did not show."""
        items = {"x": x, "y": y, "dataset_index": index} | prefixed("state", state)
        items |= prefixed("up", up or {}) | prefixed("unsent", unsent or {})
        write_items(self.folder / f"{capture}.safetensors", items)
        write_json(self.folder / f"{capture}.json", facts)

    def mixtures(self, capture: str, items: Items) -> None:
        """Store what the steps behind a capture trained on in place of its victim batch."""
        write_items(self.folder / f"{capture}.mixed.safetensors", items)

    def pool(self, images: Tensor, index: Tensor, mean: Tensor) -> None:
        """Store the identification pool and the federation's mean training image."""
        write_items(self.folder / "pool.safetensors", {"images": images, "dataset_index": index, "mean": mean})

    def outsiders(self, x: Tensor, y: Tensor, index: Tensor, client: Tensor) -> None:
        """Store images that no client trains on, with the client whose test set they are from."""
        write_items(self.folder / "outsiders.safetensors", {"x": x, "y": y, "dataset_index": index, "client": client})
