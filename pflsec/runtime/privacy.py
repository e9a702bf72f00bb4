"""Differential privacy over a run: who adds how much noise, what has been spent, and who has to stop."""

import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pflsec.core.change import reference
from pflsec.core.contract import kind_of
from pflsec.core.defense import (
    Defense,
    Guard,
    ModelDefense,
    ReleaseDefense,
    ShapingDefense,
    Spend,
    StepDefense,
    UserDefense,
    of_kind,
)
from pflsec.core.errors import PflsecWarning, PrivacyError
from pflsec.core.items import Items, first_unlike
from pflsec.core.network import Net
from pflsec.core.streams import seed_of, stream
from pflsec.runtime import cohort as cohorts
from pflsec.runtime import feeding, sums
from pflsec.runtime.defending import inside
from pflsec.runtime.setup import Setup
from pflsec.training.local import LocalWork, for_method

PUBLIC = ("counts",)
"""Declarations of items that the guarantee takes as public: sample counts. Counts of each class are not."""
CLIPPED = "none: clipping alone; without noise epsilon is infinite"
"""What is guaranteed where somebody's noise multiplier is 0."""


def mechanism(setup: Setup) -> StepDefense[Any] | None:
    """Return the run's private training, or None without one."""
    return of_kind(setup.defenses, StepDefense)


def release(setup: Setup) -> ReleaseDefense[Any] | None:
    """Return what protects the class sums of the run's clients, or None."""
    return of_kind(setup.defenses, ReleaseDefense)


def user_mechanism(setup: Setup) -> UserDefense[Any] | None:
    """Return the run's noisy sum, or None without one."""
    return of_kind(setup.defenses, UserDefense)


def check(setup: Setup) -> None:
    """Raise PrivacyError when the method cannot be trained under one of the run's defenses."""
    if (private := mechanism(setup)) is not None:
        _check_private(setup, private)
    sums.check(setup)
    users = user_mechanism(setup)
    if users is not None and setup.algorithm.sampling_weights(setup.federation.sizes()) is not None:
        raise PrivacyError(
            f"{setup.config.algo} draws its clients with unequal chances, which the account of {users.key} does not know. "
            f"Let it draw them with equal chances, or choose no {users.key}."
        )
    if (shaping := setup.shaping) is not None and (reason := _unshaped(setup, shaping)):
        raise _useless(setup, shaping, reason)
    if (mixing := setup.mixing) is not None and (reason := feeding.why_not(setup)):
        raise _useless(setup, mixing, reason)
    if (model := of_kind(setup.defenses, ModelDefense)) is not None and not _noticed(setup, model):
        raise PrivacyError(
            f"{setup.config.algo} cannot be trained under {model.key} (nothing that its clients send is changed by it). Choose "
            f"another method, or no {model.key}."
        )


def _useless(setup: Setup, defense: Defense[Any], reason: str) -> PrivacyError:
    return PrivacyError(
        f"{setup.config.algo} cannot be trained under {defense.key} ({reason}). Choose another method, other settings, or no "
        f"{defense.key}."
    )


def _check_private(setup: Setup, private: StepDefense[Any]) -> None:
    support = setup.algorithm.dp_support
    treated = support.startswith("partial") and release(setup) is not None
    if support != "full" and not treated:
        remedy = "or add --defense dp-release" if support.startswith("partial") else f"or no {private.key}"
        raise PrivacyError(
            f"{setup.config.algo} cannot be trained under {private.key} ({support}). Choose another method, {remedy}."
        )
    if setup.net.buffers:
        raise PrivacyError(
            f"the model cannot be trained under {private.key}: its layer '{setup.net.batchnorms[0]}' is BatchNorm, which ties "
            "the examples of a batch together, so that no single one's gradient can be clipped, and keeps statistics of "
            "them that get no noise. Use a model with GroupNorm, such as resnet18-gn, or --buffers frozen."
        )
    if idle := _idle(setup.net, setup.federation.train(0)[0][:1]):
        raise PrivacyError(
            f"the model cannot be trained under {private.key}: its output does not depend on '{idle[0]}', which would be moved "
            "by noise alone. Take that layer out of the model."
        )


