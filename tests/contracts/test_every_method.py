"""What holds for every registered method, whatever it does."""

import math
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from pflsec.core import registry
from pflsec.core.algorithm import Done
from pflsec.core.contract import KINDS, Direction
from pflsec.core.errors import PrivacyError, WireError
from pflsec.core.items import Items, cast, floating
from pflsec.core.local import LossPerExample
from pflsec.core.tensors import read_items, write_items
from pflsec.runtime.replay import capture, local_work, newcomer, relative_distance, residual
from pflsec.training.local import Training, Unrolled, for_method
from pflsec.wire.capture import Record
from tests import toys
from tests.contracts.cases import CLIENT, Case, Exchange, every_case, every_method, every_sending_case, exchange

SINGLE, DOUBLE = torch.float32, torch.float64
for_every_case = pytest.mark.parametrize("case", every_case(), ids=str)
for_every_sending_case = pytest.mark.parametrize("case", every_sending_case(), ids=str)
for_every_method = pytest.mark.parametrize("key", every_method())
in_both_directions = pytest.mark.parametrize("direction", ["down", "up"])


def message(ex: Exchange, direction: Direction) -> Items:
    """Return the client's message in this direction."""
    return ex.down if direction == "down" else ex.setup.algorithm.local(ex.context(), ex.state, ex.down).up


def uploads(ex: Exchange) -> dict[int, Items]:
    """Return what all clients would upload if they all were in the state of this one."""
    algorithm = ex.setup.algorithm
    return {
        c: algorithm.local(toys.context(ex.setup, ex.t, c), ex.state, algorithm.downlink(ex.server, c)).up
        for c in range(algorithm.clients)
    }


def opening(case: Case) -> int:
    """Return the first round of training: a method may begin with a round that trains nothing, or sends statistics and
    none of its weights."""
    ex = exchange(case, after=0)
    ctx, contract = ex.context(), ex.setup.algorithm.contract
    sent = ex.setup.algorithm.local(ctx, ex.state, ex.down).up
    weights = {name for name in contract.items("up") if contract.kind("up", name).startswith("weights")}
    return int(not ctx.losses or (bool(weights) and not weights & sent.keys()))


# --- pure functions of plain tensors


@for_every_case
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("driver", [Training, Unrolled])
def test_local_work_repeats_itself_bit_for_bit(case: Case, after: int, driver: Any):
    ex = exchange(case, after=after)
    first, second = (ex.setup.algorithm.local(ex.context(driver), ex.state, ex.down) for _ in range(2))
    assert toys.same(first.up, second.up)
    assert toys.same(first.state, second.state)


@for_every_case
@pytest.mark.parametrize("driver", [Training, Unrolled])
def test_local_work_leaves_its_inputs_alone(case: Case, driver: Any):
    ex = exchange(case)
    ctx = ex.context(driver)
    given = [ex.state, ex.down, {"x": ctx.x, "y": ctx.y}]
    before = [toys.snapshot(items) for items in given]
    ex.setup.algorithm.local(ctx, ex.state, ex.down)
    assert all(toys.same(now, was) for now, was in zip(given, before, strict=True))
    assert not any(v.requires_grad for items in given for v in items.values())


@for_every_case
def test_the_server_and_the_observer_leave_their_inputs_alone(case: Case):
    ex = exchange(case)
    algorithm, ups = ex.setup.algorithm, uploads(ex)
    given = [ex.server, ex.state, ex.down, ex.memory, *ups.values()]
    before = [toys.snapshot(items) for items in given]
    algorithm.aggregate(ex.server, ups)
    algorithm.downlink(ex.server, CLIENT)
    algorithm.serve(ex.server, CLIENT)
    algorithm.deploy(ex.state, ex.down)
    algorithm.deploy_trained(ex.state, ex.down, ups[CLIENT])
    algorithm.scores(algorithm.deploy(ex.state, ex.down), ex.context().x)
    algorithm.global_model(ex.server)
    algorithm.reconstruct_state(algorithm.observe(ex.memory, ex.down, ups[CLIENT]))
    algorithm.start(ex.state, ex.down)
    algorithm.change(ex.state, ex.down, ups[CLIENT], 0.1, 2)
    assert all(toys.same(now, was) for now, was in zip(given, before, strict=True))


