"""Class sums and counts that leave a client: clipped rows, noise on both, and one account with the steps."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core import registry
from pflsec.core.algorithm import Done
from pflsec.core.errors import ConfigError, PrivacyError
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.core.streams import stream
from pflsec.defenses import accounting
from pflsec.defenses.step.dp_release import DPRelease, DPReleaseConfig, ReleaseGuard
from pflsec.defenses.step.dp_sgd import DPSGD, DPSGDConfig
from pflsec.runtime import privacy
from pflsec.runtime.replay import capture, local_work, relative_distance
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup
from pflsec.training.local import Training
from tests import toys
from tests.attacks.victims import victim

TREATED = [
    key for key in registry.names("algorithms") if registry.load("algorithms", key).dp_support.startswith("partial")
]
SETTINGS: dict[str, dict[str, Any]] = {"fd": {"collect": "eval"}}
BESIDE = "dp-sgd:noise_multiplier=1,sampling=shuffle"


def guard(z: float = 0.0, bound: float = 1.0, *key: int | str, **more: float) -> ReleaseGuard:
    steps = DPSGD(DPSGDConfig(noise_multiplier=1.0)).guard(8, 4, 1.0, "test")
    return DPRelease(DPReleaseConfig(noise_multiplier=z, bound=bound, **more)).over(steps, "test", *key)


def rows(count: int = 8, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of lengths around 2 and their classes, one-hot."""
    return torch.randn(count, width, generator=stream("rows")), torch.eye(3)[torch.arange(count) % 3]


def setup(key: str, *defense: str, **options: Any) -> Setup:
    chain = list(defense) or [BESIDE, "dp-release:noise_multiplier=0.3"]
    return toys.setup(key, defense=chain, dp_seed=1, settings=SETTINGS.get(key, {}), **options)


def test_without_noise_and_under_a_large_bound_the_sums_are_the_bare_ones_bit_for_bit():
    x, y = toys.batch(7)
    model = toys.tiny().fresh(0)
    bare, guarded = toys.work(x, y), toys.work(x, y, guard=guard(0.0, 1e9))
    for found, plain in zip(
        guarded.class_sums(lambda a: guarded.net.features(model, a)),
        bare.class_sums(lambda a: bare.net.features(model, a)),
        strict=True,
    ):
        assert torch.equal(found, plain)
    assert torch.equal(guarded.class_counts(), bare.class_counts())


def test_the_sums_are_those_of_each_class():
    x, y = toys.batch(7)
    ctx = toys.work(x, y)
    sums, counts = ctx.class_sums(lambda a: a.flatten(1))
    for c in range(3):
        assert torch.allclose(sums[c], x[y == c].flatten(1).sum(0), atol=1e-6)
        assert int(counts[c]) == int((y == c).sum())


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_removing_one_record_moves_the_sums_by_at_most_the_bound_and_the_counts_by_one(scale: float):
    bound = 0.7
    z, target = rows()
    whole = guard(0.0, bound).class_sums(scale * z, target)
    for left_out in range(len(z)):
        keep = torch.arange(len(z)) != left_out
        sums, counts = guard(0.0, bound).class_sums(scale * z[keep], target[keep])
        assert float((whole[0] - sums).double().norm()) <= bound * (1 + 1e-5)
        assert float((whole[1] - counts).norm()) == 1.0


def test_noise_on_sums_and_counts_has_the_scale_that_makes_both_together_one_gaussian_mechanism():
    """A record moves (sums / bound, counts) by at most sqrt(2): the noise of both is sqrt(2) times the multiplier."""
    empty, target = torch.zeros(0, 4000), torch.zeros(0, 3)
    z, bound = 3.0, 0.5
    draws = [guard(z, bound, t, threshold=0.0).class_sums(empty, target) for t in range(200)]
    found = torch.cat([sums[counts > 0].flatten() for sums, counts in draws])
    assert len(found) > 1e5
    assert float(found.std()) == pytest.approx(z * bound * 2**0.5, rel=0.02)
    crowd = torch.eye(3).repeat_interleave(1000, 0)
    counts = torch.stack([guard(z, bound, t).class_sums(torch.zeros(3000, 1), crowd)[1] for t in range(500)])
    alone = torch.stack([guard(z, bound, t).class_sums(torch.zeros(3000, 0), crowd)[1] for t in range(500)])
    assert float((counts - 1000).std()) == pytest.approx(z * 2**0.5, rel=0.1)
    assert float((alone - 1000).std()) == pytest.approx(z, rel=0.1)


