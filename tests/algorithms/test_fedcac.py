"""FedCAC. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.model_splitting.fedcac import FedCAC, overlaps
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, prefixed, select, without_prefix
from tests import toys

MODEL = ("body", "head")
PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}


def mask_of(*bits: Sequence[int]) -> list[Items]:
    """Return masks of these bits."""
    return [{"mask.head.bias": torch.tensor(row, dtype=torch.bool)} for row in bits]


def hand_overlap(a: Items, b: Items) -> float:
    """Return O_ab = 1 - |a - b|_1 / (2 |a|_1)."""
    ones = sum(int(v.sum()) for v in a.values())
    apart = sum(int((v != b[k]).sum()) for k, v in a.items())
    return 1 - apart / (2 * ones)


def hand_custom(ups: Mapping[int, Items], t: int, beta: int) -> dict[int, Items]:
    """Return theta_C of every participant; t counts from 1."""
    masks = {c: select(up, "mask") for c, up in ups.items()}
    pairs = {(i, j): hand_overlap(masks[i], masks[j]) for i in ups for j in ups if i != j}
    average = sum(pairs.values()) / len(pairs)
    least = average + t / beta * (max(pairs.values()) - average)
    custom = {}
    for i, own in ups.items():
        near = [up for j, up in ups.items() if j == i or pairs[i, j] >= least - 1e-12]
        custom[i] = {k: torch.stack([up[k] for up in near]).mean(0) for k in select(own, *MODEL)}
    return custom


def check_1_without_critical_entries_it_is_fedavg(kind: type[Algorithm]) -> None:
    reference = toys.play(FedAvg, **PARTIAL)
    for turn, other in zip(toys.play(kind, settings={"tau": 0.0}, **PARTIAL), reference, strict=True):
        assert turn.ups.keys() == other.ups.keys()
        for c, up in turn.ups.items():
            assert toys.same(select(up, *MODEL, "num_samples"), other.ups[c])
            assert not any(v.any() for v in select(up, "mask").values())
        assert toys.same(select(turn.next_server, *MODEL), other.next_server)


def check_2_training_starts_at_the_mixture(kind: type[Algorithm]) -> None:
    """Exactly theta_C where the mask is 1 and theta where it is 0; a newcomer has no mask and is sent no theta_C."""
    made = toys.setup(kind, participation=0.75, seed=1)
    trained: set[int] = set()
    for turn in toys.rounds(made, 5):
        for c, down in turn.downs.items():
            assert ("custom.head.bias" in down) == (c in trained)
            start = {}
            for k, theta in select(down, *MODEL).items():
                mask, custom = turn.states[c][f"mask.{k}"], down.get(f"custom.{k}", theta)
                start[k] = theta.clone()
                start[k][mask] = custom[mask]
            assert toys.same(made.algorithm.start(turn.states[c], down), start)
            work = toys.context(made, turn.t, c)
            assert toys.same(select(turn.ups[c], *MODEL), work.fit(start, on=work.ce))
        trained |= turn.ups.keys()
    assert len(trained) == 4


def check_3_the_mask_is_of_the_largest_changes_times_values(kind: type[Algorithm]) -> None:
    """floor(tau numel) of each tensor: 40 of 80, 2 of 5, 7 of 15, 1 of 3 at tau = 1/2."""
    for tau in (0.5, 0.1, 1.0, 0.29):
        algorithm, (x, y), down = toys.method(kind, tau=tau), toys.batch(10), toys.tiny().fresh("server")
        state = algorithm.init_client({}, algorithm.init_server(down))
        up = algorithm.local(toys.work(x, y, epochs=3), state, down).up
        for k, was in down.items():
            mask, size = up[f"mask.{k}"], (up[k] - was).abs() * up[k].abs()
            assert int(mask.sum()) == int(tau * was.numel() + 1e-9)
            assert not mask.any() or mask.all() or size[mask].min() > size[~mask].max()


def check_4_a_customised_model_is_the_mean_over_partners(kind: type[Algorithm]) -> None:
    """From the first aggregation on, by rounds that count from 1; beyond beta it is the client's own upload."""
    sizes = set()
    for beta in (1, 3, 170):
        for t, turn in enumerate(toys.play(kind, 4, settings={"beta": beta}), 1):
            for c, expected in hand_custom(turn.ups, t, beta).items():
                found = {k: v[c] for k, v in without_prefix("custom", turn.next_server).items()}
                assert toys.distance(found, expected) < 1e-14
                alone = toys.same(found, select(turn.ups[c], *MODEL))
                sizes.add((t > beta, alone))
    assert sizes == {(True, True), (False, True), (False, False)}


