"""A capture as an optimisation problem: what is unknown, where a search starts, and what a guess would have sent."""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from pflsec.attacks import label_rules
from pflsec.attacks.minimise import Free
from pflsec.core.errors import Inconclusive, NotApplicable
from pflsec.core.items import Items, cast, floating
from pflsec.wire.capture import MOST_STEPS, Capture

Labels = Literal["restore", "optimise", "known"]
Hidden = Literal["auto", "guess", "joint", "cotangent", "log", "oracle"]
COTANGENT = "cotangent"
GUESSES = 64  # images of noise, or nearly so many, that tell the mean prediction
FAINT = (
    0.3  # their standard deviation around the mean input: clearer noise makes trained networks too sure of themselves
)
COTANGENT_SIZE = 0.05  # standard deviation at the start; the scale cannot be told from a direction
Draw = Callable[[Capture, torch.Generator, torch.dtype], Tensor]


def uniform_pixels(cap: Capture, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return images with pixels from U(0, 1), as the network sees them, [B, C, H, W]."""
    _only_images(cap)
    return cap.input.normalise(torch.rand(cap.count, *cap.input.shape, generator=rng, dtype=dtype))


def gaussian_pixels(cap: Capture, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return images with pixels from N(0, 1), as the network sees them."""
    _only_images(cap)
    return cap.input.normalise(torch.randn(cap.count, *cap.input.shape, generator=rng, dtype=dtype))


def gaussian_inputs(cap: Capture, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return network inputs from N(0, 1)."""
    _only_images(cap)
    return cap.input.noise(cap.count, rng, dtype)


def _only_images(cap: Capture) -> None:
    if cap.input.vocabulary is not None:
        raise NotApplicable("the inputs are texts, and this attack searches for pixels; use embedding-rows or tag")


def tiled_pattern(cap: Capture, rng: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return network inputs that repeat a pattern of 4x4 from N(0, 1)."""
    _only_images(cap)
    channels, height, width = cap.input.shape
    pattern = torch.randn(cap.count, channels, 4, 4, generator=rng, dtype=dtype)
    return pattern.repeat(1, 1, -(-height // 4), -(-width // 4))[..., :height, :width].contiguous()


class Problem:
    """The unknowns of one attempt at a capture.

    labels  how labels were found: known, counts (the number of images of each class is granted), wire (labels that were
            sent), restored, optimised as soft labels, or none (they are neither known nor needed)
    hidden  how the client's private items are treated: none (there are none, or the upload does not depend on them),
            log, guess, joint (all, or those that the log does not reveal), oracle, cotangent (the gradient at the
            features is unknown in place of a head and its loss)
    target  what a guess is held against: all that the upload says about the data, or with a cotangent the body's gradient
    Raises NotApplicable when nothing that was sent depends on the data, Inconclusive when the work is too long to replay.
    """

    def __init__(self, cap: Capture, labels: Labels, hidden: Hidden, rng: torch.Generator, dtype: torch.dtype):
        if not cap.target:
            raise NotApplicable("nothing that the client sends depends on its data")
        if cap.record.steps > MOST_STEPS:
            raise Inconclusive(
                f"the upload is the sum of {cap.record.steps} local steps on {cap.count} images; unrolling stops at {MOST_STEPS}"
            )
        self.cap, self.rng, self.dtype = cap, rng, dtype
        self.y, self.labels = self._labels(labels)
        self.secret: set[str] = set()
        self.state, self.hidden = self._private(hidden)
        self.free_state = self.hidden == "joint"
        if labels == "restore" and self.y is None and self.hidden != COTANGENT and not cap.soft_labels:
            self._count_labels()
        self.target = cap.target
        if self.hidden == COTANGENT:
            self.target = self._body_gradient()
            self.labels = self.labels if self.y is not None else "none"

    def start(self, draw: Draw) -> Free:
        """Return the first values of all unknowns."""
        free = {"x": draw(self.cap, self.rng, self.dtype)}
        if self.hidden == COTANGENT:
            size = self.cap.count, self.cap.net.feature_dim
            return free | {COTANGENT: COTANGENT_SIZE * torch.randn(*size, generator=self.rng, dtype=self.dtype)}
        if self.y is None:
            free["labels"] = torch.randn(self.cap.count, self.cap.input.classes, generator=self.rng, dtype=self.dtype)
        if self.free_state:
            free |= {f"state.{k}": v.to(self.dtype) for k, v in self.state.items() if k in self.secret}
        return free

    def replay(self, free: Mapping[str, Tensor]) -> Items:
        """Return what the client would have sent for these values, as far as it stands in `target`."""
        if self.hidden == COTANGENT:
            return self.cap.pullback(free["x"], free[COTANGENT])
        y = torch.softmax(free["labels"], 1) if self.y is None else self.y
        guessed = {k.removeprefix("state."): v for k, v in free.items() if k.startswith("state.")}
        return self.cap.replay(free["x"], y, self.state | guessed)

    def found_labels(self, free: Mapping[str, Tensor]) -> Tensor | None:
        """Return the labels of a solution, int64 [B], or None where they are neither known nor sought."""
        y = free["labels"] if self.y is None and "labels" in free else self.y
        return None if y is None else label_rules.hard(y)

    def joint_from_here(self) -> "Problem":
        """Return the same problem with its private items freed, starting where they are."""
        twin = object.__new__(Problem)
        twin.__dict__ = self.__dict__ | {"free_state": True}
        return twin

    def _count_labels(self) -> None:
        """Restore the labels of a batch from their counts, with noise for images."""
        if f"{self.cap.last_layer}.bias" not in self.cap.target:
            return
        guesses = -(-GUESSES // self.cap.count)
        noise = FAINT * self.cap.input.noise(guesses * self.cap.count, self.rng, self.dtype)
        counts = label_rules.of_counts(self.cap, noise.unflatten(0, (guesses, self.cap.count)), self.state)
        if counts is not None:
            self.y, self.labels = label_rules.listed(counts), "restore"

    def _labels(self, policy: Labels) -> tuple[Tensor | None, str]:
        if policy == "known":
            y = label_rules.granted(self.cap)
            return (y.to(self.dtype) if y.is_floating_point() else y), "known"
        if self.cap.soft_labels:
            return None, "optimise"
        found, how = label_rules.from_wire(self.cap, self.rng)
        if found is not None:
            return found, how
        if policy == "restore" and (found := label_rules.of_one_image(self.cap)) is not None:
            return found, "restore"
        return None, "optimise"

    def _private(self, policy: Hidden) -> tuple[Items, str]:
        """Return the private items to begin with, and how they are treated. `secret` becomes the names of the unknown."""
        cap = self.cap
        newcomer = cast(cap.newcomer(self.rng), self.dtype)
        known = cast(cap.known or {}, self.dtype) if policy in ("auto", "log") else {}
        given = policy == "oracle" and cap.state is not None
        state = cast(cap.state or {}, self.dtype) if given else newcomer | known
        self.secret = self._influential(state)
        if policy == COTANGENT:
            return state, policy
        if not self.secret:
            return state, "none"
        if policy == "oracle" and not given:
            raise NotApplicable("the client's private items are not granted to this adversary")
        self.secret -= known.keys()
        if policy == "log" and self.secret:
            raise NotApplicable("the wire log does not reveal the client's private items; use --hidden joint or guess")
        if given:
            return state, "oracle"
        return state, "log" if not self.secret else "guess" if policy == "guess" else "joint"

    def _body_gradient(self) -> Items:
        """Return what the upload says about the body. Raises NotApplicable unless that is one step's gradient of a body that
        the adversary has, with a hidden head, and nothing else, in the way."""
        cap, why = self.cap, "a cotangent stands in for a hidden head in one local step"
        if cap.record.steps > 1:
            raise NotApplicable(f"{why}; the upload is the sum of {cap.record.steps}")
        if any(name.startswith("head.") for name in cap.target):
            raise NotApplicable(f"{why}; here the head is on the wire")
        x = cap.input.blank(cap.count, self.dtype)
        names = cap.pullback(x, torch.zeros(cap.count, cap.net.feature_dim, dtype=self.dtype)).keys()
        if not names or not names <= cap.target.keys():
            raise NotApplicable(f"{why}; here no gradient of the body is on the wire")
        if not self.secret:
            raise NotApplicable(f"{why}; here what is sent depends on no hidden head")
        if others := sorted(name for name in self.secret if not name.startswith("head.")):
            raise NotApplicable(f"{why}; here {', '.join(others)} would stay hidden as well")
        return {name: cap.target[name] for name in names}

    def _influential(self, state: Items) -> set[str]:
        """Return the names of the private items upon which the upload depends: the others need not be known."""
        classes = self.cap.input.classes
        x = self.cap.input.blank(self.cap.count, self.dtype)
        y = torch.full((self.cap.count, classes), 1 / classes, dtype=self.dtype) if self.y is None else self.y
        return reached_by(state, lambda items: self.cap.replay(x, y, items).values())


def reached_by(state: Items, outputs: Callable[[Items], Iterable[Tensor]]) -> set[str]:
    """Return the names of the items upon which what is computed from them depends."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in floating(state).items()}
    if not leaves:
        return set()
    parts = [v.sum() for v in outputs(state | leaves) if v.requires_grad]
    if not parts:
        return set()
    slopes = torch.autograd.grad(torch.stack(parts).sum(), list(leaves.values()), allow_unused=True)
    return {name for name, slope in zip(leaves, slopes, strict=True) if slope is not None}
