"""DP-SGD: exact clipping, noise that covers what is sent, and no way round it."""

import math
from typing import Any

import pytest
import torch
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer

from pflsec.config.train import resolve
from pflsec.core import registry
from pflsec.core.errors import ConfigError, PrivacyError
from pflsec.core.items import Items
from pflsec.core.local import half_squared_distance
from pflsec.defenses import accounting
from pflsec.defenses.step.dp_sgd import DPSGD, DPGuard, DPSGDConfig
from pflsec.models import catalogue
from pflsec.models.mlp import mlp
from pflsec.runtime.privacy import Ledger, mechanism
from pflsec.runtime.rounds import Federated
from pflsec.runtime.setup import Setup, prepare
from pflsec.training.local import LocalWork

SHAPE = (1, 4, 4)
COVERED = [key for key in registry.names("algorithms") if registry.load("algorithms", key).dp_support == "full"]
REFUSED = [key for key in registry.names("algorithms") if registry.load("algorithms", key).dp_support != "full"]


def guard(n: int = 12, batch: int = 4, sigma: float = 0.0, clip: float = 1.0, **more: Any) -> DPGuard:
    return DPSGD(DPSGDConfig(noise_multiplier=sigma, max_grad_norm=clip, **more)).guard(n, batch, sigma, "test")


def work(n: int = 12, batch: int = 4, epochs: int = 2, by: DPGuard | None = None) -> LocalWork:
    torch.manual_seed(0)
    x, y = torch.randn(n, *SHAPE), torch.randint(0, 10, (n,))
    return LocalWork(catalogue.build("mlp", SHAPE, 10), x, y, 0.1, epochs, batch, 0, 0, 0, guard=by)


def start() -> Items:
    return catalogue.build("mlp", SHAPE, 10).fresh(0)


def federated(algo: str, defense: str, **options: object) -> Federated:
    given = {
        "algo": algo,
        "model": "mlp",
        "clients": 4,
        "rounds": 2,
        "alpha": 1.0,
        "capture_rounds": "none",
        "dp_seed": 5,
    }
    return Federated(prepare(resolve(given | {"defense": [defense], "batch_size": 50} | options)))


def test_without_noise_and_clipping_it_is_plain_training_on_the_same_batches():
    """sigma 0, C large, fixed batches of equal size: the clipped mean is the mean, so one full-batch step is SGD's."""
    one = work(batch=12, epochs=1, by=guard(batch=12, clip=1e9))
    plain = work(batch=12, epochs=1)
    found, wanted = one.fit(start(), on=one.ce), plain.fit(start(), on=plain.ce)
    assert all(torch.allclose(found[k], wanted[k], atol=1e-6) for k in wanted)


def test_the_clipped_gradient_is_the_one_of_opacus_hooks():
    """Our per-sample gradients, clipped and summed, equal those of GradSampleModule on the same plain network."""
    ctx, params = work(n=5), start()
    g = guard(n=5, batch=5, clip=0.3)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    ours = g.gradient(ctx.ce, leaves, ctx.x, ctx.y)

    module = mlp(SHAPE, 10)
    module.load_state_dict({k.replace("body.", "").replace("head.", "fc."): v for k, v in params.items()})
    hooked = GradSampleModule(module)
    optimizer = DPOptimizer(
        torch.optim.SGD(hooked.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.3, expected_batch_size=5
    )
    torch.nn.functional.cross_entropy(hooked(ctx.x), ctx.y).backward()
    optimizer.pre_step()
    for mine, theirs in zip(ours, hooked.parameters(), strict=True):
        assert theirs.grad is not None
        assert torch.allclose(mine, theirs.grad, atol=1e-6)


def test_removing_one_record_moves_the_clipped_sum_by_at_most_the_clipping_norm():
    clip = 0.05
    ctx, params = work(n=8), start()
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}

    def clipped_sum(rows: list[int]) -> torch.Tensor:
        g = guard(n=8, batch=8, clip=clip)
        return 8 * torch.cat([t.flatten() for t in g.gradient(ctx.ce, leaves, ctx.x[rows], ctx.y[rows])])

    whole = clipped_sum(list(range(8)))
    for left_out in range(8):
        rest = clipped_sum([i for i in range(8) if i != left_out])
        assert float((whole - rest).norm()) <= clip * (1 + 1e-5)


