"""Embedding rows: the words of a batch are those whose rows in the table of embeddings have moved.

Source   Melis, Song, De Cristofaro, Shmatikov, IEEE S&P 2019, arXiv 1805.04049, section 4.1; the counts by algebra of ours.
Needs    architecture, the client's own messages. Neither the head nor the labels, the loss, or the learning rate.
Solves   for one text  row_w = count_w u  with one vector u for all words w: integer counts and u by least squares
Method   No search: the rows that are not zero, their lengths along the common direction, and the unit that makes them whole.
Limits   Counts are found up to a common factor, and no order of the words. Of several texts: the set of all their words,
         for each of them. Where more rows have moved than there is room for (noise), the largest. Label: by rule for one text.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pflsec.attacks import label_rules
from pflsec.attacks.words import moved_words, table_gradient
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import Config, at_least, between
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture


class EmbeddingRowsConfig(Config):
    most: int = between(1, 64, default=8, about="largest count that the rarest word of the text may have")
    tolerance: float = at_least(
        0, default=1e-3, about="the counts hold if they leave less of the rows, squared and relative"
    )


class EmbeddingRows(Attack[EmbeddingRowsConfig]):
    key = "embedding-rows"
    Config = EmbeddingRowsConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        gradient = table_gradient(cap)
        words = moved_words(cap, gradient)
        counts, left, note = torch.ones_like(words), 0.0, ""
        if cap.count == 1:
            counts, left = whole_counts(gradient[words], cap.input.shape[0], self.cfg.most)
        else:
            note = f"{cap.count} texts share the rows: the set of their words, not which word is in which text"
        inside = float(gradient[words].square().sum() / gradient.square().sum())
        left = 1 - inside + inside * left
        y, how = _labels(cap, rng)
        return Reconstruction(
            x=words.repeat_interleave(counts).expand(cap.count, -1),
            y=y,
            objective=left,
            status="converged" if left <= self.cfg.tolerance else "budget",
            iterations=0,
            restarts=1,
            labels=how,
            hidden="none",
            note=note,
        )


def whole_counts(rows: Tensor, room: int, most: int) -> tuple[Tensor, float]:
    """Return the counts of words, int64 [k], whose rows [k, dim] are these multiples of one vector, and what that leaves of the
    rows, squared and relative.

    room, most  the counts add up to no more than `room` (unless every word is there only once), the smallest is at most `most`
    """
    direction = torch.nn.functional.normalize(rows.sum(0), dim=0)
    lengths = rows @ direction
    ones = torch.ones(len(rows), dtype=torch.int64)
    best, least = ones, _left(rows, ones)
    unit = lengths.clamp(min=0)[lengths > 0].min() if bool((lengths > 0).any()) else lengths.new_ones(())
    for rarest in range(1, most + 1):
        counts = (lengths * rarest / unit).round().clamp(min=1).long()
        # A finer unit always leaves less: it must leave much less to be believed.
        if int(counts.sum()) <= room and (left := _left(rows, counts)) < least / 4:
            best, least = counts, left
    return best, least


def _left(rows: Tensor, counts: Tensor) -> float:
    """Return |rows - counts u|^2 / |rows|^2 at the vector u for which that is least."""
    weights = counts.to(rows.dtype)
    u = weights @ rows / weights.square().sum()
    return float((rows - weights[:, None] * u).square().sum() / rows.square().sum())


def _labels(cap: Capture, rng: torch.Generator) -> tuple[Tensor | None, str]:
    """Return the labels of as many texts as are returned, one, and how they were found."""
    if cap.count > 1:
        return None, "none"
    found, how = label_rules.from_wire(cap, rng)
    if found is not None:
        return found, how
    found = label_rules.of_one_image(cap)
    return found, "none" if found is None else "restore"
