"""What each adversary is given: single uploads, what the next downlink shows another client, or the sum over a cohort."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pflsec import api
from pflsec.core.errors import NotApplicable
from pflsec.core.files import read_json
from pflsec.core.items import cast, floating, weighted_mean
from pflsec.core.knowledge import ThreatModel
from pflsec.core.tensors import read_items
from pflsec.leakage import vault
from pflsec.runtime import replay, views
from pflsec.wire.capture import Capture, Record
from pflsec.wire.store import CaptureStore
from tests import toys
from tests.attacks.victims import Victim, attack, victim

SECAGG = ThreatModel("server-secagg")
CLIENT = ThreatModel("client")


def together(victims: Sequence[Victim], threat: ThreatModel = SECAGG, **granted: Any) -> tuple[Capture, str]:
    """Return what an adversary is given of several exchanges."""
    by_id = {v.record.id: v for v in victims}

    def make(record: Record) -> Capture:
        return replace(by_id[record.id], record=record).capture(history=False, **granted)

    return views.seen(threat, [v.record for v in victims], None, make)


def cohort(key: str = "fedavg", clients: Sequence[int] = (0, 1, 2, 3), **options: Any) -> list[Victim]:
    return [victim(key, client=c, **options) for c in clients]


def union(victims: Sequence[Victim]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([getattr(v, name) for v in victims]) for name in ("x", "y")}


def psnr_in_union(victims: Sequence[Victim], x: torch.Tensor | None) -> list[float]:
    """Return each true image's PSNR to the reconstruction that is nearest to it."""
    assert x is not None
    found = []
    for v in victims:
        found.append(max(v.psnr(one[None]) for one in x))
    return found


# --- secure aggregation


def test_the_sum_over_one_client_is_what_the_server_sees():
    v = victim()
    cap, note = together([v])
    alone = v.capture(history=False)
    assert note == "the sum over client 3 alone"
    assert cap.record == alone.record
    assert toys.same(cap.target, alone.target)
    seen, found = (attack("idlg", c, iterations=5, restarts=1, rescue=0) for c in (alone, cap))
    assert seen.x is not None
    assert found.x is not None
    assert torch.equal(seen.x, found.x)


@pytest.mark.parametrize(
    ("key", "steps"), [("fedavg", 1), ("fedavg", 3), ("fedprox", 3), ("scaffold", 2), ("fedrep", 1)]
)
def test_the_replay_of_the_union_of_truths_gives_the_sum(key: str, steps: int):
    victims = cohort(key, clients=(1, 3), steps=steps, after=1, batch=2)
    cap, note = together(victims, labels=True, state=True)
    true = union(victims)
    assert note == "the sum over clients 1, 3"
    assert (cap.count, cap.record.steps) == (4, steps)
    assert cap.labels is not None
    assert torch.equal(cap.labels, true["y"])
    assert toys.distance(cap.replay(true["x"].double(), true["y"], cap.state or {}), cap.target) < 1e-5


def test_the_target_is_the_mean_gradient_of_the_union():
    victims = cohort(clients=(1, 3), batch=2)
    cap, _ = together(victims)
    alone = [v.capture().target for v in victims]
    assert toys.distance(weighted_mean(alone, [1, 1]), cap.target) < 1e-12


def test_no_single_upload_is_in_what_secure_aggregation_shows():
    victims = cohort()
    cap, _ = together(victims)
    mean = weighted_mean([cast(floating(v.record.up), torch.float64) for v in victims], [1] * 4)
    assert toys.distance(floating(cap.record.up), mean) < 1e-12
    for v in victims:
        assert toys.distance(cast(floating(v.record.up), torch.float64), floating(cap.record.up)) > 1e-6
        assert toys.distance(v.capture().target, cap.target) > 1e-2
    assert int(cap.record.up["num_samples"]) == 4
    assert (cap.record.memory, cap.record.shown) == ({}, {})


def test_the_sum_is_all_that_matters():
    """Uploads that are exchanged for others with the same sum leave the target as it was."""
    victims = cohort(clients=(1, 3))
    push = {
        k: torch.randn(v.shape, generator=torch.Generator().manual_seed(5))
        for k, v in floating(victims[0].record.up).items()
    }
    moved = [
        v.with_upload(v.record.up | {k: v.record.up[k].double() + sign * push[k].double() for k in push})
        for v, sign in zip(victims, (1, -1), strict=True)
    ]
    assert toys.distance(together(moved)[0].target, together(victims)[0].target) < 1e-6


