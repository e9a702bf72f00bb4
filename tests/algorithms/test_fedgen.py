"""FedGen. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.fedgen import FedGen, alike
from pflsec.attacks.problem import Problem
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, prefixed, select, without_prefix
from pflsec.core.streams import stream
from pflsec.runtime.replay import capture
from pflsec.training.local import LocalWork, Unrolled
from tests import toys
from tests.contracts.cases import Case, exchange
from tests.contracts.test_every_method import _with, probe

SMALL: dict[str, Any] = {"hidden": 6, "noise_dim": 4, "generated": 8, "generator_lr": 0.01}


def small(**changes: Any) -> dict[str, Any]:
    """Return the settings of a small generator, with changes."""
    return SMALL | changes


PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
PRIOR = torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64)


def parameters(items: Items) -> Items:
    """Return the items of the network alone."""
    return select(items, "body", "head")


def downlink(algorithm: Any, prior: Tensor = PRIOR) -> Items:
    """Return a downlink whose generator has running moments unlike those of a new one."""
    down = algorithm.downlink(algorithm.init_server(toys.tiny().fresh(0)), 0)
    rng = torch.Generator().manual_seed(1)
    moments = {f"generator.{k}": torch.rand(6, generator=rng) + 0.5 for k in ("mean", "var", "scale")}
    return down | moments | {"label_prior": prior}


def hand_features(g: Items, eps: Tensor, y: Tensor) -> Tensor:
    """Return what a generator in use makes of noise and labels: its running moments normalise."""
    h = torch.cat([eps, F.one_hot(y, toys.CLASSES)], 1) @ g["in"].T
    h = (h - g["mean"]) / torch.sqrt(g["var"] + 1e-5) * g["scale"] + g["shift"]
    return h.clamp(min=0) @ g["out"].T + g["bias"]


def hand_head(head: Mapping[str, Tensor], z: Tensor) -> Tensor:
    """Return the logits of features."""
    return z @ head["head.weight"].T + head["head.bias"]


def generated_loss(work: LocalWork, down: Items, alpha: float) -> toys.Loss:
    """Return CE(x, y) + alpha CE(h(G(y', e)), y') at the labels and the noise that the first step of a client draws."""
    rng = work.rng("penalty.main")
    y = torch.multinomial(down["label_prior"], SMALL["generated"], replacement=True, generator=rng)
    z = hand_features(without_prefix("generator", down), torch.rand(len(y), SMALL["noise_dim"], generator=rng), y)

    def loss(model: Mapping[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
        logits = hand_head(model, z)
        made = (logits.logsumexp(1) - logits.gather(1, y[:, None]).squeeze(1)).mean()
        return toys.hand_loss(model, x, labels) + alpha * made

    return loss


def check_1_without_the_generated_loss_it_is_fedavg(kind: type[Algorithm]) -> None:
    ours = toys.play(kind, 4, settings=small(alpha=0.0), **PARTIAL)
    for turn, other in zip(ours, toys.play(FedAvg, 4, **PARTIAL), strict=True):
        assert all(toys.same(parameters(up), parameters(other.ups[client])) for client, up in turn.ups.items())
        assert toys.same(parameters(turn.next_server), other.next_server)


def check_2_the_first_round_is_fedavgs(kind: type[Algorithm]) -> None:
    """The generator has not learnt anything: its loss is left out until a label prior is there."""
    turn, other = toys.play(kind, 1, settings=SMALL)[0], toys.play(FedAvg, 1)[0]
    assert all(toys.same(parameters(up), parameters(other.ups[client])) for client, up in turn.ups.items())
    assert not turn.downs[0]["label_prior"].any()
    late = toys.play(kind, 3, settings=SMALL, drop_rate=1.0)[-1]
    assert not late.server["label_prior"].any()
    idle = toys.play(kind, 3, settings=small(generator_steps=0))[-1]
    for client in range(4):
        plain = toys.context(toys.setup(kind), 2, client)
        assert toys.same(parameters(idle.ups[client]), plain.fit(parameters(idle.downs[client]), on=plain.ce))


def check_2_later_one_step_moves_the_head_alone_otherwise(kind: type[Algorithm]) -> None:
    """The generated features do not come from the body: its upload is FedAvg's from the same model, bit for bit."""
    made = toys.setup(kind, settings=SMALL, local_epochs=1, batch_size=100)
    for turn in toys.rounds(made)[1:]:
        for client, up in turn.ups.items():
            plain = toys.context(made, turn.t, client)
            reference = plain.fit(parameters(turn.downs[client]), on=plain.ce)
            assert toys.same(select(up, "body"), select(reference, "body"))
            assert toys.distance(select(up, "head"), select(reference, "head")) > 1e-4


def check_2_one_step_follows_the_objective(kind: type[Algorithm]) -> None:
    """CE + alpha CE on features that the generator makes of labels drawn from the prior, in use: row by row."""
    for alpha in (1.0, 3.0):
        algorithm = toys.method(kind, **small(alpha=alpha))
        down, (x, y) = downlink(algorithm), toys.batch()
        work = toys.work(x, y, algorithm.net)
        up = parameters(algorithm.local(work, {}, down).up)
        model = parameters(down)
        expected = toys.hand_step(model, toys.hand_gradient(model, x, y, generated_loss(work, down, alpha)), 0.1)
        assert toys.distance(up, expected) < 1e-14


def check_3_clients_leave_the_generator_and_the_server_the_heads(kind: type[Algorithm]) -> None:
    algorithm = toys.method(kind, **SMALL)
    server = algorithm.init_server(toys.tiny().fresh(0)) | downlink(algorithm)
    before = toys.snapshot(server)
    ups = {c: algorithm.local(toys.work(*toys.batch(seed=c), algorithm.net), {}, server).up for c in range(3)}
    assert toys.same(server, before)
    sent = {c: toys.snapshot(up) for c, up in ups.items()}
    after = algorithm.aggregate(server, ups)
    assert all(toys.same(up, sent[c]) for c, up in ups.items())
    assert toys.same(server, before)
    generator = without_prefix("generator", after)
    assert all(not torch.equal(v, server[f"generator.{k}"]) for k, v in generator.items())


def check_4_label_counts_are_the_histogram_of_the_rows_used(kind: type[Algorithm]) -> None:
    """Two epochs see every row twice. The prior is the histogram of those who arrived; unseen labels have none."""
    for turn in toys.play(kind, 5, settings=SMALL, participation=0.5, seed=3):
        total = torch.zeros(toys.CLASSES)
        for client, up in turn.ups.items():
            labels = torch.tensor([toys.HELD[client][i % len(toys.HELD[client])] for i in range(toys.TRAIN[client])])
            histogram = torch.bincount(labels, minlength=toys.CLASSES)
            assert up["label_counts"].tolist() == (2 * histogram).tolist()
            assert up["label_counts"].sum() == 2 * toys.TRAIN[client]
            total += histogram
        prior = turn.next_server["label_prior"]
        assert torch.allclose(prior, total / total.sum())
        assert prior.sum().item() == pytest.approx(1)
        assert torch.equal(prior == 0, total == 0)


def check_5_the_generator_learns_to_satisfy_the_uploaded_heads(kind: type[Algorithm]) -> None:
    """On fixed labels and noise, the cross entropy of the heads' mean logits falls with the steps, in use."""
    turn = toys.play(kind, 2, settings=SMALL)[-1]
    y = torch.arange(60) % toys.CLASSES
    eps = torch.rand(60, SMALL["noise_dim"], generator=torch.Generator().manual_seed(0))
    losses = []
    for steps in (0, 20, 80, 300):
        algorithm = toys.method(kind, **small(generator_steps=steps))
        generator = without_prefix("generator", algorithm.aggregate(turn.server, turn.ups))
        z = hand_features(generator, eps, y)
        losses.append(F.cross_entropy(torch.stack([hand_head(up, z) for up in turn.ups.values()]).mean(0), y).item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.7 * losses[0]


def check_5_a_step_is_adams_on_the_ensembles_loss(kind: type[Algorithm]) -> None:
    """Held against torch's own Adam, linear layers and BatchNorm1d, over several steps and two rounds."""
    settings = small(generator_steps=7, generator_decay=0.1)
    turns = toys.play(kind, 3, settings=settings)
    g = without_prefix("generator", turns[0].server)
    net = nn.Sequential(nn.Linear(7, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))
    with torch.no_grad():
        for name, value in zip(("in", "scale", "shift", "out", "bias"), net.parameters(), strict=True):
            value.copy_(g[name])
    adam = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.1)
    for turn in turns:
        rng = stream("fedgen", int(turn.server["seed"]), turn.t + 1)
        for _ in range(7):
            y = torch.multinomial(turn.next_server["label_prior"], 8, replacement=True, generator=rng)
            eps = torch.rand(8, 4, generator=rng)
            z = net(torch.cat([eps, F.one_hot(y, toys.CLASSES).double()], 1))
            adam.zero_grad()
            F.cross_entropy(torch.stack([hand_head(up, z) for up in turn.ups.values()]).mean(0), y).backward()
            adam.step()
        found = without_prefix("generator", turn.next_server)
        assert toys.distance(
            {k: found[k] for k in ("in", "scale", "shift", "out", "bias")},
            dict(zip(("in", "scale", "shift", "out", "bias"), net.parameters(), strict=True)),
        ) < 1e-10  # fmt: skip
        buffers = dict(net[1].named_buffers())
        assert torch.allclose(found["mean"], buffers["running_mean"], atol=1e-12)
        assert torch.allclose(found["var"], buffers["running_var"], atol=1e-12)


def check_6_with_the_head_alone_no_body_is_sent(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings=small(head_only=True))
    for turn in toys.rounds(made):
        for message in (turn.server, turn.next_server, *turn.downs.values(), *turn.ups.values()):
            assert not select(message, "body")
            assert select(message, "head")
        bodies = list(turn.next_states.values())
        assert not any(toys.same(bodies[i], bodies[j]) for i in range(4) for j in range(i))
        for client in range(4):
            down = made.algorithm.downlink(turn.next_server, client)
            deployed = made.algorithm.deploy(turn.next_states[client], down)
            assert toys.same(select(deployed, "head"), select(turn.next_server, "head"))
            assert toys.same(select(deployed, "body"), turn.next_states[client])


def test_fedgen_1_without_the_generated_loss_it_is_fedavg():
    check_1_without_the_generated_loss_it_is_fedavg(FedGen)


def test_fedgen_2_the_first_round_is_fedavgs():
    check_2_the_first_round_is_fedavgs(FedGen)


def test_fedgen_2_later_one_step_moves_the_head_alone_otherwise():
    check_2_later_one_step_moves_the_head_alone_otherwise(FedGen)


def test_fedgen_2_one_step_follows_the_objective():
    check_2_one_step_follows_the_objective(FedGen)


def test_fedgen_3_clients_leave_the_generator_and_the_server_the_heads():
    check_3_clients_leave_the_generator_and_the_server_the_heads(FedGen)


def test_fedgen_4_label_counts_are_the_histogram_of_the_rows_used():
    check_4_label_counts_are_the_histogram_of_the_rows_used(FedGen)


def test_fedgen_5_the_generator_learns_to_satisfy_the_uploaded_heads():
    check_5_the_generator_learns_to_satisfy_the_uploaded_heads(FedGen)


def test_fedgen_5_a_step_is_adams_on_the_ensembles_loss():
    check_5_a_step_is_adams_on_the_ensembles_loss(FedGen)


def test_fedgen_6_with_the_head_alone_no_body_is_sent():
    check_6_with_the_head_alone_no_body_is_sent(FedGen)


def test_labels_for_generated_features_follow_the_prior():
    """Label 1 has probability 0: the head's row of that class is only pushed down by the softmax, never up by a label."""
    algorithm = toys.method(FedGen, **small(alpha=1e3, generated=64))
    down, (x, y) = downlink(algorithm), toys.batch()
    up = algorithm.local(toys.work(x, y, algorithm.net, lr=1e-3), {}, down).up
    pushed = up["head.bias"] - down["head.bias"]
    assert pushed[1] < 0
    assert pushed[[0, 2]].sum().item() == pytest.approx(-pushed[1].item())


def test_losses_are_weighted_by_who_saw_the_label():
    """Two heads, label 0 seen 3 times by the first and once by the second: 3/4 and 1/4 of their losses."""
    algorithm: Any = toys.method(FedGen, **small(ensemble="losses"))
    heads = [select(toys.tiny().fresh(i), "head") for i in range(2)]
    z, y = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 2, 1])
    counts = torch.tensor([[3.0, 0.0, 2.0], [1.0, 5.0, 2.0]])
    each = torch.stack([F.cross_entropy(hand_head(head, z), y, reduction="none") for head in heads])
    share = torch.tensor([[0.75, 0.5, 0.5, 0.0], [0.25, 0.5, 0.5, 1.0]])
    assert algorithm.ensemble_loss(z, y, heads, counts).item() == pytest.approx((share * each).sum(0).mean().item())


