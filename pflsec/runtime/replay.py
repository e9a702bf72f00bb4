"""Replays: the client's own code on a guessed batch, differentiable, for attacks and for checking captures."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pflsec.core import change as changes
from pflsec.core.algorithm import Algorithm
from pflsec.core.contract import kind_of
from pflsec.core.defense import Defense, ModelDefense, ReleaseDefense, ShapingDefense, StepDefense, of_kind
from pflsec.core.errors import ConfigError, Inconclusive, NotApplicable
from pflsec.core.items import Items, arithmetic, cast, detached, floating, norm, select, subtract
from pflsec.models.network import Network
from pflsec.runtime.defending import mixing
from pflsec.training.local import Driver, LocalWork, Unrolled
from pflsec.wire.capture import MOST_STEPS, Capture, Record

ROUNDED_AWAY = 1.0
"""An upload whose rounding is expected to be as large as all that it says about the data says nothing about them."""
SETTLED = 1e-9
"""Distance, relative to all that is said, up to which it does not matter that the client draws otherwise."""
SEVERED_REST = 1e-6
"""Relative size up to which a body counts as standing still: float64 differences of weights leave far less."""


def local_work(
    net: Network, record: Record, x: Tensor, y: Tensor, seed: int, driver: Callable[[], Driver] = Unrolled
) -> LocalWork:
    """Return the context in which a captured exchange is done again with batch (x, y)."""
    return LocalWork(
        net=net,
        x=x,
        y=y,
        lr=record.lr,
        epochs=record.epochs,
        batch_size=record.batch_size,
        seed=seed,
        round=record.round,
        client=record.client,
        driver=driver(),
        fixed_epochs=True,
    )


class Severed(Network):
    """A network whose features have their values and pass no gradient on to the body."""

    def __init__(self, net: Network):
        self.__dict__ |= vars(net)

    def features(self, items: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return super().features(items, x).detach().requires_grad_()

    def logits(self, items: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.head(items, self.features(items, x))


class Replay:
    """The method's own `local` on dummy data, as a differentiable function of data, labels and private items.

    reference  the private items from which `Algorithm.change` is read, here and in the target: what the adversary knows
               of them, not what it guesses, or else a wrong guess would move both sides
    Of what a guess sends, those items count that the adversary sees of the upload.
    defenses   those that the attacker knows of, in their order: what a guess would have sent passes them as well
    said       what the upload says about the data (Algorithm.change), as far as the adversary sees it
    """

    def __init__(
        self,
        algorithm: Algorithm[Any],
        net: Network,
        record: Record,
        seed: int,
        reference: Items,
        defenses: Sequence[Defense[Any]] = (),
        said: Items | None = None,
    ):
        self.algorithm, self.net, self.record, self.seed, self.reference = algorithm, net, record, seed, reference
        private, release = of_kind(defenses, StepDefense), of_kind(defenses, ReleaseDefense)
        self.longest, self.row_bound = private and private.longest, release and release.bound
        model = of_kind(defenses, ModelDefense)
        single = record.batch == record.steps == record.facts.get("summed", 1) == 1
        self.model_defense = model and model.known(net, said or {}, single)
        here = [
            self.model_defense if d is model else d.at(net) if isinstance(d, ShapingDefense) else d for d in defenses
        ]
        self.adapting = [d for d in here if d is not None and type(d).adapt is not Defense.adapt]
        self._cast: dict[torch.dtype, tuple[Items, Items]] = {}
        self._features_alone: bool | None = None

    def __call__(self, x: Tensor, y: Tensor, state: Items) -> Items:
        """Return Algorithm.change of the exchange that this batch would have caused, defended as far as is known."""
        reference, down = self._constants(arithmetic(x))
        ctx = self._work(x, y)
        done = self.algorithm.local(ctx, cast(state, arithmetic(x)), down)
        up = {k: v for k, v in done.up.items() if k in self.record.up}
        if self.adapting:
            origin = changes.origin(self.algorithm, reference, down, up)
            guess = {k: v for k, v in changes.change(up, origin).items() if k in self._seen}
            up = changes.moved(up, origin, self._adapted(guess))
        return self.algorithm.change(reference, down, up, self.record.lr, self.record.steps)

    def _work(self, x: Tensor, y: Tensor) -> LocalWork:
        """Return the context of the client's work on a guess, with what is known of the defenses inside it."""
        ctx = local_work(self.net, self.record, x, y, self.seed)
        return replace(ctx, longest=self.longest, row_bound=self.row_bound, model_defense=self.model_defense)

    @cached_property
    def _seen(self) -> Items:
        """The change that was sent, float64."""
        reference, down = self._constants(torch.float64)
        up = cast(self.record.up, torch.float64)
        return changes.change(up, changes.origin(self.algorithm, reference, down, up))

    def _adapted(self, guess: Items) -> Items:
        """Return what the known defenses make of the change of a guess."""
        seen = {k: self._seen[k].to(v.dtype) for k, v in guess.items()}
        for defense in self.adapting:
            guess = defense.adapt(guess, seen)
        return guess

    def drawing(self, seed: int) -> "Replay":
        """Return the same replay with other draws of the client's."""
        return Replay(self.algorithm, self.net, self.record, seed, self.reference)

    def begin(self, state: Items) -> Items:
        """Return the items of the network with which the local work that is sent begins, as far as it trains one."""
        _, down = self._constants(torch.float64)
        return select(state, "body", "head") | select(self.algorithm.start(state, down), "body", "head")

    def pullback(self, x: Tensor, u: Tensor) -> Items:
        """Return the gradient of sum_i <u_i, body(x_i)> in the body at the start (see Capture.pullback)."""
        body = select(self.algorithm.start(*self._constants(arithmetic(x))), "body")
        if body.keys() != {name for name in self.net.shapes if name.startswith("body.")}:
            return {}
        if self._features_alone is None:
            self._features_alone = self._moved_by_features_alone()
        if not self._features_alone:
            raise NotApplicable("the body is moved by more than what reaches it through its features")
        work = self._work(x, len(u) * u)  # a step's gradient is that of the mean
        slopes = work.full_gradient(body, lambda items, x, u: (u * self.net.features(items, x)).sum(1))
        if not self.adapting or not slopes.keys() <= self._seen.keys():
            return slopes
        size = -self.record.lr * self.record.steps
        return {k: v / size for k, v in self._adapted({k: size * v for k, v in slopes.items()}).items()}

    def _moved_by_features_alone(self) -> bool:
        """Return whether the body stands still where its features pass no gradient on: judged on a batch of noise."""
        rng = torch.Generator().manual_seed(self.seed % 2**63)
        x = self.record.input.noise(self.record.batch, rng, torch.float64)
        y = torch.full((self.record.batch, self.record.input.classes), 1 / self.record.input.classes, dtype=x.dtype)
        state, severed = newcomer(self.algorithm, self.net, rng), Severed(self.net)
        twin = type(self.algorithm)(self.algorithm.cfg, severed, self.algorithm.clients)
        usual, left = (
            sum(float(v.square().sum()) for v in select(detached(moved), "body").values()) ** 0.5
            for moved in (self._plain(self.algorithm, self.net, x, y, state), self._plain(twin, severed, x, y, state))
        )
        return left <= SEVERED_REST * usual

    def _plain(self, algorithm: Algorithm[Any], net: Network, x: Tensor, y: Tensor, state: Items) -> Items:
        """Return Algorithm.change of the exchange that this batch would have caused, undefended."""
        reference, down = self._constants(arithmetic(x))
        ctx = local_work(net, self.record, x, y, self.seed)
        done = algorithm.local(ctx, cast(state, arithmetic(x)), down)
        sent = {k: v for k, v in done.up.items() if k in self.record.up}
        return algorithm.change(reference, down, sent, self.record.lr, self.record.steps)

    def _constants(self, dtype: torch.dtype) -> tuple[Items, Items]:
        if dtype not in self._cast:
            self._cast[dtype] = cast(self.reference, dtype), cast(self.record.down, dtype)
        return self._cast[dtype]