def test_a_cohort_of_four_is_harder_than_one_client():
    settings: dict[str, Any] = {"iterations": 20, "restarts": 2, "rescue": 0}
    victims = cohort()
    alone = [v.psnr(attack("dlg", v.capture(history=False), **settings).x) for v in victims]
    summed = psnr_in_union(victims, attack("dlg", together(victims)[0], **settings).x)
    assert sorted(alone)[1] >= 40
    assert sum(summed) / 4 < sum(alone) / 4 - 10


def test_private_items_of_several_clients_keep_apart():
    victims = cohort("fedrep", clients=(1, 3), after=1)
    cap, _ = together(victims, state=True)
    assert cap.known is None
    names = {f"c{v.record.client}.{k}" for v in victims for k in v.state}
    assert set(cap.state or {}) == names == set(cap.newcomer(torch.Generator().manual_seed(0)))
    assert attack("inverting-gradients", cap, iterations=1).hidden == "joint"


def test_the_adversary_of_a_sum_has_the_model_with_which_all_begin():
    victims = cohort(clients=(1, 3))
    cap, _ = together(victims)
    assert toys.distance(cap.began({}), cast(victims[0].record.down, torch.float64)) == 0
    apart, _ = together(cohort("fedamp", clients=(1, 3), after=1), state=True)
    with pytest.raises(NotApplicable, match="do not begin at one model"):
        apart.began(apart.state or {})


@pytest.mark.parametrize(
    ("key", "says"),
    [("fedproto", "a set, of which secure aggregation makes no sum"), ("fedfomo", "no function of their sum")],
)
def test_uploads_that_have_no_sum_are_not_attacked(key: str, says: str):
    with pytest.raises(NotApplicable, match=says) as refusal:
        together(cohort(key, clients=(1, 3), after=2))
    assert "\n" not in str(refusal.value)


def test_a_sum_of_too_many_steps_is_not_unrolled():
    with pytest.raises(NotApplicable, match="over 2 clients with 52 local steps in all; unrolling stops at 50"):
        together(cohort(clients=(1, 3), steps=26))


def test_real_uploads_are_attacked_only_with_the_whole_cohort():
    victims = [replace(v, record=replace(v.record, kind="update")) for v in cohort(clients=(1, 3))]
    with pytest.raises(NotApplicable, match="did not record who took part"):
        together(victims)
    told = [replace(v, record=replace(v.record, facts={"cohort": [1, 2, 3]})) for v in victims]
    with pytest.raises(NotApplicable, match="the sum is over 3 clients, of which client 2 is not among"):
        together(told)
    whole = [replace(v, record=replace(v.record, facts={"cohort": [1, 3]})) for v in victims]
    assert together(whole)[0].count == 2


# --- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def trained(folder: Path, algo: str = "fedavg", **options: Any) -> api.Run:
    common: dict[str, Any] = {
        "dataset": toys.dataset(), "partition": "natural", "test": "given", "model": "mlp", "rounds": 2, "lr": 0.1,
        "batch_size": 8, "capture_rounds": "first", "capture_clients": "0,1,2,3", "victims": 1, "runs_dir": folder,
    }  # fmt: skip
    return api.train(algo=algo, **(common | options))


def attacked(run: api.Run, name: str = "idlg", **options: Any) -> api.Scores:
    common = {"iterations": 5, "restarts": 1, "lpips": "none", "settings": {"rescue": 0}, "controls": False}
    scores = api.attack(run, name, **(common | options))
    assert isinstance(scores, api.Scores)
    return scores


@pytest.fixture(scope="module")
def averaging(folder: Path) -> api.Run:
    return trained(folder, kind="both", name="averaging")


@pytest.fixture(scope="module")
def forwarding(folder: Path) -> api.Run:
    return trained(folder, "fedfomo", kind="both", name="forwarding")


@pytest.fixture(scope="module")
def sharing(folder: Path) -> api.Run:
    return trained(folder, "apple", name="sharing", capture_rounds="0,1", settings={"p_pace": 0.0})


def test_every_row_of_a_sum_says_so_and_holds_its_own_images(averaging: api.Run):
    scores = attacked(averaging, adversary="server-secagg")
    table = scores.table
    assert list(table["client"]) == [0, 1, 2, 3]
    assert set(table["reason"]) == {"the sum over clients 0, 1, 2, 3"}
    assert set(table["batch"]) == {1}
    assert table["psnr"].notna().all()
    assert table["objective"].nunique() == 1
    pictures = read_items(scores.path / "reconstructions.safetensors", "pictures")
    spec = api.AttackSession(api.RunFolder(averaging.path), api.AttackConfig(lpips="none")).opened.spec
    for row in table.to_dict("records"):
        name = f"r000-c0{row['client']}-v0-probe"
        truth = vault.Vault(averaging.path / "vault").truth(name)
        assert row["dataset_index"] == str(int(truth.dataset_index))
        mse = float((spec.pixels(truth.x.double()) - pictures[name].double()).square().mean())
        assert mse == pytest.approx(row["mse"], rel=1e-2, abs=1e-9)