def test_noise_has_the_stated_scale():
    """An empty batch gives noise alone: standard deviation sigma C / expected batch in every coordinate."""
    ctx, params = work(n=100, batch=20), catalogue.build("mlp", (1, 28, 28), 10).fresh(0)
    g = guard(n=100, batch=20, sigma=2.0, clip=0.5)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    noise = torch.cat([t.flatten() for t in g.gradient(ctx.ce, leaves, ctx.x[:0], ctx.y[:0])])
    assert float(noise.std()) == pytest.approx(2.0 * 0.5 / 20, rel=0.02)
    assert not (noise == 0).any()


def test_a_penalty_survives_and_is_not_clipped():
    """With C tiny the data hardly move the parameters; the penalty pulls with its full gradient mu (w - a)."""
    params, anchor = start(), {k: torch.zeros_like(v) for k, v in start().items()}
    ctx = work(batch=12, epochs=1, by=guard(batch=12, clip=1e-9))
    found = ctx.fit(params, on=ctx.ce, penalty=half_squared_distance(2.0, anchor))
    for k, w in params.items():
        assert torch.allclose(found[k], w - 0.1 * 2.0 * w, atol=1e-6)


def test_empty_batches_are_steps_of_noise_and_are_counted():
    """40 samples, batch 1: many draws are empty. 40 steps are taken and accounted, and nothing is NaN."""
    g = guard(n=40, batch=1, sigma=1.0)
    ctx = work(n=40, batch=1, epochs=1, by=g)
    found = ctx.fit(start(), on=ctx.ce)
    assert len(g.spent) == 40
    assert any(not len(rows) for rows in guard(n=40, batch=1).rows(1))
    assert all(torch.isfinite(v).all() for v in found.values())


def test_phases_that_freeze_parts_are_each_protected_and_accounted():
    """FedRep: ten epochs of the head and one of the body make eleven epochs of noisy steps."""
    run = federated("fedrep", "dp-sgd:noise_multiplier=1.0")
    assert run.ledger is not None
    assert run.ledger.epochs == 11


@pytest.mark.parametrize("algo", COVERED)
def test_every_covered_item_changes_with_the_noise(algo: str):
    """The contract of the guarantee: whatever is called covered must come from noised gradients."""
    ups = []
    for sigma in (0.0, 50.0):
        run = federated(algo, f"dp-sgd:noise_multiplier={sigma}")
        setup, client = run.setup, 1
        x, y = setup.federation.train(client)
        assert run.ledger is not None
        ctx = LocalWork(setup.net, x, y, 0.05, 1, 50, 0, 0, client, guard=run.ledger.guard(client, "round", 0))
        down = setup.algorithm.downlink(run.server, client)
        ups.append(setup.algorithm.local(ctx, run.states[client], down).up)
    for name in ups[0]:
        changed = not torch.equal(ups[0][name], ups[1][name])
        assert changed or setup.algorithm.contract.kind("up", name) == "counts", name


@pytest.mark.parametrize("algo", REFUSED)
def test_a_method_that_is_not_covered_is_refused_by_name(algo: str):
    with pytest.raises(PrivacyError, match=algo):
        federated(algo, "dp-sgd:noise_multiplier=1.0")


def test_raw_passes_are_refused_under_it():
    for take in (
        lambda ctx: list(ctx.batches()),
        lambda ctx: ctx.full_gradient(start(), ctx.ce),
        lambda ctx: ctx.features(start()),
        lambda ctx: ctx.targets(),
    ):
        with pytest.raises(PrivacyError, match="raw data"):
            take(work(by=guard()))


def test_a_loss_that_couples_the_batch_is_refused():
    ctx = work(by=guard(batch=12, clip=1.0), batch=12)
    with pytest.raises(PrivacyError, match="must not depend on the others"):
        ctx.fit(start(), on=lambda p, x, y: ctx.ce(p, x - x.mean(0), y))
    with pytest.raises(PrivacyError, match="one number an example"):
        ctx.fit(start(), on=lambda p, x, y: ctx.ce(p, x, y).mean())