def test_diversity_is_one_for_equal_features_and_falls_with_their_distance():
    """Two features at distance 1 in each coordinate, noises at 2 in each: mean over the four pairs of 1 * 4, half zero."""
    z, eps = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0], [2.0]])
    assert alike(torch.zeros(2, 2), eps).item() == 1
    assert alike(z, eps).item() == pytest.approx(torch.tensor(-2.0).exp().item())


def test_the_generated_loss_fades_with_the_rounds():
    """alpha * decay^t, with a floor that alpha = 0 does not know."""
    (x, y), heads = toys.batch(), []
    for decay, t in ((1.0, 3), (0.5, 3), (0.5, 0), (0.0, 9)):
        algorithm = toys.method(FedGen, **small(alpha=2.0, decay=decay))
        down = downlink(algorithm)
        work = toys.work(x, y, algorithm.net, round=t)
        up = parameters(algorithm.local(work, {}, down).up)
        weight = 2.0 * max(decay**t, 1e-5)
        gradient = toys.hand_gradient(parameters(down), x, y, generated_loss(work, down, weight))
        assert toys.distance(up, toys.hand_step(parameters(down), gradient, 0.1)) < 1e-14
        heads.append(up["head.bias"])
    assert not torch.equal(heads[0], heads[1])


def taught_loss(work: LocalWork, down: Items, beta: float, teacher: Items) -> toys.Loss:
    """Return CE + beta KL(softmax h(G(y, e)) of the teacher's head || softmax h(r(x))) for one batch, alpha being 0."""
    eps = torch.rand(len(work.y), SMALL["noise_dim"], generator=work.rng("generated"))
    z = hand_features(without_prefix("generator", down), eps, work.y)
    target = hand_head(teacher, z).softmax(1).detach()

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        own = hand_head(model, toys.hand_features(model, x)).log_softmax(1)
        return toys.hand_loss(model, x, y) + beta * (target * (target.log() - own)).sum(1).mean()

    return loss


