"""Audits that are run: honest to a copied method, to faulty ones, and to an interruption."""

import json
from pathlib import Path
from typing import Any

import pytest

from pflsec.audit import folder, plan
from pflsec.audit.folder import Audit, check
from pflsec.core.errors import RunError
from pflsec.core.files import locked, read_json
from pflsec.reports import figures
from pflsec.reports.load import load_run
from pflsec.sweep.plan import price
from pflsec.sweep.work import How
from tests.audit.methods import COUPLED, FAST, FEDAVG, LATE, RAW, SMALL, UNDECLARED, write

DP = "dp-sgd:noise_multiplier=1"


def without_control_and_pictures(patch: pytest.MonkeyPatch) -> None:
    """Pictures take longer than all the rest."""
    patch.setattr(plan, "CONTROL", "no such method")
    patch.setattr(figures, "write_gallery", lambda path, attack: None)
    patch.setattr(folder, "write_page", lambda paths, out, verdict: None)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_control_and_pictures(monkeypatch)


def audit(tmp_path: Path, method: str, run: bool = True, **options: Any) -> Audit:
    """Return a small audit against FedAvg with one fast attack."""
    common: dict[str, Any] = {"against": ["fedavg"], "attacks": ["ig"], "training": SMALL, "attacking": FAST}
    made = Audit.create(tmp_path / "audits", "a", plan.make(method, **(common | options)))
    if run:
        made.run()
    return made


def states(made: Audit) -> dict[str, str]:
    cells = read_json(made.path / "audit.json", "audit")["cells"]
    return {name: cell["state"] for name, cell in cells.items()}


def scores(path: Path) -> list[dict[str, Any]]:
    """Return a run's scores without what may differ between equal runs."""
    table = load_run(path).attacks[0].scores.drop(columns=["run", "family", "seconds"])
    return json.loads(table.to_json(orient="records"))


def captured(path: Path) -> dict[str, Any]:
    """Return the hashes of all messages that a run captured, by capture."""
    return {p.stem: json.loads(p.read_text())["messages"] for p in (path / "captures").glob("*.json")}


def test_a_byte_for_byte_copy_is_not_distinguished_from_its_original(tmp_path: Path):
    made = audit(tmp_path, write(tmp_path / "copy.py"))
    assert states(made) == {"fedavg-file-none-s0": "done", "fedavg-none-s0": "done"}
    copy, original = (made.path / "runs" / name for name in states(made))
    assert captured(copy) == captured(original)
    assert len(captured(copy)) == 6
    assert scores(copy) == scores(original)
    comparison = read_json(made.path / "audit.json", "audit")["verdict"]["comparisons"][0]
    assert comparison["accuracy"]["difference"] == 0
    assert comparison["words"][1].startswith("leaks exactly as much as fedavg under inverting-gradients")
    assert "leaks exactly as much" in (made.path / "verdict.md").read_text()
    assert made.path.stat().st_mode & 0o777 == 0o700


def test_real_updates_are_captured_and_attacked_by_whom_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pages: list[Any] = []
    monkeypatch.setattr(folder, "write_page", lambda paths, out, verdict: pages.append(dict(verdict)))
    who = {"kind": "update", "adversary": "eavesdropper", "knowledge": "wire+hyper,labels"}
    made = audit(tmp_path, "fedprox", training=SMALL | {"kind": "update"}, attacking=FAST | who)
    assert set(states(made).values()) == {"done"}
    for name in states(made):
        row = scores(made.path / "runs" / name)[0]
        assert (row["kind"], row["adversary"], row["knowledge"]) == ("update", "eavesdropper", "wire+hyper,labels")
    assert any("eavesdropper" in sentence for sentence in pages[0]["Threat model"])
    assert pages[0]["Verdict"][0].startswith("fedprox against fedavg")


def test_an_undeclared_item_fails_by_its_name_and_the_rest_goes_on(tmp_path: Path):
    made = audit(tmp_path, write(tmp_path / "mine.py", UNDECLARED))
    assert states(made) == {"fedavg-file-none-s0": "failed", "fedavg-none-s0": "done"}
    assert made.record["state"] == "failed"
    assert "sent the item 'secret'" in made.record["verdict"]["failed"]["fedavg-file-none-s0"]
    assert "sent the item 'secret'" in (made.path / "verdict.md").read_text()


@pytest.mark.parametrize(
    ("body", "said"),
    [(COUPLED, "must not depend on the others in its batch"), (RAW, "ctx.x is no part of what a method may use")],
    ids=["coupled", "raw"],
)
def test_what_goes_round_the_noise_is_refused_where_there_is_noise(tmp_path: Path, body: str, said: str):
    """Without a defense both are methods like any other."""
    made = audit(tmp_path, write(tmp_path / "mine.py", body), against=[], defenses=["none", DP])
    plain, defended = states(made)
    assert states(made) == {plain: "done", defended: "refused"}
    assert said in made.record["verdict"]["refused"][defended]
    assert made.record["state"] == "done"


def test_a_defended_method_is_compared_with_itself(tmp_path: Path):
    made = audit(tmp_path, "fedavg", against=[], defenses=["none", DP])
    assert set(states(made).values()) == {"done"}
    found = made.record["verdict"]
    assert found["defended"][0]["words"][0].startswith(f"fedavg under {DP} against fedavg undefended: mean personal")
    assert "guarantee formal" in found["privacy"][0]["words"]


