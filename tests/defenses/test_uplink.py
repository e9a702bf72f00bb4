"""Defenses on what a client sends: each does to the change what its card says, and at its neutral value nothing."""

from collections.abc import Sequence

import pytest
import torch

from pflsec.core.change import change, reference
from pflsec.core.contract import Contract
from pflsec.core.defense import Defense
from pflsec.core.items import Items, norm
from pflsec.core.streams import stream
from pflsec.runtime.defending import parse_defense
from pflsec.wire.channel import Channel, Ledger
from tests import toys

NEUTRAL = ("clip:bound=1e9", "gaussian:std=0", "laplace:scale=0", "prune:keep=1", "qsgd:bits=32")
"""Defenses at the value of their knob that changes nothing. sign and fp16 have no knob."""
EVERY = ("clip:bound=0.1", "gaussian:std=0.1", "laplace:scale=0.1", "prune:keep=0.3", "qsgd:bits=3", "sign", "fp16")


def large(seed: int = 0) -> tuple[Items, Items]:
    """Return a message and what it counts from: two items of 30000 and 2 numbers."""
    rng = torch.Generator().manual_seed(seed)
    start = {"w": torch.randn(300, 100, generator=rng), "b": torch.randn(2, generator=rng)}
    return {k: v + 0.1 * torch.randn(v.shape, generator=rng) for k, v in start.items()}, start


def protect(text: str, message: Items, start: Items, seed: int = 0) -> Items:
    return parse_defense(text).protect(message, start, stream("test", seed))


def flat(items: Items) -> torch.Tensor:
    return torch.cat([v.flatten() for v in items.values()])


@pytest.mark.parametrize("text", NEUTRAL)
def test_at_its_neutral_value_a_defense_is_the_identity_bit_for_bit(text: str):
    message, start = large()
    assert toys.same(protect(text, message, start), message)


@pytest.mark.parametrize("text", NEUTRAL)
@pytest.mark.parametrize("key", ["fedavg", "fedproto", "scaffold"])
def test_a_run_under_a_neutral_defense_has_the_bits_of_a_run_without(text: str, key: str):
    plain, defended = (toys.play(key, 2, defense=defense) for defense in ([], [text]))
    assert toys.same(plain[-1].next_server, defended[-1].next_server)


@pytest.mark.parametrize("text", EVERY)
def test_a_defense_leaves_its_arguments_and_items_without_a_reference_alone(text: str):
    message, start = large()
    message |= {"counts": torch.ones(3), "held": torch.tensor([True])}
    before = [toys.snapshot(items) for items in (message, start)]
    sent = protect(text, message, start)
    assert all(toys.same(now, was) for now, was in zip((message, start), before, strict=True))
    assert {k: (v.shape, v.dtype) for k, v in sent.items()} == {k: (v.shape, v.dtype) for k, v in message.items()}
    assert toys.same({k: sent[k] for k in ("counts", "held")}, {k: message[k] for k in ("counts", "held")})
    assert all(not torch.equal(sent[k], message[k]) for k in start)


# --- each defense


def test_clipping_bounds_all_items_as_one_vector_and_keeps_their_direction():
    message, start = large()
    was, now = (change(m, start) for m in (message, protect("clip:bound=0.5", message, start)))
    assert float(norm(now)) == pytest.approx(0.5, rel=1e-4)
    assert float(flat(was) @ flat(now) / norm(was) / norm(now)) == pytest.approx(1, abs=1e-5)


def test_a_client_that_does_not_train_leaves_the_server_where_it_was_however_large_its_weights():
    """The change is clipped, not the weights: |w| > 1 stays with a bound of 1."""
    made = toys.setup("fedavg", defense=["clip:bound=1"], local_epochs=0, settings={"weighting": "uniform"})
    turn = toys.rounds(made, 1)[0]
    assert float(norm(turn.server)) > 1
    assert toys.distance(turn.server, turn.next_server) < 1e-6
    assert all(toys.same({k: up[k] for k in turn.server}, turn.server) for up in turn.ups.values())


@pytest.mark.parametrize(("text", "std"), [("gaussian:std=0.05", 0.05), ("laplace:scale=0.05", 0.05 * 2**0.5)])
def test_every_coordinate_of_a_zero_change_is_noised_at_the_stated_scale(text: str, std: float):
    _, start = large()
    noise = flat(change(protect(text, start, start), start))
    assert len(noise) > 1e4
    assert not (noise == 0).any()
    assert float(noise.std()) == pytest.approx(std, rel=0.05)
    assert abs(float(noise.mean())) < 5 * std / len(noise) ** 0.5


