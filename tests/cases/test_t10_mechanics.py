"""Cases T10: what private training does to gradients, layers and uploads."""

import math
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pflsec.core.errors import ModelError, PrivacyError
from pflsec.core.items import Items, norm, subtract
from pflsec.models.network import Network
from pflsec.runtime import privacy
from pflsec.runtime.defending import parse_defense
from pflsec.runtime.replay import local_work
from pflsec.runtime.rounds import Federated
from pflsec.training.local import Training
from tests import toys
from tests.attacks.victims import attack, victim

CLIP_ONLY = "none: clipping alone; without noise epsilon is infinite"


class Idle(nn.Module):
    """16 -> 5 -> 3 with a layer that its forward pass does not use."""

    def __init__(self):
        super().__init__()
        self.fc1, self.idle, self.fc = nn.Linear(16, 5), nn.Linear(5, 5), nn.Linear(5, toys.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc1(x.flatten(1))))


def play(defense: str, count: int = 1, **options: Any) -> list[toys.Round]:
    return toys.play("fedavg", count, defense=[defense], dp_seed=3, **options)


def test_u113_a_layer_that_nothing_reads_is_named_before_private_training_and_stands_still_without():
    net = Network(Idle, toys.SHAPE, toys.CLASSES)
    for look in (Federated, privacy.describe, privacy.check):
        with pytest.raises(PrivacyError, match=r"does not depend on 'body\.idle\.weight'"):
            look(toys.setup("fedavg", net=net, defense=["dp-sgd:noise_multiplier=1"]))
    turn = toys.play("fedavg", 1, net=net)[0]
    still = {name: toys.distance({name: turn.server[name]}, {name: turn.next_server[name]}) for name in turn.server}
    assert all((gap < 1e-6) == ("idle" in name) for name, gap in still.items())


def test_u115_a_client_with_many_empty_batches_trains_to_the_end():
    """40 rows in batches of 1: in about a third of 40 steps no row is drawn (0.975^40 = 0.36)."""
    made = toys.setup(
        "fedavg", data=toys.dataset([40, 40]), defense=["dp-sgd:noise_multiplier=1"], batch_size=1, local_epochs=1
    )
    federated = Federated(made)
    metrics, rows = federated.advance()
    assert federated.ledger is not None
    assert [[steps for _, _, steps in federated.ledger.accounts[c]] for c in (0, 1)] == [[40], [40]]
    assert all(torch.isfinite(v).all() for v in federated.server.values())
    assert all(math.isfinite(row["train_loss"]) for row in rows)
    assert math.isfinite(metrics["epsilon"])


def test_u115_a_client_whose_batches_are_all_empty_has_no_loss_and_the_round_has_the_others():
    """Of 2 rows in batches of 1, both steps draw nobody in one round of 16."""
    made = toys.setup(
        "fedavg", data=toys.dataset([2, 2]), defense=["dp-sgd:noise_multiplier=1"], batch_size=1, local_epochs=1,
        dp_seed=1, rounds=40,
    )  # fmt: skip
    federated, alone = Federated(made), 0
    for _ in range(40):
        metrics, rows = federated.advance()
        losses = [row["train_loss"] for row in rows if row["train_loss"] is not None]
        assert all(math.isfinite(loss) for loss in losses)
        assert metrics["train_loss"] == (sum(losses) / len(losses) if losses else None)
        alone += len(losses) == 1
    assert alone


def test_u116_a_norm_over_single_values_is_refused_and_one_over_pairs_passes_its_input_on():
    """GroupNorm of 4 features in 4 groups would make every feature 0."""

    def normed(groups: int) -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            flatten=nn.Flatten(), fc1=nn.Linear(16, 4), norm=nn.GroupNorm(groups, 4), fc=nn.Linear(4, toys.CLASSES)
        )
        return nn.Sequential(layers)

    with pytest.raises(ModelError, match="more than 1 value per channel"):
        Network(lambda: normed(4), toys.SHAPE, toys.CLASSES)
    net = Network(lambda: normed(2), toys.SHAPE, toys.CLASSES)
    assert float(net.features(net.fresh(0), toys.batch()[0]).detach().std()) > 0.5