def test_selected_clients_are_the_cohort_of_probes(averaging: api.Run):
    table = attacked(averaging, adversary="server-secagg", clients=[1, 3]).table
    assert set(table["reason"]) == {"the sum over clients 1, 3"}
    server, alone = (attacked(averaging, adversary=who, clients=[2]).table for who in ("server", "server-secagg"))
    assert list(alone["reason"]) == ["the sum over client 2 alone"]
    assert float(server["objective"][0]) == float(alone["objective"][0])
    assert float(server["psnr"][0]) == float(alone["psnr"][0])


def test_labels_of_a_sum_are_granted_for_its_union(averaging: api.Run):
    table = attacked(averaging, adversary="server-secagg", knowledge="wire+labels").table
    assert set(table["labels"]) == {"known"}
    assert attacked(averaging, adversary="server-secagg", knowledge="oracle").table["status"].ne("not-applicable").all()


def test_granted_class_counts_are_used_and_named(averaging: api.Run):
    table = attacked(averaging, "dlg", knowledge="wire+label_hist").table
    assert set(table["labels"]) == {"counts"}
    assert (table["label_correct"] == 1).all()
    assert set(attacked(averaging, "dlg").table["labels"]) == {"optimise"}


def test_without_the_vault_a_sum_is_attacked_and_not_scored(folder: Path):
    run = trained(folder, name="blind", rounds=1, capture_clients="1,3")
    for file in run.path.joinpath("vault").iterdir():
        file.unlink()
    table = attacked(run, adversary="server-secagg").table
    assert set(table["reason"]) == {"the sum over clients 1, 3; not scored: the run has no vault"}
    assert table["psnr"].isna().all()


@pytest.mark.parametrize("kind", ["probe", "update"])
def test_where_models_are_forwarded_a_client_finds_what_the_server_finds(forwarding: api.Run, kind: str):
    """In round 0 nobody has received anything: the scores alone are the server's."""
    store = CaptureStore(forwarding.path / "captures")
    record = store.read(f"r000-c03-v0-{kind}")
    assert record.facts["shown"] == {"how": "forwarded", "to": 0}
    assert set(record.up) - set(record.shown) == {"scores"}
    assert toys.same({k: record.up[k] for k in record.shown}, record.shown)
    search = {"iterations": 20, "restarts": 2} if kind == "probe" else {}
    options: dict[str, Any] = {"clients": [3], "kind": kind, **search}
    table = attacked(forwarding, "dlg", adversary="client", **options).table
    assert list(table["reason"]) == ["client 0 receives this upload in its next downlink"]
    if kind == "probe":
        assert float(table["psnr"][0]) >= 40
        assert float(attacked(forwarding, "dlg", **options).table["psnr"][0]) >= 40


def test_a_client_and_the_server_match_the_same_gradient_of_a_forwarded_model(forwarding: api.Run):
    config, spec = api.attacking.training_config(api.RunFolder(forwarding.path))
    net, algorithm = api.attacking.rebuild(config, spec)
    record = CaptureStore(forwarding.path / "captures").read("r000-c03-v0-probe")

    def make(what: Record) -> Capture:
        return replay.capture(algorithm, net, what, history=False, seed=0)

    cap, _ = views.seen(CLIENT, [record], None, make)
    server = make(record).target
    assert "scores" not in cap.record.up
    assert toys.same(cap.target, {k: v for k, v in server.items() if k != "scores"})
    truth = vault.Vault(forwarding.path / "vault").truth(record.id)
    assert toys.distance(cap.replay(truth.x.double(), truth.y, truth.state), cap.target) < 1e-4


def test_where_nothing_else_is_sent_the_two_find_the_same_bits(sharing: api.Run):
    pictures = [
        read_items(attacked(sharing, adversary=who, rounds=[0]).path / "reconstructions.safetensors", "pictures")
        for who in ("client", "server")
    ]
    assert len(pictures[0]) == 4
    assert toys.same(*pictures)