def _idle(net: Net, x: Tensor) -> list[str]:
    """Return the parameters on which the network's output does not depend, whatever their values."""
    leaves = {k: v.requires_grad_() for k, v in net.fresh("idle").items() if k not in net.buffers}
    items = net.fresh("idle") | leaves
    with torch.enable_grad():
        found = torch.autograd.grad(net.logits(items, x).sum(), list(leaves.values()), allow_unused=True)
    return [k for k, slope in zip(leaves, found, strict=True) if slope is None]


def _unshaped(setup: Setup, shaping: ShapingDefense[Any]) -> str | None:
    """Return why a defense that changes gradients is of no use, or None: found by doing local work on two rows."""

    def sent(by: ShapingDefense[Any], x: Tensor) -> Items:
        return _sent(setup, x, lambda ctx: replace(ctx, shaping=by))

    return shaping.why_not(setup.net, setup.federation.train(0)[0][:2], sent)


def _noticed(setup: Setup, model: ModelDefense[Any]) -> bool:
    """Return whether a defense inside training changes anything that a client sends: found by doing local work on two rows."""
    x, stages = setup.federation.train(0)[0][:2], (lambda ctx: ctx, lambda ctx: inside(ctx, [model], "check"))
    plain, defended = (_sent(setup, x, stage) for stage in stages)
    return first_unlike(plain, defended) is not None


def _sent(setup: Setup, x: Tensor, defended: Callable[[LocalWork], LocalWork]) -> Items:
    """Return what the first client sends in the first round, if these inputs stand before the labels of its first two rows."""
    server, y = setup.server_first, setup.federation.train(0)[1][:2]
    state, down = setup.algorithm.init_client(setup.server_fresh, server), setup.algorithm.downlink(server, 0)
    ctx = LocalWork(setup.net, x, y, setup.config.lr, 1, len(y), 0, 0, 0, fixed_epochs=True)
    with torch.random.fork_rng(devices=[]):
        return setup.algorithm.local(for_method(defended(ctx)), state, down).up


def coverage(setup: Setup) -> dict[str, str]:
    """Return, for every item of the uplink, whether the guarantee covers it."""
    on = mechanism(setup) is not None
    items = {key.rstrip("?"): kind for key, kind in setup.algorithm.contract.up.items()}
    if user_mechanism(setup) is not None:
        return {item: "not used" if kind_of(kind) in PUBLIC else "covered" for item, kind in items.items()}
    words = {True: "public, by assumption", False: "covered" if on else "not covered: dp-sgd is off"}
    return {item: words[kind in PUBLIC and on] for item, kind in items.items()}