def test_u119_with_a_tiny_bound_an_update_is_as_long_as_its_steps_allow():
    """Each of the steps moves by at most lr * C * rows / expected batch, whatever the gradients."""
    clip = 1e-4
    turn = play(f"dp-sgd:noise_multiplier=0,max_grad_norm={clip},sampling=shuffle", batch_size=4, local_epochs=2)[0]
    for client, rows in enumerate(toys.TRAIN):
        steps = -(-rows // 4)
        expected = max(1, rows // steps)
        longest = 2 * rows / expected * 0.1 * clip
        moved = float(norm(subtract({k: turn.ups[client][k] for k in turn.server}, turn.server)))
        assert 0 < moved <= longest * 1.01


@pytest.mark.parametrize("defense", ["clip:bound=1", "dp-fedavg:noise_multiplier=0,bound=1,sampling=fixed"])
def test_u121_who_does_not_train_moves_nothing_however_large_the_weights(defense: str):
    class Large(Network):
        def fresh(self, *key: int | str) -> Items:
            return {k: 10 * v for k, v in super().fresh(*key).items()}

    turn = play(defense, net=Large(toys.tiny_module, toys.SHAPE, toys.CLASSES), local_epochs=0)[0]
    assert float(norm(turn.server)) > 10
    assert toys.distance(turn.server, turn.next_server) < 1e-5


def test_u125_the_two_levels_have_epsilons_of_their_own():
    record, user = (
        play(f"{key}:noise_multiplier=1", 2, participation=0.5)[-1].metrics for key in ("dp-sgd", "dp-fedavg")
    )
    assert (record["epsilon_unit"], user["epsilon_unit"]) == ("record", "user")
    assert record["epsilon"] != user["epsilon"]
    both = ["dp-sgd:noise_multiplier=1", "dp-fedavg:noise_multiplier=1"]
    said = [privacy.describe(toys.setup("fedavg", defense=[one])) for one in both]
    assert [one["unit"] for one in said] == ["record", "user"]
    assert "single records" in said[0]["guarantee"]
    assert "whole clients" in said[1]["guarantee"]


def test_u126_the_more_noise_the_less_is_rebuilt():
    """dp-sgd around the work on one image, its gradient unclipped, and the exact attack on what is sent: means of 6 victims."""

    def rebuilt(sigma: float, first: int) -> float:
        made = victim(client=1, first=first)
        work = local_work(made.setup.net, made.record, made.x, made.y, made.setup.config.seed, driver=Training)
        dp = parse_defense(f"dp-sgd:noise_multiplier={sigma},max_grad_norm=100")
        guard = dp.guard(1, 1, sigma, "case", first)  # type: ignore[attr-defined]
        up = made.setup.algorithm.local(replace(work, guard=guard), made.state, made.record.down).up
        return min(100.0, made.psnr(attack("analytic", made.with_upload(up).capture()).x))

    means = [sum(rebuilt(sigma, first) for first in range(6)) / 6 for sigma in (0.0, 1e-5, 1e-4, 1e-3, 1e-2)]
    assert means[0] > 60
    assert means == sorted(means, reverse=True)
    assert means[0] > means[-1] + 40


@pytest.mark.parametrize("key", ["dp-sgd", "dp-fedavg"])
def test_u126_clipping_without_noise_is_called_clipping_and_no_guarantee(key: str):
    for sigma in (0, 1):
        made = toys.setup("fedavg", defense=[f"{key}:noise_multiplier={sigma}"])
        said = privacy.describe(made)
        assert (said["guarantee"] == CLIP_ONLY) == (sigma == 0)
        assert said["guarantee"].startswith("none" if sigma == 0 else "formal")
        words = {word for item, word in said["coverage"].items() if item != "num_samples"}
        assert words == {"clipped, without noise" if sigma == 0 else "covered"}
        assert math.isinf(toys.rounds(made, 1)[0].metrics["epsilon"]) == (sigma == 0)