def check_4_beyond_beta_with_all_critical_it_is_isolated_training(kind: type[Algorithm]) -> None:
    """Overlaps are made unequal by tau < 1; with tau = 1 all masks are equal, so the models are compared at the masks."""
    algorithm = toys.method(kind, beta=1)
    masks = mask_of([1, 1, 0], [1, 1, 0], [0, 1, 1], [1, 0, 1])
    assert torch.equal(algorithm.partners(masks, 2), torch.eye(4, dtype=torch.bool))  # type: ignore[attr-defined]
    down = toys.tiny().fresh("server")
    own = prefixed("custom", toys.tiny().fresh("own"))
    state = {f"mask.{k}": torch.ones_like(v, dtype=torch.bool) for k, v in down.items()}
    work, alone = (toys.work(*toys.batch(10), epochs=2) for _ in range(2))
    up = algorithm.local(work, state, down | own).up
    assert toys.same(select(up, *MODEL), alone.fit(toys.tiny().fresh("own"), on=alone.ce))


def check_5_at_beta_a_pair_is_left(kind: type[Algorithm]) -> None:
    for beta in (1, 2, 3):
        algorithm = toys.method(kind, beta=beta)
        turn = toys.play(kind, beta, settings={"beta": beta})[-1]
        masks = [select(up, "mask") for up in turn.ups.values()]
        assert 4 < int(algorithm.partners(masks, beta).sum()) < 16  # type: ignore[attr-defined]
        assert int(algorithm.partners(masks, beta + 1).sum()) == 4  # type: ignore[attr-defined]


def check_6_equal_clients_are_partners_up_to_beta(kind: type[Algorithm]) -> None:
    """Equal data in one batch: equal masks, O = 1, which no threshold up to beta exceeds."""
    algorithm, down = toys.method(kind, beta=6), toys.tiny().fresh("server")
    state = algorithm.init_client({}, algorithm.init_server(down))
    one, two = (algorithm.local(toys.work(*toys.batch(10), client=c), state, down).up for c in (0, 1))
    third = algorithm.local(toys.work(*toys.batch(8, (2,), seed=5), client=2), state, down).up
    masks = [select(up, "mask") for up in (one, two, third)]
    assert toys.same(masks[0], masks[1])
    assert overlaps(masks)[0, 1] == overlaps(masks)[1, 0] == 1
    for t in range(1, 7):
        partners = algorithm.partners(masks, t)  # type: ignore[attr-defined]
        assert partners[0, 1]
        assert partners[1, 0]
        assert not partners[:2, 2].any()