def capture(
    algorithm: Algorithm[Any],
    net: Network,
    record: Record,
    *,
    history: bool,
    seed: int,
    labels: Tensor | None = None,
    state: Items | None = None,
    candidates: tuple[Tensor, Tensor] | None = None,
    counts: Tensor | None = None,
    visible: Sequence[str] = (),
    defenses: Sequence[Defense[Any]] = (),
) -> Capture:
    """Return what an attack is given: the record, what the threat model grants, and the replay.

    history  the adversary has the client's earlier messages
    labels, state, counts, candidates  the truth, where granted
    visible  patterns of the upload's items that it sees, here and, so that it knows of no earlier upload in full, ever
    defenses  those of the run, for an adversary who knows of them; none for a naive one
    """
    known = _known_state(algorithm, net, record, history and not visible)
    reference = _example(algorithm, net) | (known or {})
    state_seen, down, up = (cast(items, torch.float64) for items in (reference, record.down, record.up))
    target = detached(algorithm.change(state_seen, down, up, record.lr, record.steps))
    seen = visible_items(record, visible) if visible else set(record.up)
    left = _follows_from(seen, algorithm, record, state_seen, down, up) if visible else set(target)
    said = {name: value for name, value in target.items() if name in left}
    replay = Replay(algorithm, net, record, seed, reference, defenses, said)
    whole = Capture(
        record=record,
        target=target,
        known=known,
        labels=labels,
        state=state,
        net=net,
        kinds={name: kind_of(text) for name, text in algorithm.contract.items("up").items()},
        last_layer=net.last_layer,
        begin_fn=replay.begin,
        replay_fn=replay,
        newcomer_fn=lambda rng: newcomer(algorithm, net, rng),
        pullback_fn=replay.pullback,
        counts=counts,
        candidates=candidates,
        soft_labels=mixing(defenses) is not None,
    )
    if chance := _by_chance(replay, whole):
        whole = replace(whole.comparing(whole.target.keys() - chance), by_chance=tuple(sorted(chance)))
    return _limited(whole, seen, left) if visible else whole