def test_a_method_that_raises_late_keeps_what_it_has(tmp_path: Path):
    made = audit(tmp_path, write(tmp_path / "mine.py", LATE))
    name = "fedavg-file-none-s0"
    assert states(made)[name] == "failed"
    assert "round 1, client 0" in made.state(made.plan.cells()[0])["reason"]
    assert "ValueError: no more" in made.state(made.plan.cells()[0])["reason"]
    assert "mine.py" in made.state(made.plan.cells()[0])["traceback"]
    assert len(load_run(made.path / "runs" / name).metrics) == 1
    assert states(made)["fedavg-none-s0"] == "done"
    assert [cell.name for cell in Audit.open(made.path).unfinished()] == [name]
    write(tmp_path / "mine.py")  # the repaired method is another method
    with pytest.raises(RunError, match=r"audit 'a': the method's file .* is not the one"):
        Audit.open(made.path)


def test_a_method_that_raises_on_the_server_is_blamed_and_not_we(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(FEDAVG.replace("        return mean_of_uploads(", "        return 1 / 0 and mean_of_uploads("))
    made = audit(tmp_path, f"{path}:FedAvg", against=[])
    assert "the method's aggregate" in made.record["verdict"]["failed"]["fedavg-none-s0"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """An audit that nothing has interrupted, to compare with."""
    with pytest.MonkeyPatch.context() as patch:
        without_control_and_pictures(patch)
        return audit(tmp_path_factory.mktemp("whole"), "fedrep")


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupted_audit_goes_on_where_it_was(tmp_path: Path, whole: Audit, after: int):
    """After 1 step of 2 rounds and 6 victims it is in the training of the first cell, after 3 in its attack."""
    seen: list[int] = []

    def stop(note: str, done: int) -> None:
        seen.append(done)
        if len(seen) == after:
            raise KeyboardInterrupt

    made = audit(tmp_path, "fedrep", run=False)
    with pytest.raises(KeyboardInterrupt):
        made.run(How(on_step=stop))
    assert list(states(made).values()) == ["interrupted", "planned"]
    again = Audit.open(made.path)
    again.run()
    assert list(states(again).values()) == ["done", "done"]
    for name in states(again):
        assert captured(again.path / "runs" / name) == captured(whole.path / "runs" / name)
        assert scores(again.path / "runs" / name) == scores(whole.path / "runs" / name)
    assert again.record["verdict"]["comparisons"] == whole.record["verdict"]["comparisons"]


def test_finished_cells_are_not_done_again(tmp_path: Path):
    made = audit(tmp_path, "fedrep", against=[])
    path = made.path / "runs" / "fedrep-none-s0"
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()}
    again = Audit.open(made.path)
    assert again.unfinished() == []
    again.run()
    assert {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file()} == before
    assert again.record["verdict"] == made.record["verdict"]


def test_an_audit_is_never_overwritten(tmp_path: Path):
    names = [audit(tmp_path, "fedrep", run=False).path.name for _ in range(2)]
    assert names == ["a", "a-2"]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99}', '{"schema": 1, "plan": {}}'])
def test_a_damaged_audit_is_refused(tmp_path: Path, text: str):
    made = audit(tmp_path, "fedrep", run=False)
    (made.path / "audit.json").write_text(text)
    with pytest.raises(RunError, match=r"audit 'a'"):
        Audit.open(made.path)


def test_the_cost_counts_all_cells_and_a_broken_method_stops_nothing(tmp_path: Path):
    made = plan.make("fedrep", against=["fedavg"], attacks=["ig"], attacking=FAST, seeds=2, training=SMALL)
    cost = price(check(made), made.assaults())
    assert cost.units == 4 * (2 + 6 + 2)  # rounds, victims and controls of each cell
    assert cost.seconds > 0
    assert cost.attacking > 0
    assert cost.timed_on == "fedrep-none-s0"
    broken = plan.make(
        write(tmp_path / "mine.py", "        raise ValueError\n"), against=[], training=SMALL, attacking=FAST
    )
    nothing = price(check(broken), broken.assaults())
    assert (nothing.seconds, nothing.attacking, nothing.timed_on) == (0, 0, "")


def test_two_processes_do_not_run_one_audit(tmp_path: Path):
    made = audit(tmp_path, "fedrep", run=False)
    with locked(made.path / ".lock", ""), pytest.raises(RunError, match="another process"):
        made.run()
    assert set(states(made).values()) == {"planned"}


def test_the_verdict_says_what_the_controls_of_each_attack_show(tmp_path: Path):
    made = audit(tmp_path, "fedrep", against=[], attacks=["analytic"], attacking={})
    assert made.record["verdict"]["controls"] == ["analytic: passed; on every run"]
    assert "## Controls of the attacks\n\n- analytic: passed; on every run" in (made.path / "verdict.md").read_text()
    weak = audit(tmp_path / "weak", "fedrep", against=[])  # three iterations find nothing, not even what must leak
    assert "no evidence of privacy" in weak.record["verdict"]["controls"][0]


def test_under_secure_aggregation_the_method_is_trained_and_its_attacks_do_not_apply(tmp_path: Path):
    """The captures are asked for explicitly, as an audit of several defenses does."""
    training = SMALL | {"capture_rounds": "last"}
    made = audit(tmp_path, "fedavg", defenses=["none", "secagg"], training=training)
    found = read_json(made.path / "audit.json", "audit")
    assert set(states(made).values()) == {"done"}
    assert found["cells"]["fedavg-none-s0"]["not_applicable"] == {}
    (reason,) = found["cells"]["fedavg-secagg-s0"]["not_applicable"].values()
    assert "under secagg the server sees sums" in reason
    assert any("secagg" in name and "sees sums" in why for name, why in found["verdict"]["refused"].items())
    assert "sees sums" in (made.path / "verdict.md").read_text(encoding="utf8")