@for_every_case
def test_a_method_keeps_nothing_between_calls(case: Case):
    ex = exchange(case)
    algorithm = ex.setup.algorithm
    before = dict(vars(algorithm))
    algorithm.aggregate(ex.server, uploads(ex))
    assert vars(algorithm).keys() == before.keys()
    assert all(vars(algorithm)[name] is value for name, value in before.items())
    # What noised gradients cover may depend on settings.
    assert set(before) - {"dp_support"} == {"cfg", "net", "clients", "contract"}


@for_every_case
def test_items_are_plain_tensors_and_survive_a_file(case: Case, tmp_path: Any):
    ex = exchange(case)
    done = ex.setup.algorithm.local(ex.context(), ex.state, ex.down)
    for name, items in {"server": ex.server, "down": ex.down, "state": done.state, "up": done.up}.items():
        assert all(type(v) is Tensor and not v.requires_grad for v in items.values())
        write_items(tmp_path / name, items)
        assert toys.same(read_items(tmp_path / name, name), items)


@for_every_case
def test_a_state_has_the_names_and_shapes_of_a_newcomers(case: Case):
    """An attacker who does not know the state starts from a newcomer's, so the two must be of one form."""
    ex = exchange(case)
    fresh = newcomer(ex.setup.algorithm, ex.setup.net, torch.Generator().manual_seed(0))
    assert {k: v.shape for k, v in fresh.items()} == {k: v.shape for k, v in ex.state.items()}
    assert {k: v.is_floating_point() for k, v in fresh.items()} == {
        k: v.is_floating_point() for k, v in ex.state.items()
    }


# --- the wire contract


@for_every_case
@pytest.mark.parametrize("after", [0, 2])
@in_both_directions
def test_messages_keep_the_contract(case: Case, after: int, direction: Direction):
    ex = exchange(case, after=after)
    ex.setup.algorithm.contract.check(direction, message(ex, direction), "here")


@for_every_method
@in_both_directions
def test_every_declaration_is_of_a_known_kind(key: str, direction: Direction):
    contract = exchange(Case(key)).setup.algorithm.contract
    assert {contract.kind(direction, name) for name in contract.items(direction)} <= set(KINDS)


@for_every_method
@in_both_directions
def test_an_undeclared_item_is_refused_by_name(key: str, direction: Direction):
    ex = exchange(Case(key))
    with pytest.raises(WireError, match=r"round 2, client 3: .*'secret' \[2\]"):
        ex.setup.algorithm.contract.check(
            direction, message(ex, direction) | {"secret": torch.ones(2)}, "round 2, client 3"
        )


@for_every_method
@in_both_directions
def test_a_missing_item_is_refused_by_name(key: str, direction: Direction):
    ex = exchange(Case(key))
    contract, full = ex.setup.algorithm.contract, message(ex, direction)
    declared = contract.down if direction == "down" else contract.up
    optional = {name for key in declared if key.endswith("?") for name in contract.names(key)}
    for name in full.keys() - optional:
        with pytest.raises(WireError, match=rf"without {re.escape(name)}"):
            contract.check(direction, {k: v for k, v in full.items() if k != name}, "here")


@for_every_method
@in_both_directions
def test_an_item_of_another_shape_is_refused_by_name(key: str, direction: Direction):
    ex = exchange(Case(key))
    full = message(ex, direction)
    for name, value in full.items():
        with pytest.raises(WireError, match=rf"'{re.escape(name)}'"):
            ex.setup.algorithm.contract.check(direction, full | {name: value[None]}, "here")


@for_every_method
def test_the_wire_line_of_the_docstring_names_what_is_sent(key: str):
    """Outside brackets stand the items of the default configuration, inside them what other settings add."""
    wire, private = (registry.card("algorithms", key).sections[label] for label in ("Wire", "Private"))
    algorithm = exchange(Case(key)).setup.algorithm
    for half, direction in zip(wire.split("|"), ("down", "up"), strict=True):
        declared = algorithm.down if direction == "down" else algorithm.up
        sent = message(exchange(Case(key)), direction)
        always = {pattern.rstrip("?") for pattern in declared if set(algorithm.contract.names(pattern)) <= sent.keys()}
        outside = re.sub(r"\(.*?\)", "", half).replace(f"{direction} ", "")
        assert {word.strip() for word in outside.split(",")} - {"nothing"} == always
        assert all(pattern.rstrip("?") in half for pattern in declared)
    assert {part for part in ("body", "head") if f"{part}.*" in private} == set(algorithm.private)