def _by_chance(replay: Replay, cap: Capture) -> set[str]:
    """Return the names of what an upload says that follow the client's own draws as well as its data: none where nothing else
    speaks of the data, or else there would be nothing to match. Judged on batches of noise, where one step takes the whole
    batch: the order of minibatches moves everything."""
    record = cap.record
    if record.batch > record.batch_size or record.steps > MOST_STEPS:
        return set()
    rng = torch.Generator().manual_seed(0)
    x, other = (record.input.noise(record.batch, rng, torch.float64) for _ in range(2))
    y, state = torch.arange(record.batch) % record.input.classes, cap.newcomer(rng)
    said, redrawn, elsewhere = (
        detached(replay.drawing(seed)(batch, y, state)) for seed, batch in ((0, x), (1, x), (0, other))
    )
    moved = _unlike(said, redrawn)
    return moved if _unlike(said, elsewhere) - moved else set()


def _unlike(one: Items, other: Items) -> set[str]:
    """Return the names of items that differ, measured by the size of all: what is zero but for rounding differs in nothing."""
    size = float(norm(one)) if one else 0.0
    return {name for name in one if float((other[name] - one[name]).norm()) > SETTLED * size}


def visible_items(record: Record, patterns: Sequence[str]) -> set[str]:
    """Return the names of the upload's items that match a pattern. Raises ConfigError for one that matches none."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in record.up):
            raise ConfigError(
                f"visible: '{pattern}' matches no item of the upload in capture '{record.id}'. Its items: {', '.join(record.up)}."
            )
    return {name for name in record.up if any(fnmatchcase(name, pattern) for pattern in patterns)}


def _limited(cap: Capture, seen: set[str], left: set[str]) -> Capture:
    """Return a capture of which only these items of the upload are left, and these of what it says about the data."""
    record = cap.record
    memory = record.memory if record.personal_equals_public else {}
    return replace(
        cap.comparing(left),
        record=replace(record, up={k: v for k, v in record.up.items() if k in seen}, memory=memory),
        kinds={k: v for k, v in cap.kinds.items() if k in seen},
    )


def _follows_from(
    seen: set[str], algorithm: Algorithm[Any], record: Record, state: Items, down: Items, up: Items
) -> set[str]:
    """Return the names of what an upload says about the data (Algorithm.change) to which no hidden item contributes."""
    leaves = {k: v.detach().clone().requires_grad_() if v.is_floating_point() else v for k, v in up.items()}
    says = algorithm.change(state, down, leaves, record.lr, record.steps)
    hidden = [v for k, v in leaves.items() if k not in seen and v.requires_grad]

    def independent(value: Tensor) -> bool:
        if not hidden or not value.requires_grad:
            return True
        found = torch.autograd.grad(value.sum(), hidden, retain_graph=True, allow_unused=True)
        return all(slope is None for slope in found)

    return {name for name, value in says.items() if independent(value)}


def rounding(algorithm: Algorithm[Any], net: Network, record: Record, *, history: bool) -> float:
    """Return how large float32 rounding is in what an upload says about the data, relative to all that it says.

    Each number of the upload is moved by the standard deviation of its rounding (the spacing of float32 there, over the root
    of 12), once for each local step. At a small learning rate, or where the gradient has vanished, that is most of a difference
    of weights. Infinite where the upload equals what it began with; 0 where nothing in it depends on the data.
    """
    state = _example(algorithm, net) | (_known_state(algorithm, net, record, history) or {})
    was, down, up = (cast(items, torch.float64) for items in (state, record.down, record.up))
    start, rng = algorithm.start(was, down), torch.Generator().manual_seed(0)
    moved = dict(up)
    for name, value in floating(up).items():
        weight = start.get(name.removeprefix("delta."), value) if name.startswith("delta.") else value
        size = weight.float().abs()
        spacing = (torch.nextafter(size, torch.full_like(size, torch.inf)) - size).double()
        sign = 2.0 * torch.randint(2, value.shape, generator=rng) - 1
        moved[name] = value + sign * spacing.reshape(value.shape) * (record.steps / 12) ** 0.5
    said, other = (algorithm.change(was, down, sent, record.lr, record.steps) for sent in (up, moved))
    if not said:
        return 0.0
    size, noise = float(norm(said)), float(norm(subtract(other, said)))
    return noise / size if size else float("inf")


def conclusive(rounded: float, lr: float) -> None:
    """Raise Inconclusive where rounding leaves nothing of what an upload says (`rounded`: see `rounding`)."""
    if rounded == float("inf"):
        raise Inconclusive("the upload equals what the local work began with: the gradient has vanished")
    if not rounded < ROUNDED_AWAY:
        raise Inconclusive(
            f"the gradient has vanished below what float32 weights resolve at learning rate {lr:g}: rounding is {rounded:.1g} "
            "times all that the upload says about the data"
        )


def newcomer(algorithm: Algorithm[Any], net: Network, rng: torch.Generator) -> Items:
    """Return the private items of a client that draws its own network and has never taken part."""
    key = int(torch.randint(2**62, (1,), generator=rng))
    server = algorithm.init_server(net.fresh("newcomer", key, "server"))
    return algorithm.init_client(net.fresh("newcomer", key), server)


def residual(
    algorithm: Algorithm[Any], net: Network, record: Record, x: Tensor, y: Tensor, state: Items, up: Items, seed: int
) -> float:
    """Return how far the replay of the truth is from the upload, relative: |change(replay) - change(up)| / |change(up)|.

    Compared is what the upload says about the data, not the weights themselves, which would hide a wrong gradient at a small
    learning rate. This is the consistency check of a capture: where it is not tiny, no attack on it means anything.
    """
    ctx = local_work(net, record, x, y, seed)
    again = algorithm.local(ctx, cast(state, arithmetic(x)), cast(record.down, arithmetic(x))).up
    if {k: v.shape for k, v in again.items()} != {k: v.shape for k, v in up.items()}:
        return float("inf")
    was, down = (cast(items, torch.float64) for items in (state, record.down))
    seen, found = (
        algorithm.change(was, down, cast(sent, torch.float64), record.lr, record.steps) for sent in (up, again)
    )
    return relative_distance(found, seen)


def relative_distance(guess: Mapping[str, Tensor], seen: Mapping[str, Tensor]) -> float:
    """Return |guess - seen| / |seen| in float64; infinity when names or shapes differ."""
    if {k: v.shape for k, v in guess.items()} != {k: v.shape for k, v in seen.items()}:
        return float("inf")
    off = sum(float((guess[k].detach().double() - v.double()).square().sum()) for k, v in seen.items())
    size = sum(float(v.double().square().sum()) for v in seen.values())
    return (off / size) ** 0.5 if size else float(off > 0)


def _known_state(algorithm: Algorithm[Any], net: Network, record: Record, history: bool) -> Items | None:
    """Return the client's private items as far as the adversary can tell: all or some; {} if there are none, None if
    all are hidden."""
    if history and record.memory and (found := algorithm.reconstruct_state(record.memory)) is not None:
        return found
    if record.personal_equals_public:
        return record.memory
    return None if floating(_example(algorithm, net)) else {}


def _example(algorithm: Algorithm[Any], net: Network) -> Items:
    """Return some newcomer's private items, always the same ones."""
    return newcomer(algorithm, net, torch.Generator().manual_seed(0))