def test_the_two_noises_have_the_tails_of_their_laws():
    """Beyond two standard deviations lie 4.55 % of a normal law, and exp(-2 sqrt 2) = 5.91 % of Laplace's."""
    _, start = large()
    for text, share in (("gaussian:std=1", 0.0455), ("laplace:scale=1", 0.0591)):
        noise = flat(change(protect(text, start, start), start))
        assert float((noise.abs() > 2 * noise.std()).double().mean()) == pytest.approx(share, abs=0.005)


def test_relative_noise_of_one_is_as_long_as_the_change():
    message, start = large()
    for text in ("gaussian:std=1,relative=true", "laplace:scale=0.70710678,relative=true"):
        noise = change(protect(text, message, start), message)
        assert float(norm(noise) / norm(change(message, start))) == pytest.approx(1, rel=0.05)


def test_noise_differs_between_rounds_clients_and_probes_and_repeats_itself():
    made = toys.setup("fedavg", defense=["gaussian:std=1"])
    up, down = {**made.server_first, "num_samples": torch.tensor(1)}, made.server_first
    start = reference(made.algorithm.contract, up, down, {})
    sent = [
        made.channel.send_up(up, start, *where, probe=probe).up["head.bias"]
        for where, probe in [((0, 0), ""), ((0, 1), ""), ((1, 0), ""), ((0, 0), "a"), ((0, 0), "b"), ((0, 0), "")]
    ]
    assert torch.equal(sent[0], sent[-1])
    assert len({tuple(v.tolist()) for v in sent}) == 5


def test_pruning_sends_the_largest_coordinates_and_keeps_them_as_they_are():
    message, start = large()
    sent = protect("prune:keep=0.1", message, start)
    was, now = (flat(change(m, start)) for m in (message, sent))
    kept = now != 0
    assert int(kept.sum()) == round(0.1 * len(was) + 0.4999)
    assert was[kept].abs().min() >= was[~kept].abs().max()
    assert torch.equal(flat(sent)[kept], flat(message)[kept])
    assert torch.equal(flat(sent)[~kept], flat(start)[~kept])


def test_pruning_item_by_item_keeps_some_of_each():
    message, start = large()
    message["b"] = start["b"] + torch.tensor([1e-3, 2e-3])
    whole, each = (change(protect(f"prune:keep=0.5,scope={s}", message, start), start) for s in ("message", "item"))
    assert [int((v != 0).sum()) for v in (whole["b"], each["b"], each["w"])] == [0, 1, 15000]


def test_quantised_coordinates_lie_on_their_levels_next_to_the_true_ones_and_are_right_on_average():
    """8 bits: 127 levels between 0 and the item's norm. The mean of many draws has a standard error below level / 2 sqrt n."""
    step = {"w": torch.tensor([0.3, -0.4, 0.0, 1.2, 0.0001])}
    zero = {"w": torch.zeros(5)}
    draws = torch.stack([protect("qsgd:bits=8", step, zero, seed)["w"] for seed in range(400)]).double()
    level = float(norm(step)) / 127
    places = draws / level
    assert (places - places.round()).abs().max() < 1e-3
    assert (draws - step["w"]).abs().max() <= level
    assert (draws.mean(0) - step["w"]).abs().max() < 5 * level / 2 / 400**0.5
    assert not draws[:, 2].any()


def test_a_zero_item_is_quantised_to_zero():
    zero = {"w": torch.zeros(5)}
    assert toys.same(protect("qsgd:bits=2", zero, zero), zero)


def test_signs_carry_the_mean_size_of_their_item():
    sent = protect("sign", {"w": torch.tensor([3.0, -1.0, 0.0, 0.0])}, {"w": torch.zeros(4)})
    assert sent["w"].tolist() == [1.0, -1.0, 0.0, 0.0]


def test_half_precision_rounds_the_change_and_never_overflows():
    start = {"w": torch.tensor([100.0, 0.0])}
    sent = protect("fp16", {"w": torch.tensor([100.0 + 2**-10 + 2**-13, 1e6])}, start)
    assert float(sent["w"][0] - 100) == pytest.approx(2**-10 + 2**-13, abs=8e-6)
    assert float(sent["w"][1]) == 65504.0


# --- what is a change: by kinds


@pytest.mark.parametrize(
    ("key", "touched", "left"),
    [
        ("fedavg", {"weights"}, {"counts"}),
        ("scaffold", {"weights-delta", "control variate"}, set()),
        ("fedproto", {"prototypes"}, {"label set", "counts"}),
        ("fd", {"logits"}, {"label set"}),
        ("fedpac", {"weights", "prototypes", "statistics"}, {"counts", "scalar"}),
        ("fedcac", {"weights"}, {"mask", "counts"}),
        ("fedgen", {"weights"}, {"counts"}),
    ],
)
def test_vectors_of_every_kind_are_noised_and_counts_sets_masks_and_scalars_are_not(
    key: str, touched: set[str], left: set[str]
):
    plain, noised = (toys.play(key, 1, defense=d)[0] for d in ([], ["gaussian:std=1"]))
    contract = toys.method(key).contract
    for name, value in plain.ups[3].items():
        kind = contract.kind("up", name)
        assert kind in touched | left
        equal = value == noised.ups[3][name]
        assert bool(equal.all()) if kind in left else not bool(equal.any()), name


