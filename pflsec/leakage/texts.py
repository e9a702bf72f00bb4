"""Leakage of one victim batch of texts: which of the words the network saw were found, as multisets, without padding.

One Hungarian assignment by common words serves every measure and the labels; a text without a reconstruction has none of its
words found. Words outside the vocabulary are one word: the network sees no difference, and no attack can.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import eq
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pflsec.core.errors import RunError
from pflsec.core.inputs import PAD, UNKNOWN
from pflsec.leakage.labels import overlap
from pflsec.leakage.score import VictimScore
from pflsec.leakage.vault import Pool, Truth

NO_IMAGE = "no-image"
"""Stands beside the empty columns of scores.csv that measure images."""

Words = Counter[int]


@dataclass(frozen=True, kw_only=True)
class TextScore:
    """One true text against the reconstruction assigned to it. None: there is no reconstruction at all.

    words, unknown  number of words in the text, and of those among them that are outside the vocabulary
    found           number of words in the reconstruction
    token_recall, token_precision  words in both (multisets), as a share of the true and of the found ones
    set_exact, multiset_exact, sequence_exact  1.0 where the same words were found; as often each; in the same order
    rouge_l         F1 of the longest common subsequence of both (ROUGE-L, Lin 2004): words in order, with gaps
    in_place        share of the true words that stand at their own place, counted from the beginning
    identified      1.0 where the pool's nearest text by multiset (L1 of the counts) is the victim or its duplicate
    recall_blind    token_recall of the best guess that needs no message
    """

    position: int
    dataset_index: int
    matched: bool
    words: int
    unknown: int
    found: int
    token_recall: float | None
    token_precision: float | None
    set_exact: float | None
    multiset_exact: float | None
    sequence_exact: float | None
    rouge_l: float | None
    in_place: float | None
    identified: float | None
    recall_blind: float
    label_true: int
    label_found: int | None

    def row(self) -> dict[str, Any]:
        """Return the values by column name, for `pflsec.core.files.to_csv`."""
        return asdict(self)


def score(truth: Truth, tokens: Tensor | None, rec_y: Tensor | None, pool: Pool) -> tuple[VictimScore, list[TextScore]]:
    """Return the leakage of one victim batch of B texts: what scores.csv has columns for, and a score for each text.

    tokens int64 [R, any length]; None when the attack gives labels only, or nothing. rec_y [R] or None. Raises RunError when
    the pool lacks the victim, ValueError when reconstruction and labels do not fit each other.
    """
    if truth.x.is_floating_point() or pool.images.is_floating_point():
        raise RunError(
            "the vault is damaged: it holds images, but the run trained on texts. Train again with captures."
        )
    lacking = set(truth.dataset_index.tolist()) - set(pool.dataset_index.tolist())
    if lacking:  # the victim could never be identified, which would read as privacy
        raise RunError(
            f"the vault is damaged: the pool lacks the victim's text {min(lacking)}. Train again with captures."
        )
    labels = None if rec_y is None else [int(label) for label in rec_y]
    if tokens is not None and labels is not None and len(labels) != len(tokens):
        raise ValueError(f"the reconstruction has {len(tokens)} texts and {len(labels)} labels")
    order = [-1] * len(truth.x) if tokens is None else assign(truth.x, tokens)
    texts = []
    for i, j in enumerate(order):
        guess = tokens[j] if tokens is not None and j >= 0 else None
        label = labels[j] if labels is not None and j >= 0 and tokens is not None else None
        texts.append(_text(truth, i, guess, tokens is not None, label, pool))
    found = labels if tokens is None else [one.label_found for one in texts if one.label_found is not None]
    return _batch(texts, None if labels is None else found), texts


def assign(truth: Tensor, tokens: Tensor) -> list[int]:
    """Return, for each true text [B, T], the place of its reconstruction, or -1 for none, so that most words are common."""
    from scipy.optimize import linear_sum_assignment

    common = np.array([[(bag(t) & bag(g)).total() for g in tokens] for t in truth]).reshape(len(truth), len(tokens))
    order = [-1] * len(truth)
    for row, column in zip(*linear_sum_assignment(-common), strict=True):
        order[int(row)] = int(column)
    return order


def bag(tokens: Tensor) -> Words:
    """Return how often each word is in a text [any length], without padding."""
    return Counter(tokens[tokens != PAD].tolist())


def identified(guess: Words, pool: Pool, true_index: int, true: Words) -> bool:
    """Return whether the pool's nearest text, by the L1 distance of the counts, is the victim or has the same words.

    Among candidates at the same distance the first of the pool counts.
    """
    candidates = [bag(text) for text in pool.images]
    distances = [((guess - other) + (other - guess)).total() for other in candidates]
    nearest = min(range(len(candidates)), key=lambda i: distances[i])
    return int(pool.dataset_index[nearest]) == true_index or candidates[nearest] == true


def _text(truth: Truth, i: int, guess: Tensor | None, tried: bool, label: int | None, pool: Pool) -> TextScore:
    """Return the score of the i-th true text; `guess` is None where nothing was assigned to it."""
    true, index = bag(truth.x[i]), int(truth.dataset_index[i])
    found: Words = Counter() if guess is None else bag(guess)
    said, guessed = _sequence(truth.x[i]), [] if guess is None else _sequence(guess)
    common, blind = (true & found).total(), (true & bag(pool.mean)).total()
    measures = {
        "token_recall": _share(common, true.total()),
        "token_precision": _share(common, found.total()),
        "set_exact": float(true.keys() == found.keys()),
        "multiset_exact": float(true == found),
        "sequence_exact": float(guess is not None and guessed == said),
        "rouge_l": _share(2 * common_subsequence(said, guessed), len(said) + len(guessed)),
        "in_place": _share(sum(map(eq, said, guessed)), len(said)),
        "identified": float(bool(found) and identified(found, pool, index, true)),
    }
    return TextScore(
        position=i,
        dataset_index=index,
        matched=guess is not None,
        words=true.total(),
        unknown=true[UNKNOWN],
        found=found.total(),
        recall_blind=_share(blind, true.total()),
        label_true=int(truth.y[i]),
        label_found=label,
        **(measures if tried else dict.fromkeys(measures)),
    )


def common_subsequence(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for a in one:
        diagonal = 0
        for j, b in enumerate(other, 1):
            diagonal, row[j] = row[j], diagonal + 1 if a == b else max(row[j], row[j - 1])
    return row[-1]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _sequence(tokens: Tensor) -> list[int]:
    return tokens[tokens != PAD].tolist()


def _batch(texts: Sequence[TextScore], found: Sequence[Any] | None) -> VictimScore:
    hits = [one.identified for one in texts if one.identified is not None]
    true = [one.label_true for one in texts]
    images = ("mse", "mse_unclipped", "psnr", "psnr_capped", "ssim", "lpips", "clip_frac", "psnr_blind", "excess_psnr")
    return VictimScore(
        **dict.fromkeys(images),
        ssim_variant=NO_IMAGE,
        lpips_status=NO_IMAGE,
        saturated=False,
        nonfinite=False,
        identified=fmean(hits) if hits else None,
        label_true=" ".join(map(str, true)),
        label_found=None if found is None else " ".join(map(str, found)),
        label_correct=None if found is None else overlap(true, list(found)),
        images=[],
    )


def in_order(truth: Tensor | None, tokens: Tensor) -> Tensor:
    """Return reconstructed texts in the order of the true ones [B, T], padding where there is none; without a truth, as is."""
    if truth is None:
        return tokens
    order = assign(truth, tokens)
    return torch.stack([tokens[j] if j >= 0 else torch.full_like(tokens[0], PAD) for j in order])
