"""Pruning: only the largest coordinates of a client's change are sent, the others stay where they were.

Source   Lin et al., ICLR 2018, arXiv 1712.01887 (top-k); Zhu et al., NeurIPS 2019, arXiv 1906.08935, section 5.2. Feedback:
         Stich et al., NeurIPS 2018, arXiv 1809.07599, Algorithm 1; Karimireddy et al., ICML 2019, arXiv 1901.09847.
Seam     uplink
Claims   none. A sparse change leaks what its coordinates say.
Knob     keep
Limits   keep = 1: the identity, bit for bit. Counts, label sets, masks and scalars go out as they are. What is not sent is
         lost; with feedback the client keeps it, e <- change + e - sent, and adds it to its next change, so that it leaks
         later: deltas, gradients, control variates, and weights that come down in every round and are trained from there.
         An upload that is lost, or comes from a client that is dropped, leaves e as it was before. An attacker does not know
         e, which may be most of an upload: what it fails to find then is no privacy. The vault holds e. Bytes on the wire:
         value and place of each coordinate that is sent, or a mask, if that is shorter. An attacker who knows of it compares
         the coordinates that were sent, and no others.
"""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from pflsec.core.change import change
from pflsec.core.config import Config, between, option
from pflsec.core.defense import Coding, Defense
from pflsec.core.items import Items


class PruneConfig(Config):
    keep: float = between(1e-6, 1.0, default=0.1, about="share of the coordinates that are sent; at least one is")
    scope: Literal["message", "item"] = option(
        default="message", about="message: the largest of all coordinates together; item: of each item by itself"
    )
    feedback: bool = option(
        default=False, about="error feedback: what is left out of a change is added to the client's next one"
    )


class Prune(Defense[PruneConfig]):
    key, seam = "prune", "uplink"
    Config = PruneConfig

    def protect(self, message: Items, reference: Items, rng: torch.Generator) -> Items:
        if self.cfg.keep == 1:
            return message
        step = change(message, reference)
        groups = [step] if self.cfg.scope == "message" else [{k: v} for k, v in step.items()]
        masks = {k: mask for group in groups for k, mask in largest(group, self.cfg.keep).items()}
        return message | {k: torch.where(mask, message[k], reference[k]) for k, mask in masks.items()}

    def coding(self, before: Coding) -> Coding:
        return before if self.cfg.keep == 1 else replace(before, sparse=True)

    def adapt(self, guess: Items, seen: Items) -> Items:
        alike = {k: v for k, v in guess.items() if k in seen and seen[k].shape == v.shape}
        return guess | {k: v * (seen[k] != 0) for k, v in alike.items()}


def largest(items: Items, share: float) -> dict[str, Tensor]:
    """Return the mask of the ceil(share * n) largest of the n coordinates; of equals the first."""
    flat = torch.cat([v.flatten().abs() for v in items.values()]) if items else torch.zeros(0)
    chosen = torch.zeros(len(flat), dtype=torch.bool)
    count = min(len(flat), math.ceil(share * len(flat) - 1e-9))
    chosen[flat.sort(descending=True, stable=True).indices[:count]] = True
    parts = chosen.split([v.numel() for v in items.values()])
    return {k: part.view(v.shape) for (k, v), part in zip(items.items(), parts, strict=True)}