def test_classes_are_named_by_their_noised_counts_alone():
    """With a multiplier of 1 and a threshold of 3, a class of 50 rows is always named, and one without hardly ever (0.13 %)."""
    z, target = torch.ones(50, 2), torch.eye(3)[torch.zeros(50, dtype=torch.int64)]
    seen = torch.stack([guard(1.0, 1.0, t, threshold=3.0).class_sums(z, target)[1] > 0 for t in range(300)])
    assert bool(seen[:, 0].all())
    assert 0 < seen[:, 1:].sum() + 1 < 10
    sums, counts = guard(1.0, 1.0, 0, threshold=3.0).class_sums(z, target)
    assert torch.equal(sums[counts == 0], torch.zeros_like(sums[counts == 0]))
    assert counts[counts > 0].min() >= 1


def test_every_release_has_its_own_noise_and_a_guard_travels_before_its_first():
    one, other = guard(1.0, 1.0, 0), guard(1.0, 1.0, 1)
    z, target = rows(300)
    first, second = (one.class_sums(z, target)[1] for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, other.class_sums(z, target)[1])
    assert torch.equal(pickle.loads(pickle.dumps(guard(1.0, 1.0, 0))).class_sums(z, target)[1], first)
    assert list(one.spent) == [(1.0, 1.0, 2)]


@pytest.mark.parametrize("key", TREATED)
def test_a_method_with_class_sums_is_private_with_both_defenses_and_refused_with_one(key: str):
    made = setup(key)
    said = privacy.describe(made)
    assert said["guarantee"].startswith("none: shuffled")
    assert privacy.describe(setup(key, "dp-sgd:noise_multiplier=1", "dp-release"))["guarantee"].startswith("formal")
    assert said["release"]["per_round"] == {"fedpac": 3}.get(key, 1)
    public = {k for k, v in said["coverage"].items() if v != "covered"}
    assert public <= {"num_samples"}
    with pytest.raises(
        PrivacyError, match=rf"{key} cannot be trained under dp-sgd .*raw data.*or add --defense dp-release"
    ):
        privacy.describe(setup(key, BESIDE))


def test_fd_is_refused_where_it_sends_the_outputs_of_its_steps():
    with pytest.raises(PrivacyError, match="collect = eval"):
        privacy.describe(toys.setup("fd", defense=[BESIDE, "dp-release"]))


@pytest.mark.parametrize("key", TREATED)
def test_everything_covered_changes_with_the_noise(key: str):
    """Between two noise keys nothing stays as it was, but sample counts: of items whose shape differs all does. Sets of
    classes are yes or no: at a small multiplier they may well agree."""
    ups = []
    for seed in (1, 2):
        made = toys.setup(
            key, defense=[BESIDE, "dp-release:noise_multiplier=0.3"], dp_seed=seed, settings=SETTINGS.get(key, {})
        )
        ups.append(toys.rounds(made, 1)[0].ups[3])
    assert ups[0].keys() == ups[1].keys()
    for name, value in ups[0].items():
        if name not in ("num_samples", "held") and value.numel():
            assert not torch.equal(value, ups[1][name]), name


@pytest.mark.parametrize("key", TREATED)
def test_rounds_stay_finite_where_noise_leaves_no_class_at_all(key: str):
    made = setup(key, BESIDE, "dp-release:noise_multiplier=50")
    for turn in toys.rounds(made, 3):
        assert all(torch.isfinite(v).all() for v in turn.next_server.values() if v.is_floating_point())


def test_releases_stand_on_the_account_beside_the_steps():
    made = setup("fedpac", rounds=3)
    run = Federated(made)
    metrics = [run.advance()[0] for _ in range(3)][-1]
    assert run.ledger is not None
    account = run.ledger.accounts[1]  # 8 rows in batches of 4; one epoch of the head, two of the body
    assert sorted(account) == [(0.3, 1.0, 9), (1.0, 0.5, 18)]
    worst = max(accounting.epsilon(a, 1e-5) for a in run.ledger.accounts.values())
    assert metrics["epsilon"] == pytest.approx(worst)
    assert worst > accounting.epsilon([(1.0, 0.5, 18)], 1e-5)