# --- two interpreters, one method


@for_every_case
def test_both_interpreters_send_and_keep_the_same(case: Case):
    ex = exchange(case)
    fast, unrolled = (
        ex.setup.algorithm.local(ex.context(driver, epochs=3), ex.state, ex.down) for driver in (Training, Unrolled)
    )
    assert toys.distance(fast.up, unrolled.up) < 1e-12
    assert toys.distance(fast.state, unrolled.state) < 1e-12


def _slope_error(fn: Any, at: Tensor) -> float:
    """Return the relative error of autograd's derivative of <weights, fn(at)> in a random direction.

    Held against (s(at + h v) - s(at - h v)) / 2h, whose own error is of the order h^2 + 1e-16/h, about 1e-10: so much is
    no error of autograd's, however flat the slope.
    """
    rng, h = torch.Generator().manual_seed(1), 1e-5
    direction = torch.randn(at.shape, generator=rng, dtype=at.dtype)
    weights = {k: torch.randn(v.shape, generator=rng, dtype=v.dtype) for k, v in floating(fn(at)).items()}

    def total(point: Tensor) -> Tensor:
        seen = fn(point)
        return torch.stack([(weights[k] * seen[k]).sum() for k in weights]).sum()

    point = at.clone().requires_grad_()
    slope = float((torch.autograd.grad(total(point), point)[0] * direction).sum())
    measured = float((total(at + h * direction) - total(at - h * direction)).detach()) / (2 * h)
    assert abs(measured) > 1e-6
    return max(abs(slope - measured) - 1e-10, 0.0) / abs(measured)


@for_every_sending_case
def test_an_unrolled_upload_is_differentiable_in_the_data(case: Case):
    ex = exchange(case)
    algorithm = ex.setup.algorithm

    def sent(x: Tensor) -> Items:
        up = algorithm.local(ex.context(Unrolled, x=x), ex.state, ex.down).up
        return algorithm.change(ex.state, ex.down, up, ex.context().lr, ex.context().steps())

    assert _slope_error(sent, ex.context().x) < 1e-6


@for_every_sending_case
def test_an_unrolled_upload_is_differentiable_in_the_state(case: Case):
    """For methods that keep private items: an attacker may seek them together with the data."""
    ex = exchange(case)
    algorithm, ctx = ex.setup.algorithm, ex.context()
    for name, value in floating(ex.state).items():

        def sent(item: Tensor, name: str = name) -> Items:
            state = ex.state | {name: item}
            up = algorithm.local(ex.context(Unrolled), state, ex.down).up
            return algorithm.change(state, ex.down, up, ctx.lr, ctx.steps())

        if max(float(d.abs().max()) for d in _differences(sent(value), sent(value + 1e-3))) > 1e-9:
            assert _slope_error(sent, value) < 1e-6


def _differences(a: Items, b: Items) -> list[Tensor]:
    return [(a[k] - b[k]).detach() for k in a]


@for_every_sending_case
def test_labels_may_be_probabilities(case: Case):
    """One-hot probabilities are the same labels in another form, and an attacker's guess is differentiable in them."""
    ex = exchange(case)
    algorithm = ex.setup.algorithm
    y = torch.nn.functional.one_hot(ex.context().y, toys.CLASSES).to(DOUBLE).requires_grad_()
    soft = algorithm.local(ex.context(Unrolled, y=y), ex.state, ex.down).up
    assert toys.distance(soft, algorithm.local(ex.context(), ex.state, ex.down).up) < 1e-12
    total = torch.stack([v.sum() for v in floating(soft).values() if v.requires_grad]).sum()
    assert torch.autograd.grad(total, y)[0].abs().max() > 0


# --- captures can be replayed


@for_every_case
@pytest.mark.parametrize("batch", [(1, 1), (4, 3)], ids=["one image, one step", "four images, three steps"])
@pytest.mark.parametrize(("dtype", "bound"), [(SINGLE, 1e-6), (DOUBLE, 1e-12)])
@pytest.mark.parametrize("after", [0, 2])
def test_the_replay_of_the_truth_gives_the_upload(
    case: Case, batch: tuple[int, int], dtype: torch.dtype, bound: float, after: int
):
    ex = exchange(case, dtype, after)
    record, x, y, up = probe(ex, *batch)
    setup = ex.setup
    assert residual(setup.algorithm, setup.net, record, x, y, ex.state, up, setup.config.seed) < bound