def test_the_distance_to_taught_predictions_leaves_the_teacher_alone():
    """Predictions on generated features are targets: the step's gradient does not pass through them."""
    algorithm = toys.method(FedGen, **small(alpha=0.0, beta=2.0))
    down, (x, y) = downlink(algorithm), toys.batch()
    for driver in (None, Unrolled()):
        work = toys.work(x, y, algorithm.net, **({"driver": driver} if driver else {}))
        up = parameters(algorithm.local(work, {}, down).up)
        model = parameters(down)
        expected = toys.hand_step(model, toys.hand_gradient(model, x, y, taught_loss(work, down, 2.0, model)), 0.1)
        assert toys.distance(up, expected) < 1e-14


def test_an_upload_is_differentiable_through_taught_predictions():
    """In the second step the teacher is a function of the data. Its derivative is measured by differences."""
    algorithm = toys.method(FedGen, **small(alpha=1.0, beta=5.0))
    down, (x, y) = downlink(algorithm), toys.batch()

    def sent(data: Tensor) -> Tensor:
        work = toys.work(data, y, algorithm.net, epochs=3, driver=Unrolled())
        return algorithm.local(work, {}, down).up["head.bias"][0]

    point = x.clone().requires_grad_()
    slope = torch.autograd.grad(sent(point), point)[0].sum().item()
    measured = (sent(x + 1e-5) - sent(x - 1e-5)).item() / 2e-5
    assert slope == pytest.approx(measured, rel=1e-6)