def test_noise_for_a_target_leaves_room_for_the_releases():
    spent = []
    for release in ("dp-release:noise_multiplier=20", "dp-release:noise_multiplier=2"):
        made = setup("fedproto", "dp-sgd:epsilon=20", release)
        run = Federated(made)
        assert run.ledger is not None
        spent.append(run.ledger.sigmas[1])
        turns = toys.rounds(made, 3)
        assert 18 < turns[-1].metrics["epsilon"] <= 20
        assert turns[-1].metrics["stopped"] == []
    assert spent[1] > spent[0] * 1.01


def test_releases_that_take_the_budget_alone_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match=r"releases beside its steps takes epsilon .* of its budget of 1"):
        Federated(setup("fedproto", "dp-sgd:epsilon=1", "dp-release:noise_multiplier=1"))


class Later(FedAvg):
    """FedAvg that trains four times as long from the second round on."""

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down, on=ctx.ce, epochs=ctx.epochs * (4 if ctx.round else 1))
        return Done(state, model | {"num_samples": torch.tensor(ctx.num_samples)})


def test_a_method_that_takes_more_steps_than_were_planned_stops_before_it_overspends():
    made = toys.setup(Later, defense=["dp-sgd:epsilon=8,noise_multiplier=1.5"], dp_seed=1, rounds=6)
    turns = toys.rounds(made, 6)
    assert all(turn.metrics["epsilon"] <= 8 for turn in turns)
    assert turns[-1].metrics["stopped"] == [0, 1, 2, 3]
    assert all(set(turn.ups).isdisjoint(turn.metrics["stopped"]) for turn in turns)
    assert toys.same(turns[-1].server, turns[-1].next_server)


def test_alone_it_is_refused():
    with pytest.raises(ConfigError, match=r"dp-release guarantees nothing by itself.*dp-sgd"):
        toys.setup("fedproto", defense=["dp-release"])


@pytest.mark.parametrize("key", ["fedproto", "fedgh", "fedpcl"])
def test_an_attacker_who_knows_the_bound_clips_the_rows_of_its_guess(key: str):
    bound = 0.05
    v = victim(key, batch=3)
    release = DPRelease(DPReleaseConfig(noise_multiplier=0.0, bound=bound))
    work = replace(local_work(v.setup.net, v.record, v.x, v.y, 0, Training), row_bound=bound)
    sent = v.with_upload(v.setup.algorithm.local(work, v.state, v.record.down).up)
    gaps = []
    for known in ([release], []):
        cap = capture(v.setup.algorithm, v.setup.net, sent.record, history=True, seed=0, labels=v.y, defenses=known)
        gaps.append(relative_distance(cap.replay(v.x.double(), v.y, v.state), cap.target))
    assert gaps[0] < 1e-3
    assert gaps[1] > 0.3


@pytest.mark.parametrize(
    "key",
    [
        k
        for k in registry.names("algorithms")
        if not toys.method(k, **SETTINGS.get(k, {})).dp_support.startswith("none")
    ],
)
def test_without_noise_and_clipping_a_round_is_that_of_a_run_without_defenses(key: str, doubles: None):
    """Batches hold all of a client's rows, so that their order, which a guard draws for itself, says nothing. Steps on several
    independent batches draw their rows anew: perfedavg takes them from other streams."""
    if key == "perfedavg":
        pytest.skip("its steps split the rows by draws of the guard")
    quiet = ["dp-sgd:noise_multiplier=0,max_grad_norm=1e9,sampling=shuffle", "dp-release:noise_multiplier=0,bound=1e9"]
    plain, guarded = (
        toys.play(key, 2, defense=defense, dp_seed=1, settings=SETTINGS.get(key, {}), batch_size=50)
        for defense in ([], quiet)
    )
    assert toys.distance(plain[-1].next_server, guarded[-1].next_server) < 1e-6
    for client, up in plain[-1].ups.items():
        assert toys.distance(up, guarded[-1].ups[client]) < 1e-6