@for_every_sending_case
@pytest.mark.parametrize("history", [True, False])
def test_the_target_of_a_capture_is_what_its_replay_gives_at_the_truth(case: Case, history: bool):
    """The residual above compares uploads; attacks compare `change`, which divides small differences by lr. It holds
    whether or not the adversary knows the client's private items."""
    ex = exchange(case)
    record, x, y, up = probe(ex, 4, 3)
    whole = _with(record, up=up, memory=ex.memory)
    cap = capture(ex.setup.algorithm, ex.setup.net, whole, history=history, seed=ex.setup.config.seed)
    assert relative_distance(cap.replay(x, y, ex.state), cap.target) < 1e-10
    assert relative_distance(cap.replay(x.flip(0) + 1, y, ex.state), cap.target) > 1e-3


def probe(ex: Exchange, size: int, steps: int) -> tuple[Record, Tensor, Tensor, Items]:
    """Return a record without uplink, the victim batch, and the uplink."""
    x, y = ex.context().x[:size], ex.context().y[:size]
    record = Record(
        id="probe",
        algorithm=ex.setup.config.algo,
        round=ex.t,
        client=CLIENT,
        victim=0,
        kind="probe",
        down=ex.down,
        up={},
        memory={},
        input=ex.setup.federation.input,
        batch=size,
        epochs=steps,
        batch_size=size,
        lr=0.1,
        personal_equals_public=False,
    )
    ctx = local_work(ex.setup.net, record, x, y, ex.setup.config.seed, driver=Training)
    return record, x, y, ex.setup.algorithm.local(ctx, cast(ex.state, x.dtype), ex.down).up


def _with(record: Record, **changes: Any) -> Record:
    return Record(**(vars(record) | changes))


@pytest.mark.parametrize("after", [0, 1, 2])
@for_every_case
def test_what_the_log_reveals_is_the_clients_state(case: Case, after: int):
    """Before the first exchange too: what a client has drawn for itself, no log shows."""
    ex = exchange(case, after=after)
    found = ex.setup.algorithm.reconstruct_state(ex.memory)
    assert found is None or toys.distance(found, {k: ex.state[k] for k in found}) < 1e-15


# --- a round


@for_every_method
def test_absent_clients_keep_their_state_bit_for_bit(key: str):
    for turn in toys.play(key, participation=0.5, seed=2):
        assert len(turn.ups) == 2
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in turn.states if c not in turn.ups)


@for_every_method
def test_a_lost_upload_changes_nothing_of_its_client(key: str):
    for turn in toys.play(key, drop_rate=0.5):
        lost = turn.metrics["lost"]
        assert len(lost) == 2
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in lost)
        assert not set(lost) & turn.ups.keys()


@for_every_case
def test_the_aggregate_does_not_depend_on_the_order_of_clients(case: Case):
    ex = exchange(case)
    aggregate, ups = ex.setup.algorithm.aggregate, uploads(ex)
    forward = aggregate(ex.server, ups)
    backward = aggregate(ex.server, dict(reversed(ups.items())))
    assert toys.same(aggregate(ex.server, dict(ups)), forward)
    assert toys.distance(backward, forward) < 1e-14


@for_every_case
def test_every_trained_part_moves(case: Case):
    """Also with a learning rate that is small: nothing of the network that is trained may stand still. Trained is what a
    method declares as shared or private, and all where it declares neither: some fix a head, or have another one."""
    ex = exchange(case, after=opening(case))
    algorithm = ex.setup.algorithm
    trained = {*algorithm.shared, *algorithm.private} or {"body", "head"}
    done = algorithm.local(ex.context(lr=1e-6), ex.state, ex.down)
    before = algorithm.deploy(ex.state, ex.down)
    after = algorithm.deploy_trained(done.state, ex.down, done.up)
    for name in (n for n in ex.setup.net.shapes if n.partition(".")[0] in trained):
        assert 0 < float((after[name] - before[name]).abs().max()) < 1e-3


@for_every_case
def test_training_loss_falls_on_classes_that_are_easy_to_tell_apart(case: Case):
    losses = [turn.metrics["train_loss"] for turn in toys.play(case.key, 5, settings=dict(case.settings), lr=0.05)]
    assert losses[-1] < losses[opening(case)]
    assert not math.isnan(losses[-1])


