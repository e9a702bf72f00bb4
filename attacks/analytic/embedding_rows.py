"""Embedding rows: the words of a batch are those whose rows in the table of embeddings have moved.

Source   Melis, Song, De Cristofaro, Shmatikov, IEEE S&P 2019, arXiv 1805.04049, section 4.1; the counts by algebra of ours.
Needs    architecture, the client's own messages. Neither the head nor the labels, the loss, or the learning rate.
Solves   row_w = sum_b count_bw u_b  with a vector u_b for each text b: integer counts, and u_b by least squares
Method   No search. One text: the lengths of its rows along their common direction, and the unit that makes them whole. Several:
         rows of words that one text has to itself lie along its u_b, and all others between; then each text as if alone.
Limits   Counts are found up to a common factor for each text, and no order of the words. Where a text has fewer than two words
         to itself, or the directions depend on each other (always, of more texts than classes - 1), the set of all words for
         each text. Only networks that read a bag of words have such rows. Where more rows have moved than there is room for
         (noise), the largest. Label: by rule for one text.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pflsec.attacks import label_rules
from pflsec.attacks.words import moved_words, table_gradient
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import Config, at_least, between
from pflsec.core.inputs import PAD
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture

ALIKE = 0.01  # distance of two directions that rounding may cause
APART = 0.05  # smallest singular value of the texts' directions with which shares of them can be told


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
        rows, room, note = gradient[words], cap.input.shape[0], ""
        if cap.count == 1:
            counts, left = whole_counts(rows, room, self.cfg.most)
            texts = [words.repeat_interleave(counts)]
        elif (apart := by_text(rows, cap.count, self.cfg.tolerance)) is not None:
            shares, left = apart
            texts = [_text(words, share, room, self.cfg.most) for share in shares.T]
        else:
            texts, left = [words] * cap.count, 0.0
            note = f"{cap.count} texts share the rows: the set of their words, not which word is in which text"
        inside = float(rows.square().sum() / gradient.square().sum())
        left = 1 - inside + inside * left
        y, how = _labels(cap, rng)
        return Reconstruction(
            x=torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD),
            y=y,
            objective=left,
            status="converged" if left <= self.cfg.tolerance else "budget",
            iterations=0,
            restarts=1,
            labels=how,
            hidden="none",
            note=note,
        )


def by_text(rows: Tensor, texts: int, tolerance: float) -> tuple[Tensor, float] | None:
    """Return how much of each text's direction is in the rows [k, dim], float64 [k, texts], and what that leaves of the rows,
    squared and relative; None where the rows do not tell the texts apart.

    Words of one text alone have rows along its direction; rows of words that texts share lie between. The directions are thus
    those of several rows that are no mixtures, with weights above zero, of the other directions.
    """
    edges = _edges(_directions(rows))
    if len(edges) != texts or texts > rows.shape[1] or float(torch.linalg.svdvals(edges)[-1]) < APART:
        return None
    shares = torch.stack([_mixture(row, edges)[0] for row in rows])
    left = float((rows - shares @ edges).square().sum() / rows.square().sum())
    return (shares, left) if left <= tolerance else None


def _directions(rows: Tensor) -> Tensor:
    """Return the directions [n, dim], of length 1, that at least two rows share."""
    units, found = torch.nn.functional.normalize(rows, dim=1), []
    free = torch.ones(len(rows), dtype=torch.bool)
    for i in rows.norm(dim=1).argsort(descending=True).tolist():
        near = free & ((units - units[i]).norm(dim=1) < ALIKE)
        if free[i] and near.sum() > 1:
            found.append(torch.nn.functional.normalize(rows[near].sum(0), dim=0))
        free &= ~near
    return torch.stack(found) if found else rows[:0]


def _edges(directions: Tensor) -> Tensor:
    """Return those of the directions [n, dim] that are no mixtures of the others."""
    kept = list(range(len(directions)))
    for i in range(len(directions)):
        others = [j for j in kept if j != i]
        if others and _mixture(directions[i], directions[others])[1] < ALIKE:
            kept = others
    return directions[kept]


def _mixture(row: Tensor, parts: Tensor) -> tuple[Tensor, float]:
    """Return the weights [n], none below zero, with which parts [n, dim] come nearest to a row, and how far that is."""
    from scipy.optimize import nnls

    weights, distance = nnls(parts.T.numpy(), row.numpy())
    return torch.from_numpy(weights), float(distance)


def _text(words: Tensor, share: Tensor, room: int, most: int) -> Tensor:
    """Return the words of one text, each as often as its share says, from the shares of all words of the batch."""
    here = share > share.sum() / (2 * room)
    counts, _ = whole_counts(share[here, None], room, most)
    return words[here].repeat_interleave(counts)


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