def test_epsilon_is_the_one_of_opacus_accountant():
    accountant = RDPAccountant()
    accountant.history = [(1.0, 1 / 198, 19700), (1.3, 0.1, 50)]
    mine = accounting.epsilon([(1.0, 1 / 198, 19000), (1.3, 0.1, 50), (1.0, 1 / 198, 700)], 1e-5)
    assert mine == pytest.approx(accountant.get_epsilon(delta=1e-5), rel=1e-9)


@pytest.mark.parametrize(
    ("rate", "steps", "sigma", "published"),
    [
        (1 / 198, 19700, 1.0, 4.48),
        (1 / 198, 19700, 0.6, 17.08),
        (1 / 62, 6200, 1.0, 8.94),
        (1 / 62, 31000, 1.0, 23.69),
        (1 / 31, 1550, 1.1, 7.70),
    ],
)
def test_epsilon_of_known_mechanisms(rate: float, steps: int, sigma: float, published: float):
    assert accounting.epsilon([(sigma, rate, steps)], 1e-5) == pytest.approx(published, abs=1e-2)


def test_reading_epsilon_changes_nothing_and_no_noise_means_no_bound():
    account = [(1.0, 0.1, 10)]
    assert accounting.epsilon(account, 1e-5) == accounting.epsilon(account, 1e-5)
    assert accounting.epsilon([(0.0, 0.1, 1)], 1e-5) == math.inf
    assert accounting.epsilon([], 1e-5) == 0.0


def test_the_account_lives_across_rounds_and_counts_all_steps():
    run = federated("fedavg", "dp-sgd:noise_multiplier=1.0")
    run.advance()
    metrics, rows = run.advance()
    assert run.ledger is not None
    for client, size in enumerate(run.setup.federation.sizes()):
        assert sum(steps for _, _, steps in run.ledger.accounts[client]) == 2 * -(-size // 50)
    assert metrics["epsilon"] == pytest.approx(max(row["epsilon"] for row in rows))


def test_the_noise_for_a_target_keeps_it_and_uses_most_of_it():
    run = federated("fedavg", "dp-sgd:epsilon=5")
    run.advance()
    metrics, _ = run.advance()
    assert 4.5 < metrics["epsilon"] <= 5.0


def test_a_client_stops_before_it_exceeds_its_budget():
    run = federated("fedavg", "dp-sgd:noise_multiplier=0.8,epsilon=3", rounds=30)
    stopped = set()
    for _ in range(30):
        metrics, _ = run.advance()
        stopped |= set(metrics["stopped"])
        assert metrics["epsilon"] <= 3
    assert stopped == set(range(4))


def test_two_runs_with_one_seed_have_different_noise_unless_it_is_fixed():
    def server(**options: object) -> Items:
        run = federated("fedavg", "dp-sgd:noise_multiplier=1.0", **options)
        run.advance()
        return run.server

    assert not torch.equal(server(dp_seed=None)["head.bias"], server(dp_seed=None)["head.bias"])
    assert torch.equal(server(dp_seed=1)["head.bias"], server(dp_seed=1)["head.bias"])


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ("", "epsilon or noise_multiplier"),
        (":epsilon=0", "epsilon"),
        (":epsilon=-1", "epsilon"),
        (":noise_multiplier=-1", "noise_multiplier"),
        (":epsilon=8,delta=1", "delta"),
        (":epsilon=nan", "epsilon"),
        (":epsilon=8,sigma=2", "sigma"),
        (":epsilon", "NAME=VALUE"),
    ],
)
def test_bad_knobs_are_refused(knobs: str, says: str):
    with pytest.raises(ConfigError, match=says):
        prepare(resolve({"model": "mlp", "defense": [f"dp-sgd{knobs}"]}))


def test_a_loose_delta_and_a_small_client_are_warned_about():
    setup: Setup = prepare(
        resolve({"model": "mlp", "defense": ["dp-sgd:noise_multiplier=1.0,delta=0.2"], "batch_size": 20})
    )
    dp = mechanism(setup)
    assert dp is not None
    with pytest.warns(match=r"at least 1/n|no more samples than a batch") as caught:
        Ledger(setup, dp, 0)
    assert len(caught) == 2
