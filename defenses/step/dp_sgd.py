"""DP-SGD: every example's gradient is clipped, and noise is added to their sum, inside each client's training.

Source   Abadi et al., CCS 2016, arXiv 1607.00133, Algorithm 1; clipping, noise and accounting by Opacus.
Seam     step
Claims   formal: (epsilon, delta) for single records (add or remove one), against everybody who sees the messages, for
         everything on the wire that is computed from the noised gradients alone. Sample counts are taken as public.
Knob     epsilon (the noise is found for each client's planned steps) or noise_multiplier
Limits   noise_multiplier = 0 with a large max_grad_norm: training without it. Probes use fixed batches: epsilon speaks of
         the training run, not of them. An attacker who knows of it clips every example's gradient in its replay.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from pflsec.core.config import Config, above, at_least, option
from pflsec.core.defense import Spend, StepDefense
from pflsec.core.errors import PrivacyError
from pflsec.core.items import Items
from pflsec.core.local import LossPerExample
from pflsec.core.streams import stream
from pflsec.defenses import accounting

CHECKED = 3  # examples on which the loss is taken alone, to see that it does not couple the batch


class DPSGDConfig(Config):
    epsilon: float | None = above(
        0, default=None, about="budget of each client over the whole run; it stops before exceeding it"
    )
    noise_multiplier: float | None = at_least(
        0, default=None, about="standard deviation of the noise over max_grad_norm"
    )
    max_grad_norm: float = above(0, default=1.0, about="norm to which each example's gradient is clipped")
    delta: float | None = above(0, default=None, about="none: the smaller of 1e-5 and 1/(10 n), n the client's samples")
    accountant: Literal["rdp", "prv"] = option(
        default="rdp",
        about="what epsilon is stated by; noise is found and budgets are kept by rdp, a fast upper bound; prv: tighter, slow",
    )
    sampling: Literal["poisson", "shuffle"] = option(
        default="poisson", about="poisson: what the accountant assumes; shuffle: its numbers are then approximations"
    )
    unit: Literal["record"] = option(default="record", about="what is protected: single records")

    @model_validator(mode="after")
    def _one_knob_at_least(self):
        if self.epsilon is None and self.noise_multiplier is None:
            raise ValueError("give epsilon or noise_multiplier, e.g. dp-sgd:epsilon=8")
        if self.delta is not None and self.delta >= 1:
            raise ValueError(f"delta is {self.delta:g}; it must be below 1, and should be below 1/n")
        return self


class DPSGD(StepDefense[DPSGDConfig]):
    key = "dp-sgd"
    Config = DPSGDConfig

    @property
    def budget(self) -> float | None:
        return self.cfg.epsilon

    @property
    def longest(self) -> float:
        return self.cfg.max_grad_norm

    def delta(self, samples: int) -> float:
        return self.cfg.delta if self.cfg.delta is not None else min(1e-5, 1 / (10 * samples))

    def epsilon(self, account: Sequence[Spend], samples: int) -> float:
        return accounting.epsilon(account, self.delta(samples), self.cfg.accountant)

    def bound(self, account: Sequence[Spend], samples: int) -> float:
        return accounting.epsilon(account, self.delta(samples))

    def noise_multiplier(self, samples: int, rate: float, steps: int, beside: Sequence[Spend] = ()) -> float:
        if self.cfg.noise_multiplier is not None:
            return self.cfg.noise_multiplier
        assert self.cfg.epsilon is not None  # the configuration has one of the two
        return accounting.noise_for(self.cfg.epsilon, self.delta(samples), rate, max(1, steps), tuple(beside))

    def guard(self, samples: int, batch_size: int, noise_multiplier: float, *key: int | str) -> "DPGuard":
        return DPGuard(self.cfg, samples, batch_size, noise_multiplier, key)

    def claim(self) -> str:
        if self.cfg.sampling == "poisson":
            return "formal: (epsilon, delta) for single records"
        return "none: shuffled batches are accounted as if they were drawn by Poisson sampling"


class DPGuard:
    """Stands between one client's data and its parameters, for one local work (see pflsec.core.defense.Guard)."""

    def __init__(
        self, cfg: DPSGDConfig, samples: int, batch_size: int, noise_multiplier: float, key: tuple[int | str, ...]
    ):
        self.cfg, self.samples, self.sigma = cfg, samples, noise_multiplier
        self.steps_per_epoch = max(1, -(-samples // batch_size))
        self.rate = 1 / self.steps_per_epoch
        self.expected_batch = max(1, int(samples * self.rate))
        self.spent: list[Spend] = []
        self.key = key
        self._streams: dict[str, torch.Generator] = {}
        self._seen: set[int] = set()
        self._current: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_streams": {}}  # a guard travels to its worker before its first draw

    def _stream(self, purpose: str) -> torch.Generator:
        return self._streams.setdefault(purpose, stream(purpose, *self.key))

    def rows(self, epochs: int) -> Iterator[Tensor]:
        """Yield the rows of each step: every record by chance with the sample rate, so that a step may have none."""
        for _ in range(epochs):
            if self.cfg.sampling == "shuffle":
                yield from torch.randperm(self.samples, generator=self._stream("sampling")).chunk(self.steps_per_epoch)
                continue
            for _ in range(self.steps_per_epoch):
                yield (torch.rand(self.samples, generator=self._stream("sampling")) < self.rate).nonzero().flatten()

    def class_sums(self, rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        raise PrivacyError(
            "ctx.class_sums gives away sums over raw data, which dp-sgd does not protect. Add --defense dp-release, or train "
            "this method without dp-sgd."
        )

    def gradient(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the clipped, noised mean gradient (divided by the expected batch size); counts as one step."""
        if id(on) not in self._seen and len(x):
            self._check_uncoupled(on, params, x, y)
            self._seen.add(id(on))
        leaves = list(params.values())
        for leaf, sample in zip(leaves, self._per_sample(on, params, x, y), strict=True):
            leaf.grad_sample = sample  # type: ignore[attr-defined]
        optimizer = self._optimizer(leaves)
        optimizer.pre_step()
        gradients = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
        optimizer.zero_grad(set_to_none=True)
        self.spent.append((self.sigma, self.rate, 1))
        return gradients

    def _optimizer(self, leaves: list[Tensor]) -> Any:
        """Return Opacus's optimiser of these tensors, which clips, sums, noises and averages; one for each fit."""
        from opacus.optimizers import DPOptimizer

        if self._current is None or self._current.params[0] is not leaves[0]:
            self._current = DPOptimizer(
                torch.optim.SGD(leaves, lr=1.0),
                noise_multiplier=self.sigma,
                max_grad_norm=self.cfg.max_grad_norm,
                expected_batch_size=self.expected_batch,
                generator=self._stream("noise"),
            )
        return self._current

    def _per_sample(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return each example's own gradient, [B, *shape] for every parameter."""
        if not len(x):
            return [p.new_zeros(0, *p.shape) for p in params.values()]

        def loss(p: Items, a: Tensor, b: Tensor) -> Tensor:
            return on(p, a[None], b[None])[0]

        bare = {k: p.detach() for k, p in params.items()}
        found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0), randomness="different")(bare, x, y)
        return [found[k].detach() for k in params]

    @torch.no_grad()
    def _check_uncoupled(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> None:
        together = on(params, x, y)
        if together.shape != (len(x),):
            raise PrivacyError(
                f"under dp-sgd a loss must return one number an example, [{len(x)}]; it returned {list(together.shape)}. "
                "Take no mean inside the loss."
            )
        for i in range(min(CHECKED, len(x))):
            alone = on(params, x[i : i + 1], y[i : i + 1])[0]
            if not torch.allclose(alone, together[i], rtol=1e-3, atol=1e-5):
                raise PrivacyError(
                    f"under dp-sgd the loss of an example must not depend on the others in its batch; example {i} has "
                    f"{float(together[i]):.6g} among others and {float(alone):.6g} alone. Clipping could not bound one "
                    "record's influence."
                )