# --- private training


class Blind:
    """A guard whose gradients know nothing of the data: noise alone. The loss is computed, and may look at the rows."""

    def __init__(self, rows: int):
        self.count, self.spent = rows, ()
        self.noise = torch.Generator().manual_seed(0)

    def rows(self, epochs: int) -> Iterator[Tensor]:
        for _ in range(epochs):
            yield from torch.arange(self.count).tensor_split(2)

    def gradient(self, on: LossPerExample, params: Items, x: Tensor, y: Tensor) -> list[Tensor]:
        on(params, x, y)
        return [torch.randn(p.shape, generator=self.noise, dtype=p.dtype) for p in params.values()]

    def class_sums(self, rows: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.randn(target.shape[1], rows.shape[1], generator=self.noise, dtype=rows.dtype)
        return sums, torch.tensor([2.0, 0.0, 1.0], dtype=rows.dtype)


def blind(case: Case, after: int, seed: int) -> Done:
    """Return the client's exchange on rows and labels drawn with this seed, by gradients that do not know them."""
    ex = exchange(case, after=after)
    x, rng = ex.context().x, torch.Generator().manual_seed(seed)
    other = torch.randn(x.shape, generator=rng, dtype=x.dtype)
    work = ex.context(x=other, y=torch.full((len(x),), seed), guard=Blind(len(x)))
    return ex.setup.algorithm.local(for_method(work), ex.state, ex.down)


def covered(case: Case) -> bool:
    """Return whether private training covers all that is sent: by its gradients, and its class sums if there are any."""
    return not toys.method(case.key, **dict(case.settings)).dp_support.startswith("none")


@pytest.mark.parametrize("case", [c for c in every_sending_case() if covered(c)], ids=str)
@pytest.mark.parametrize("after", [0, 2])
def test_where_private_training_covers_all_nothing_goes_round_the_gradients(case: Case, after: int):
    """By gradients and class sums of noise alone, what is sent and what is kept are the same bits whatever the data; or it is
    refused."""
    try:
        one, other = (blind(case, after, seed) for seed in (0, 1))
    except PrivacyError:
        return
    assert toys.same(one.up, other.up)
    assert toys.same(one.state, other.state)


def test_what_a_loss_puts_aside_goes_round_the_gradients():
    """The test above sees it: FD's predictions are put aside by its loss, which is why it is not covered."""
    assert not toys.same(*(blind(Case("fd"), 0, seed).up for seed in (0, 1)))


# --- settings


@for_every_method
def test_every_setting_says_what_it_is(key: str):
    model = registry.load("algorithms", key).Config
    assert all(field.description for field in model.model_fields.values())


@for_every_method
def test_the_card_read_from_source_agrees_with_the_class(key: str):
    card, kind = registry.card("algorithms", key), registry.load("algorithms", key)
    fields = kind.Config.model_fields
    assert card.key == kind.key == key
    assert {s.name: s.default for s in card.settings} == {n: str(f.default) for n, f in fields.items()}
    assert {s.name: s.about for s in card.settings} == {n: f.description for n, f in fields.items()}
    names: tuple[Literal["down", "up", "presets", "shared", "private"], ...] = (
        "down",
        "up",
        "presets",
        "shared",
        "private",
    )
    assert {n: card.attributes[n] for n in names if n in card.attributes} == {
        n: getattr(kind, n) for n in names if n in card.attributes
    }
    assert {"down", "up", "dp_support"} <= card.attributes.keys()


@for_every_method
def test_a_method_says_what_private_training_covers(key: str):
    """ "full", or what stays uncovered, or why it is refused: in its own source, where the command line reads it."""
    said = registry.card("algorithms", key).attributes["dp_support"]
    assert said == registry.load("algorithms", key).dp_support
    assert re.fullmatch(r"full|(partial|none): \S.*[^.]", said)


@for_every_method
@pytest.mark.filterwarnings("ignore::pflsec.core.errors.PflsecWarning")
def test_every_preset_is_accepted(key: str):
    for preset in registry.load("algorithms", key).presets.values():
        own = {k: v for k, v in preset.items() if k in registry.load("algorithms", key).Config.model_fields}
        common = {k: v for k, v in preset.items() if k not in own}
        assert toys.setup(key, settings=own, **common).config.algo == key