def test_weights_count_from_the_downlink_and_where_it_has_none_from_the_start_of_local_work():
    made = toys.setup("fedmtl")
    server = made.server_first
    down, state = made.algorithm.downlink(server, 1), made.algorithm.init_client(made.client_fresh(1), server)
    found = reference(made.algorithm.contract, state, down, made.algorithm.start(state, down))
    assert toys.same(found, state)
    made = toys.setup("fedamp", settings={"start": "own"})
    server = made.server_first
    down, state = made.algorithm.downlink(server, 1), made.algorithm.init_client(made.client_fresh(1), server)
    other = {k: v + 1 for k, v in state.items()}
    assert toys.same(reference(made.algorithm.contract, state, down, made.algorithm.start(other, down)), down)


# --- composition


def test_defenses_act_in_their_order():
    """Clipped and then noised, the change is longer than the bound; noised and then clipped it is not."""
    message, start = large()

    def chain(texts: Sequence[str]) -> float:
        sent = message
        for text in texts:
            sent = protect(text, sent, start)
        return float(norm(change(sent, start)))

    assert chain(["gaussian:std=0.1", "clip:bound=1"]) == pytest.approx(1, rel=1e-3)
    assert chain(["clip:bound=1", "gaussian:std=0.1"]) > 10


def test_a_chain_is_played_in_its_order():
    texts = ["clip:bound=0.5", "prune:keep=0.5", "qsgd:bits=4"]
    made = toys.setup("fedavg", defense=texts)
    assert [d.key for d in made.channel.uplink] == ["clip", "prune", "qsgd"]
    turn = toys.rounds(made, 1)[0]
    step = flat(change({k: turn.ups[0][k] for k in turn.downs[0]}, turn.downs[0]))
    assert 0.2 < float((step == 0).double().mean()) < 1
    assert float(step.norm()) < 1


def test_no_card_of_an_uplink_defense_says_formal():
    from pflsec.core import registry

    uplink = [n for n in registry.names("defenses") if registry.load("defenses", n).seam == "uplink"]
    assert set(uplink) == {"clip", "gaussian", "laplace", "prune", "qsgd", "sign", "fp16"}
    for name in uplink:
        card = registry.card("defenses", name)
        assert {"Source", "Seam", "Claims", "Knob", "Limits"} <= card.sections.keys()
        assert card.sections["Claims"].startswith("none")
        assert "formal" not in str(card).lower()
    assert isinstance(parse_defense("sign"), Defense)


# --- bytes


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        ([], 4 * 30002),
        (["clip:bound=0.1"], 4 * 30002),
        (["gaussian:std=0.1"], 4 * 30002),
        (["fp16"], 2 * 30002),
        (["qsgd:bits=4"], 30000 // 2 + 4 + 1 + 4),
        (["sign"], 30000 // 8 + 4 + 1 + 4),
        (["prune:keep=0.01,scope=item"], 300 * 8 + 5),
        (["prune:keep=0.5,scope=item"], 15000 * 4 + 30000 // 8 + 5),
        (["prune:keep=0.01,scope=item", "fp16"], 300 * 6 + 3),
        (["prune:keep=0.01,scope=item", "clip:bound=0.1"], 300 * 8 + 5),
        (["prune:keep=0.01,scope=item", "gaussian:std=0.1"], 4 * 30002),
        (["prune:keep=1", "qsgd:bits=32"], 4 * 30002),
    ],
    ids=str,
)
def test_bytes_up_are_those_of_the_coordinates_as_they_are_written(texts: list[str], wanted: int):
    """Items of 30000 and 2 numbers. Pruned: 4 bytes of value and 4 of place each, or a mask of a bit a coordinate and the
    values; of the 2 numbers one is left, behind a mask: 34 bits. Quantised: the codes and 4 bytes of scale an item."""
    message, start = large()
    contract = Contract("test", {}, {"w": "gradient [a, b]", "b": "gradient [c]"}, toys.tiny())
    ledger = Ledger()
    Channel(contract, [parse_defense(text) for text in texts]).send_up(message, start, 0, 0, ledger)
    assert ledger.total("up") == wanted


def test_bytes_of_a_run_are_what_its_defense_leaves_of_them():
    plain, pruned, halved = (toys.play("fedavg", 1, defense=d)[0].metrics for d in ([], ["prune:keep=0.05"], ["fp16"]))
    assert pruned["bytes_up"] < 0.2 * plain["bytes_up"]
    assert halved["bytes_up"] == plain["bytes_up"] / 2
    assert pruned["bytes_down"] == plain["bytes_down"]