def test_history_is_no_clients_knowledge(sharing: api.Run):
    for knowledge, hidden in (("wire", "joint"), ("wire+history", "log")):
        table = attacked(
            sharing, "ig", adversary="client", knowledge=knowledge, rounds=[1], clients=[3], iterations=1, settings={}
        ).table
        assert table["reason"][0].startswith("client 0 receives")
        assert table["hidden"][0] == hidden


def test_a_probe_of_an_averaging_method_shows_another_client_nothing(averaging: api.Run):
    table = attacked(averaging, adversary="client").table
    assert set(table["status"]) == {"not-applicable"}
    assert all("a probe has no cohort" in reason and "--kind update" in reason for reason in table["reason"])


def test_the_global_model_shows_another_client_the_cohort_without_itself(averaging: api.Run):
    table = attacked(averaging, adversary="client", kind="update").table.set_index("client")
    assert table.loc[0, "status"] == "not-applicable"
    assert "its own upload no secret" in str(table.loc[0, "reason"])
    assert set(table.loc[[1, 2, 3], "reason"]) == {"client 0 sees the sum over clients 1, 2, 3"}
    assert table.loc[[1, 2, 3], "psnr"].notna().all()


def test_what_is_left_of_the_global_model_is_the_mean_of_the_others_and_no_single_upload(averaging: api.Run):
    store, config = (
        CaptureStore(averaging.path / "captures"),
        api.attacking.training_config(api.RunFolder(averaging.path)),
    )
    net, algorithm = api.attacking.rebuild(*config)
    records = {c: store.read(f"r000-c0{c}-v0-update") for c in range(4)}
    others = [records[c] for c in (1, 2, 3)]
    cap, _ = views.seen(
        CLIENT, others, records[0], lambda what: replay.capture(algorithm, net, what, history=False, seed=0)
    )
    ups, sizes = [cast(floating(r.up), torch.float64) for r in others], toys.TRAIN[1:]
    assert toys.distance(cap.record.up, weighted_mean(ups, sizes)) < 1e-6
    for up in ups:
        assert toys.distance(up, cap.record.up) > 1e-4
    truths = [vault.Vault(averaging.path / "vault").truth(r.id) for r in others]
    x, y = torch.cat([t.x for t in truths]).double(), torch.cat([t.y for t in truths])
    assert toys.distance(cap.replay(x, y, {}), cap.target) < 1e-3


def test_all_of_the_cohort_must_be_captured(averaging: api.Run, folder: Path):
    table = attacked(averaging, adversary="client", kind="update", clients=[1, 3]).table
    assert set(table["client"]) == {1, 3}
    assert all("of which client 2 is not among those attacked" in reason for reason in table["reason"])
    some = trained(folder, kind="update", capture_clients="1,2,3", rounds=1)
    table = attacked(some, adversary="client", kind="update").table
    assert set(table["client"]) == {1, 2, 3}
    assert all("of which client 0 is not among those attacked" in reason for reason in table["reason"])


@pytest.mark.parametrize(
    ("algo", "kind", "says"),
    [
        ("scaffold", "update", "is not in the next downlink"),
        ("fedproto", "update", "which are not alike"),
        ("fedpcl", "probe", "stands in no other client's next downlink"),
        ("fedamp", "update", "does not know what the others received"),
        ("fedper", "probe", "a probe has no cohort"),
    ],
)
def test_where_another_client_sees_no_upload_the_row_says_why(folder: Path, algo: str, kind: str, says: str):
    table = attacked(trained(folder, algo, kind=kind, rounds=1), adversary="client", kind=kind).table
    assert set(table["status"]) == {"not-applicable"}
    assert all(reason.startswith("another client does not see this upload") for reason in table["reason"])
    assert any(says in reason for reason in table["reason"]), list(table["reason"])


def test_runs_of_before_are_told_to_train_again(sharing: api.Run, tmp_path: Path):
    v = victim()
    with pytest.raises(NotApplicable, match="did not record what other clients see"):
        together([v], CLIENT)


def test_what_others_see_is_stored_beside_and_changes_nothing_else(averaging: api.Run, forwarding: api.Run):
    for run in (averaging, forwarding):
        for path in sorted((run.path / "captures").glob("*.json")):
            header = read_json(path, "header")
            assert set(header["facts"]) <= {"shown", "cohort"}
            assert set(header["messages"]) <= {"down", "up", "memory", "shown"}


def test_granted_uploads_make_any_adversary_see_what_the_server_sees(averaging: api.Run):
    usual = attacked(averaging).table["objective"]
    for who in ("client", "server-secagg"):
        assert attacked(averaging, adversary=who, knowledge="wire+uplink").table["objective"].equals(usual)
