"""TAG: find the mixtures of word embeddings whose gradient is the one that was seen, then the words nearest to them.

Source   Deng et al., Findings of EMNLP 2021, arXiv 2103.06819.
Needs    architecture, learning rate and number of steps, the client's own messages, and the table of embeddings.
Solves   min over x, y, hidden items  mean over layers of |S(x, y) - seen|^2 / |seen|^2 + alpha |S(x, y) - seen|_1 / |seen|_1
Method   The embedding in each place is a mixture x of the words' embeddings (and of padding), moved by Adam. At the end the
         mixtures become whole words: so many of each as they add up to in a text, in the places that hold most of it.
Limits   A network that reads a bag of words gives no order away, and counts up to a common factor: the words then stand in
         any order. Long texts: the words come out first, and the search may end with some of them in each other's places.
         Attempts are judged by the whole words, not by the mixtures.
Differs  The paper moves free embeddings, leaves the table's own gradient out, and weighs layers by a falling sequence; here each
         layer counts alike. It knows no words beforehand: `words = all`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.attacks import objectives
from pflsec.attacks.analytic.embedding_rows import whole_counts
from pflsec.attacks.label_rules import listed, whole
from pflsec.attacks.matching import MatchingConfig, given_and_freed, match
from pflsec.attacks.minimise import DECAY, Plan
from pflsec.attacks.problem import Problem
from pflsec.attacks.words import find_table, moved_words, only_texts, reads_order
from pflsec.core.attack import Attack, Reconstruction
from pflsec.core.config import above, at_least, option
from pflsec.core.errors import NotApplicable
from pflsec.core.inputs import PAD
from pflsec.core.knowledge import Knows
from pflsec.wire.capture import Capture

EPS = 1e-12
BLIND = "the network sees no order of words: none is found"


class TAGConfig(MatchingConfig):
    iterations: int = at_least(1, default=500, about="Adam steps", paper=1000)
    alpha: float = at_least(
        0, default=1.0, about="weight of the absolute distance beside the squared one, both relative"
    )
    words: Literal["moved", "all"] = option(
        default="moved",
        about="moved: only words whose rows of the table have moved, where these rows are on the wire; all: the vocabulary",
        paper="all",
    )
    lr: float = above(0, default=0.1, about="Adam step size on mixtures and labels")
    state_lr: float = above(0, default=0.02, about="Adam step size on the client's private items, or on the cotangent")
    tolerance: float = at_least(0, default=1e-3, about="stop when the objective is below")


class TAG(Attack[TAGConfig]):
    key = "tag"
    Config = TAGConfig
    needs: ClassVar = frozenset({Knows.ARCH, Knows.INPUT, Knows.UPLINK, Knows.HYPER})

    def reconstruct(self, cap: Capture, rng: torch.Generator) -> Reconstruction:
        only_texts(cap)
        cfg, ordered = self.cfg, reads_order(cap)
        allowed, note = candidates(cap, cfg.words)
        plan = Plan("adam", cfg.iterations, cfg.lr, cfg.tolerance, decay_at=DECAY, state_lr=cfg.state_lr)
        found = match(
            as_mixtures(cap, allowed),
            cfg,
            rng,
            distance=partial(objectives.squared_and_absolute, alpha=cfg.alpha),
            draw=partial(any_mixture, allowed),
            plans=[plan],
            poses=with_a_known_table,
            settle=whole_words if ordered else whole_bags,
            note="; ".join(filter(None, (note, "" if ordered else BLIND))),
        )
        assert found.x is not None
        return replace(found, x=found.x.argmax(-1))


def candidates(cap: Capture, policy: str) -> tuple[Tensor, str]:
    """Return which words a text may have, padding among them, bool [vocabulary], and a note where these are not as asked."""
    assert cap.input.vocabulary is not None
    allowed = torch.full((cap.input.vocabulary,), policy == "all")
    allowed[PAD] = True
    if policy == "all":
        return allowed, ""
    if (table := find_table(cap)) is None:
        return torch.ones_like(
            allowed
        ), "no gradient of the table is on the wire: every word of the vocabulary is tried"
    allowed[moved_words(cap, table)] = True
    return allowed, ""


def any_mixture(allowed: Tensor, cap: Capture, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return soft tokens [B, T, vocabulary] with weights from U(0, 1), zero for words that are not allowed."""
    return torch.rand(cap.count, *cap.input.shape, len(allowed), generator=rng, dtype=dtype) * allowed


def as_mixtures(cap: Capture, allowed: Tensor) -> Capture:
    """Return the capture with replays in which the weights of the allowed words sum to 1 in each place."""

    def mixed(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        weights = x * allowed
        return weights / weights.sum(-1, keepdim=True).clamp(min=EPS)

    return replace(
        cap,
        replay_fn=lambda x, y, state: cap.replay_fn(mixed(x), y, state),
        pullback_fn=lambda x, u: cap.pullback_fn(mixed(x), u),
    )


def with_a_known_table(problem: Problem) -> Sequence[Problem]:
    """Return the problems that are searched. Raises NotApplicable where the client's table of embeddings is hidden."""
    hidden = problem.secret if problem.hidden in ("joint", "guess") else set()
    for table in sorted(problem.cap.net.embeddings):
        if any(name == table or name.endswith(f".{table}") for name in hidden):
            raise NotApplicable(
                f"the client keeps its table of embeddings ({table}) to itself: no word has a name in it"
            )
    return given_and_freed(problem)


def whole_words(x: Tensor) -> Tensor:
    """Return certain soft tokens [..., T, vocabulary], float: in each text so many of each word as the mixtures add up to.

    A text has as many words, padding included, as places; they go to the places that hold most of them, all in all.
    """
    from scipy.optimize import linear_sum_assignment

    def text(mixtures: Tensor) -> Tensor:
        counts = whole(mixtures.sum(0), len(mixtures), torch.zeros(mixtures.shape[1], dtype=torch.int64))
        words = listed(counts)
        places, order = linear_sum_assignment(-mixtures[:, words].numpy())
        return words[order][torch.from_numpy(places).argsort()]

    return each_text(text, x)


def whole_bags(x: Tensor) -> Tensor:
    """Return the same where only the words' shares of a text are known: the smallest counts with these shares, in any order."""

    def text(mixtures: Tensor) -> Tensor:
        room, shares = len(mixtures), mixtures.sum(0)
        shares[PAD] = 0
        words = (shares > shares.sum() / (2 * room)).nonzero().flatten()
        if not len(words):
            return torch.full((room,), PAD)
        counts, _ = whole_counts(shares[words, None], room, room)
        found = words.repeat_interleave(counts)[:room]
        return torch.nn.functional.pad(found, (0, room - len(found)), value=PAD)

    return each_text(text, x)


def each_text(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return fn, from mixtures [T, vocabulary] to tokens [T], of each text in x [..., T, vocabulary], as soft tokens."""
    mixtures = x / x.sum(-1, keepdim=True).clamp(min=EPS)
    tokens = torch.stack([fn(text) for text in mixtures.flatten(0, -3)]).reshape(x.shape[:-1])
    return torch.nn.functional.one_hot(tokens, x.shape[-1]).to(x)