def check_equal_overlaps_are_never_parted_by_rounding(kind: type[Algorithm]) -> None:
    """Two clients with masks of one size overlap alike both ways, for ever. So do four of whose masks' three entries all
    share one, though the mean of their twelve overlaps of 1/3 is less than 1/3 in floating point."""
    algorithm = toys.method(kind, beta=1)
    assert algorithm.partners(mask_of([1, 0, 1], [0, 1, 1]), 1000).all()  # type: ignore[attr-defined]
    masks = mask_of(*([1] + [int(j // 2 == i) for j in range(8)] for i in range(4)))
    pairs = overlaps(masks)[~torch.eye(4, dtype=torch.bool)]
    assert torch.allclose(pairs, torch.full((12,), 1 / 3), rtol=0, atol=1e-15)
    assert pairs.mean() < pairs.max()
    assert algorithm.partners(masks, 100).all()  # type: ignore[attr-defined]


def check_an_entry_that_did_not_move_is_not_critical(kind: type[Algorithm]) -> None:
    """Also where fewer entries moved than tau asks for; and where the value ended at 0, which counts as nothing."""
    critical = toys.method(kind, tau=1.0).critical  # type: ignore[attr-defined]
    was, now = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.5, 0.0, 4.0])
    assert critical(was, now).tolist() == [False, True, False, False]


def check_the_absent_find_their_customised_model_as_it_was(kind: type[Algorithm]) -> None:
    """With their own mask, and with the newest theta."""
    seen = 0
    for turn in toys.play(kind, 6, participation=0.5, seed=2):
        for c in turn.states.keys() - turn.ups.keys():
            for k, bank in select(turn.server, "custom", "mask").items():
                assert torch.equal(turn.next_server[k][c], bank[c])
            assert toys.same(turn.next_states[c], turn.states[c])
            seen += any(bool(v.any()) for v in turn.states[c].values())
    assert seen > 2


def check_a_client_is_tested_with_its_next_start(kind: type[Algorithm]) -> None:
    """The mixture by its last mask, of what the server has made in the meantime; in its own rounds also the model as
    trained."""
    made = toys.setup(kind, participation=0.5, seed=2)
    mixed = 0
    for turn in toys.rounds(made, 4):
        for c, state in turn.next_states.items():
            theta = select(turn.next_server, *MODEL)
            custom = {k: v[c] for k, v in without_prefix("custom", turn.next_server).items()}
            expected = {k: torch.where(state[f"mask.{k}"], custom[k], v) for k, v in theta.items()}
            tested = made.algorithm.deploy(state, made.algorithm.downlink(turn.next_server, c))
            assert toys.same(tested, expected if turn.next_server["trained"][c] else theta)
            mixed += not toys.same(tested, theta)
        for c, up in turn.ups.items():
            trained = made.algorithm.deploy_trained(turn.next_states[c], turn.downs[c], up)
            assert toys.same(trained, select(up, *MODEL))
    assert mixed > 4


def test_fedcac_1_without_critical_entries_it_is_fedavg():
    check_1_without_critical_entries_it_is_fedavg(FedCAC)


def test_fedcac_2_training_starts_at_the_mixture():
    check_2_training_starts_at_the_mixture(FedCAC)


def test_fedcac_3_the_mask_is_of_the_largest_changes_times_values():
    check_3_the_mask_is_of_the_largest_changes_times_values(FedCAC)


def test_fedcac_4_a_customised_model_is_the_mean_over_partners():
    check_4_a_customised_model_is_the_mean_over_partners(FedCAC)


def test_fedcac_4_beyond_beta_with_all_critical_it_is_isolated_training():
    check_4_beyond_beta_with_all_critical_it_is_isolated_training(FedCAC)


def test_fedcac_5_at_beta_a_pair_is_left():
    check_5_at_beta_a_pair_is_left(FedCAC)


def test_fedcac_6_equal_clients_are_partners_up_to_beta():
    check_6_equal_clients_are_partners_up_to_beta(FedCAC)


def test_equal_overlaps_are_never_parted_by_rounding():
    check_equal_overlaps_are_never_parted_by_rounding(FedCAC)


def test_an_entry_that_did_not_move_is_not_critical():
    check_an_entry_that_did_not_move_is_not_critical(FedCAC)


def test_the_absent_find_their_customised_model_as_it_was():
    check_the_absent_find_their_customised_model_as_it_was(FedCAC)


def test_a_client_is_tested_with_its_next_start():
    check_a_client_is_tested_with_its_next_start(FedCAC)


def test_equal_weights_are_an_option():
    turn = toys.play(FedCAC, 1, settings={"weighting": "uniform"})[0]
    mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in toys.tiny().shapes}
    assert toys.distance(select(turn.next_server, *MODEL), mean) < 1e-15


def test_a_participant_alone_gets_its_own_model():
    for turn in toys.play(FedCAC, participation=0.25):
        ((c, up),) = turn.ups.items()
        assert toys.same({k: turn.next_server[f"custom.{k}"][c] for k in select(up, *MODEL)}, select(up, *MODEL))


def test_the_server_mixes_what_the_client_would():
    """Half the downlink, the same training: bit for bit the same uploads and models."""
    plain, mixed = (toys.play(FedCAC, 4, settings={"mix_on": where}, **PARTIAL) for where in ("client", "server"))
    for turn, other in zip(plain, mixed, strict=True):
        assert all(down.keys() == set(toys.tiny().shapes) for down in other.downs.values())
        assert all(toys.same(up, other.ups[c]) for c, up in turn.ups.items())
        assert toys.same(turn.next_server, other.next_server)
        assert turn.metrics["personal_accuracy_mean"] == other.metrics["personal_accuracy_mean"]


def test_overlaps_count_common_entries_and_know_empty_masks():
    """Of 3 and 2 entries with 1 in common: 1 - 3/6 and 1 - 3/4."""
    found = overlaps(mask_of([1, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]))
    assert torch.equal(found.diagonal(), torch.ones(4))
    assert found[0, 1] == 0.5
    assert found[1, 0] == 0.25
    assert found[2].tolist() == [0, 0, 1, 1]


def test_a_lost_upload_leaves_neither_mask_nor_overlap():
    for turn in toys.play(FedCAC, 5, drop_rate=0.5, seed=3):
        for c in turn.metrics["lost"]:
            for k, bank in select(turn.server, "custom", "mask", "trained").items():
                assert torch.equal(turn.next_server[k][c], bank[c])


@pytest.mark.parametrize("where", ["client", "server"])
def test_one_step_gives_the_gradient_at_the_mixture(where: str):
    """The server knows theta, theta_C and the mask; a gradient taken from theta alone would be wrong."""
    settings = {"mix_on": where}
    made = toys.setup(FedCAC, settings=settings, local_epochs=1, batch_size=10)
    turn = toys.rounds(made, 4)[-1]
    algorithm, down, up = made.algorithm, turn.downs[3], turn.ups[3]
    seen = algorithm.change(turn.states[3], down, up, lr=0.1, steps=1)
    x, y = made.federation.train(3)
    start = algorithm.start(turn.states[3], down)
    gradient: dict[str, Tensor] = toys.hand_gradient(start, x, y)
    assert toys.distance(seen, gradient) < 1e-13
    assert toys.distance(start, select(turn.server, *MODEL)) > 1e-4