def test_the_server_of_the_authors_smooths_the_counts():
    """One is added to every count of every client: no label has probability 0."""
    settings = {k: v for k, v in FedGen.presets["authors"].items() if k in FedGen.Config.model_fields}
    turn = toys.play(FedGen, 1, settings=settings | SMALL, data=toys.dataset([4, 4], held=[(0, 1), (0,)]))[0]
    assert turn.next_server["label_prior"].tolist() == pytest.approx([14 / 22, 6 / 22, 2 / 22])


def test_clients_that_make_no_step_send_no_counts():
    turn = toys.play(FedGen, 2, settings=SMALL, local_epochs=0)[-1]
    assert all(not up["label_counts"].any() for up in turn.ups.values())
    generator = [prefixed("g", select(items, "generator", "adam")) for items in (turn.server, turn.next_server)]
    assert toys.same(*generator)


@pytest.mark.parametrize(("size", "steps"), [(1, 1), (4, 3)])
def test_an_attacker_reads_the_labels_off_the_wire(size: int, steps: int):
    """The histogram of the batch, however many steps it went through; and nothing of it is left to be matched."""
    ex = exchange(Case("fedgen"))
    record, _, y, up = probe(ex, size, steps)
    cap = capture(ex.setup.algorithm, ex.setup.net, _with(record, up=up), history=True, seed=0)
    problem = Problem(cap, "restore", "auto", torch.Generator().manual_seed(0), torch.float64)
    assert problem.labels == "wire"
    assert problem.y is not None
    assert problem.y.tolist() == y.sort().values.tolist()
    assert cap.target.keys() | set(cap.by_chance) == set(toys.tiny().shapes)


def test_with_the_head_alone_the_body_is_what_an_attacker_misses():
    ex = exchange(Case("fedgen", (("head_only", True),)))
    record, _, _, up = probe(ex, 1, 1)
    cap = capture(ex.setup.algorithm, ex.setup.net, _with(record, up=up), history=True, seed=0)
    problem = Problem(cap, "restore", "auto", torch.Generator().manual_seed(0), torch.float64)
    assert problem.hidden == "joint"
    assert problem.secret == {"body.fc1.weight", "body.fc1.bias"}
    assert cap.target.keys() == {"head.weight", "head.bias"}