class Ledger:
    """The privacy accounts of all clients: noise, spending, budgets. All that changes is in `accounts` and `secret`.

    secret  from the operating system, once a run; kept in checkpoints alone. Two runs differ, a resumed one does not.
    """

    def __init__(self, setup: Setup, dp: StepDefense[Any], secret: int | None = None):
        self.setup, self.dp, self.release = setup, dp, release(setup)
        self.secret = secrets.randbits(62) if secret is None else secret
        self.sizes = setup.federation.sizes()
        self.accounts: dict[int, list[Spend]] = {c: [] for c in range(len(self.sizes))}
        self.epochs, self.releases = self._played()
        self.sigmas = self._sigmas()
        self._warn()

    def guard(self, client: int, *key: int | str, samples: int | None = None, batch_size: int | None = None) -> Guard:
        """Return the guard of one local work of a client. `key` says which, e.g. the round."""
        count = self.sizes[client] if samples is None else samples
        batch = self.setup.config.batch_size if batch_size is None else batch_size
        name = seed_of("dp", self.secret, client, *key)
        steps = self.dp.guard(count, batch, self.sigmas[client], name)
        return steps if self.release is None else self.release.over(steps, name)

    def spend(self, client: int, spent: Iterable[Spend]) -> None:
        """Put noisy steps and releases on a client's account."""
        account = self.accounts[client]
        for sigma, rate, steps in spent:
            where = next((i for i, kind in enumerate(account) if kind[:2] == (sigma, rate)), None)
            if where is None:
                account.append((sigma, rate, steps))
            else:
                account[where] = (sigma, rate, account[where][2] + steps)

    def epsilon(self, client: int) -> float:
        """Return what a client has spent."""
        return self.dp.epsilon(self.accounts[client], self.sizes[client])

    def exhausted(self, client: int) -> bool:
        """Return whether one more round would take a client beyond its budget."""
        steps = self._steps_per_epoch(client)
        return self.exceeds(client, [(self.sigmas[client], 1 / steps, self.epochs * steps), *self._released(1)])

    def exceeds(self, client: int, more: Iterable[Spend]) -> bool:
        """Return whether this would take a client beyond its budget."""
        budget = self.dp.budget
        if budget is None:
            return False
        return self.dp.bound([*self.accounts[client], *more], self.sizes[client]) > budget * (1 + 1e-9)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"secret": self.secret, "accounts": self.accounts}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's facts."""
        self.secret = int(facts["secret"])
        self.accounts = {int(c): [(s, q, int(n)) for s, q, n in rows] for c, rows in facts["accounts"].items()}

    def _steps_per_epoch(self, client: int) -> int:
        return max(1, -(-self.sizes[client] // self.setup.config.batch_size))

    def _played(self) -> tuple[int, int]:
        """Return how many epochs of noisy steps one local work makes, over all its phases, and how many releases: found by
        doing one on two rows. A method that leaves steps out in a client's first exchange makes at least the configured ones."""
        setup = self.setup
        x, y = (t[:2] for t in setup.federation.train(0))
        steps = self.dp.guard(len(y), len(y), 1.0, "count")
        guard = steps if self.release is None else self.release.over(steps, "count")
        fresh, server = setup.server_fresh, setup.server_first
        ctx = LocalWork(setup.net, x, y, setup.config.lr, setup.config.local_epochs, len(y), 0, 0, 0, guard=guard)
        with torch.random.fork_rng(devices=[]):
            setup.algorithm.local(
                for_method(ctx), setup.algorithm.init_client(fresh, server), setup.algorithm.downlink(server, 0)
            )
        made = sum(n for *_, n in steps.spent)
        return max(made, setup.config.local_epochs), sum(n for *_, n in guard.spent) - made

    def _released(self, rounds: int) -> list[Spend]:
        """Return what a client releases in so many rounds."""
        return [(self.release.sigma, 1.0, rounds * self.releases)] if self.release and self.releases else []

    def _sigmas(self) -> list[float]:
        """Return each client's noise multiplier for its planned rounds; clients of one size and plan share the search."""
        planned = self._planned_rounds()
        find = cache(
            lambda n, steps, rounds: self.dp.noise_multiplier(
                n, 1 / steps, rounds * self.epochs * steps, self._released(rounds)
            )
        )
        return [find(n, self._steps_per_epoch(c), planned[c]) for c, n in enumerate(self.sizes)]

    def _planned_rounds(self) -> list[int]:
        """Return in how many rounds each client will be asked: cohorts are known in advance."""
        config, counts = self.setup.config, [0] * len(self.sizes)
        weights = self.setup.algorithm.sampling_weights(self.sizes)
        for t in range(config.rounds):
            for client in cohorts.draw(config.seed, t, len(self.sizes), config.participation, weights):
                counts[client] += 1
        return counts

    def _warn(self) -> None:
        small = [c for c, n in enumerate(self.sizes) if n <= self.setup.config.batch_size]
        if small:
            warnings.warn(
                f"dp-sgd: {len(small)} clients have no more samples than a batch (sample rate 1), so that sampling does not "
                f"amplify their privacy (first: client {small[0]}). Use a smaller --batch-size.",
                PflsecWarning,
                stacklevel=2,
            )
        loose = [c for c, n in enumerate(self.sizes) if self.dp.delta(n) >= 1 / n]
        if loose:
            warnings.warn(
                f"dp-sgd: delta is {self.dp.delta(self.sizes[loose[0]]):g}, at least 1/n for {len(loose)} clients (first: client "
                f"{loose[0]} with {self.sizes[loose[0]]} samples); such a guarantee allows publishing a record. Lower delta.",
                PflsecWarning,
                stacklevel=2,
            )


class UserLedger:
    """The privacy account of a run that protects whole clients: one noisy sum a round. All that changes is in `account` and
    `secret`, from which cohorts and noise are drawn (see Ledger)."""

    def __init__(self, setup: Setup, dp: UserDefense[Any], secret: int | None = None):
        self.setup, self.dp = setup, dp
        self.secret = secrets.randbits(62) if secret is None else secret
        self.clients = setup.federation.clients
        self.rate = cohorts.rate(dp.sampling, self.clients, setup.config.participation)
        self.account: list[Spend] = []
        self.blank = sums.blank(setup)

    @property
    def exhausted(self) -> bool:
        """Whether one more round would take the run beyond its budget."""
        account = [*self.account, (self.dp.sigma, self.rate, 1)]
        return self.dp.budget is not None and self.dp.bound(account, self.clients) > self.dp.budget * (1 + 1e-9)

    def cohort(self, t: int) -> list[int] | None:
        """Return who takes part in a round, or None where cohorts are drawn as ever."""
        if self.dp.sampling == "fixed":
            return None
        return cohorts.by_chance(self.secret, t, self.clients, self.setup.config.participation)

    def noise(self, t: int) -> torch.Generator:
        """Return the stream of a round's noise."""
        return stream("dp", self.secret, "sum", t)

    def nobody(self, server: Items) -> tuple[Items, Items]:
        """Return (reference, upload) of a client that changes nothing: an empty round is noised like any other."""
        down = self.setup.algorithm.downlink(server, 0)
        up = sums.still(self.setup, self.blank, down)
        return reference(self.setup.algorithm.contract, up, down, {}), up

    def spend(self) -> None:
        """Put one round on the account."""
        steps = self.account[0][2] if self.account else 0
        self.account = [(self.dp.sigma, self.rate, steps + 1)]

    def epsilon(self) -> float:
        """Return what has been spent."""
        return self.dp.epsilon(self.account, self.clients)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"secret": self.secret, "account": self.account}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's facts."""
        self.secret = int(facts["secret"])
        self.account = [(sigma, rate, int(steps)) for sigma, rate, steps in facts["account"]]


def describe(setup: Setup) -> dict[str, Any]:
    """Return the privacy part of run.json. Raises PrivacyError when the method cannot be trained under the defense."""
    check(setup)
    dp, users = mechanism(setup), user_mechanism(setup)
    if users is not None:
        return _described(setup, users)
    if dp is None:
        return {"enabled": False, "coverage": {}}
    ledger = Ledger(setup, dp, secret=0)
    deltas = [dp.delta(n) for n in ledger.sizes]
    return {
        "enabled": True,
        "defense": dp.key,
        "unit": "record",
        "settings": dp.cfg.model_dump(),
        **_guaranteed(dp.claim(), coverage(setup), min(ledger.sigmas)),
        "adversary": "everybody who sees the messages",
        "noise_multiplier": {"least": min(ledger.sigmas), "most": max(ledger.sigmas)},
        "delta": {"least": min(deltas), "most": max(deltas)},
        "epochs_accounted_per_round": ledger.epochs,
        "release": _release(ledger),
        "test_seed": setup.config.dp_seed is not None,
    }


def _release(ledger: Ledger) -> dict[str, Any] | None:
    """Return what run.json says about class sums that leave a client."""
    if ledger.release is None:
        return None
    return {
        "defense": ledger.release.key,
        "settings": ledger.release.cfg.model_dump(),
        "noise_multiplier": ledger.release.sigma,
        "per_round": ledger.releases,
    }


def _described(setup: Setup, dp: UserDefense[Any]) -> dict[str, Any]:
    ledger = UserLedger(setup, dp, secret=0)
    delta = dp.delta(ledger.clients)
    return {
        "enabled": True,
        "defense": dp.key,
        "unit": "user",
        "settings": dp.cfg.model_dump(),
        **_guaranteed(dp.claim(ledger.rate), coverage(setup), dp.sigma),
        "adversary": "clients and everybody who sees what the server sends and not who took part; the server is trusted",
        "noise_multiplier": {"least": dp.sigma, "most": dp.sigma},
        "delta": {"least": delta, "most": delta},
        "sample_rate": ledger.rate,
        "test_seed": setup.config.dp_seed is not None,
    }


def _guaranteed(claim: str, covered: dict[str, str], least: float) -> dict[str, Any]:
    """Return what is guaranteed, and for which items; `least` is the smallest noise multiplier of the run."""
    if least > 0:
        return {"guarantee": claim, "coverage": covered}
    clipped = {item: "clipped, without noise" if word == "covered" else word for item, word in covered.items()}
    return {"guarantee": CLIPPED, "coverage": clipped}
