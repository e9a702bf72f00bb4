"""The frontier: its points and its Pareto marks by hand and by another algorithm, and the files that it leaves."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from pflsec.core.errors import ConfigError, RunError
from pflsec.reports import frontier
from pflsec.reports.load import load_runs
from tests.reports.runs import CAPTURES, not_applicable, score, wire, write_attack, write_run


def staircase(places: list[tuple[float, float]]) -> set[int]:
    """Return the unbeaten places by one sweep from left to right: another way than to compare all pairs."""
    best, left, found = -float("inf"), -float("inf"), set()
    for i in sorted(range(len(places)), key=lambda i: (places[i][0], -places[i][1])):
        x, y = places[i]
        if y > best or (y == best and x == left):
            best, left = y, x
            found.add(i)
    return found


def test_the_pareto_marks_are_those_of_another_algorithm():
    rng = random.Random(0)
    for size in [0, 1, 2, 3, 5, 8, 20] * 40:
        places = [(float(rng.randrange(6)), float(rng.randrange(6))) for _ in range(size)]
        assert frontier.pareto(places) == staircase(places), places


def test_pareto_by_hand_with_equals_and_infinities():
    inf = float("inf")
    assert frontier.pareto([(1, 1), (1, 1), (2, 1), (0, 0.5), (inf, 2), (inf, 1)]) == {0, 1, 3, 4}


def attacked(
    path: Path, psnr: float, accuracy: float, attack: str = "dlg", algo: str = "fedrep", **changes: Any
) -> Path:
    cells = changes.pop("cells", {})
    run = write_run(path, accuracies=(0.1, accuracy), algo=algo, **changes)
    write_attack(run, [score(run, c, attack, psnr=psnr, **cells) for c in CAPTURES], attack)
    return run


def by_name(paths: list[Path], **axes: str) -> dict[str, frontier.Point]:
    return {p.run: p for p in frontier.measure(load_runs(paths), **axes).points}


def test_each_run_has_its_worst_attack_and_last_accuracy(tmp_path: Path):
    run = attacked(tmp_path / "a", 25.0, 0.75)
    write_attack(run, [score(run, c, "ig", psnr=40.0) for c in CAPTURES], "ig")
    point = by_name([run])["a"]
    assert (point.x, point.y, point.attack, point.kind, point.blind) == (40.0, 0.75, "ig", "undefended", 12.0)


def test_an_attack_with_granted_knowledge_does_not_stand_for_the_wire(tmp_path: Path):
    run = attacked(tmp_path / "a", 25.0, 0.75)
    oracle = [score(run, c, "ig", psnr=60.0, knowledge="oracle") for c in CAPTURES]
    write_attack(run, oracle, "ig", threat_model={"adversary": "server", "knowledge": "oracle", "knows": []})
    assert by_name([run])["a"].attack == "dlg"


def test_nothing_on_the_wire_stands_at_the_blind_guess(tmp_path: Path):
    run = write_run(tmp_path / "alone", algo="local", wire=[wire("private", "body.*", 6, 1)])
    write_attack(run, [not_applicable(run, c, "nothing is sent") | {"psnr_blind": 11.5} for c in CAPTURES])
    point = by_name([run])["alone"]
    assert (point.x, point.kind, point.attack) == (11.5, "nothing on the wire", "")
    assert by_name([run], x="identified")["alone"].x == 0
    assert by_name([run], x="epsilon")["alone"].x == 0


def test_what_was_not_attacked_has_no_point_but_a_reason(tmp_path: Path):
    """It sends much, so to draw it at the blind guess would be a lie."""
    bare = write_run(tmp_path / "bare")
    useless = write_run(tmp_path / "useless")
    write_attack(useless, [not_applicable(useless, c, "no gradient") for c in CAPTURES])
    untested = attacked(tmp_path / "untested", 20.0, 0.5)
    (untested / "metrics.jsonl").write_text("")
    found = frontier.measure(load_runs([bare, useless, untested]))
    assert found.points == []
    assert found.missing == {
        "bare": "it has not been attacked",
        "useless": "no attack gave a score: no gradient",
        "untested": "no round has been tested",
    }


def test_epsilon_is_infinite_without_a_guarantee_or_with_a_known_seed(tmp_path: Path):
    paths = [attacked(tmp_path / name, 20.0, 0.5) for name in "abc"]
    for path, test_seed in ((paths[1], False), (paths[2], True)):
        manifest = json.loads((path / "run.json").read_text())
        manifest["config"]["defense"] = ["dp-sgd:epsilon=8"]
        manifest["dp"] = {"enabled": True, "test_seed": test_seed}
        (path / "run.json").write_text(json.dumps(manifest))
        lines = [json.loads(line) | {"epsilon": 7.5} for line in (path / "metrics.jsonl").read_text().splitlines()]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = by_name(paths, x="epsilon")
    assert [found[name].x for name in "abc"] == [float("inf"), 7.5, float("inf")]
    assert [found[name].kind for name in "abc"] == ["undefended", "defended", "defended"]


def test_other_axes(tmp_path: Path):
    run = attacked(tmp_path / "a", 25.0, 0.75, common=0.6, cells={"ssim": 0.4, "identified": 0.25})
    axes = {(x, y): by_name([run], x=x, y=y)["a"] for x in ("ssim", "identified") for y in ("global", "worst10")}
    assert {k: (p.x, p.y) for k, p in axes.items()} == {
        ("ssim", "global"): (pytest.approx(0.4), 0.6),
        ("ssim", "worst10"): (pytest.approx(0.4), 0.5),
        ("identified", "global"): (0.25, 0.6),
        ("identified", "worst10"): (0.25, 0.5),
    }
    without = write_run(tmp_path / "b")
    write_attack(without, [score(without, c) for c in CAPTURES])
    assert "no global model" in frontier.measure(load_runs([without]), y="global").missing["b"]


@pytest.mark.parametrize(("x", "y", "said"), [("leak", "accuracy", "--x 'leak'"), ("ssim", "acc", "--y 'acc'")])
def test_unknown_axes_are_refused(tmp_path: Path, x: str, y: str, said: str):
    with pytest.raises(ConfigError, match=said):
        frontier.write([write_run(tmp_path / "a")], tmp_path / "out", x, y)
    with pytest.raises(RunError, match="needs runs"):
        frontier.write([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("x", list(frontier.X))
def test_the_files_are_complete_equal_each_time_and_need_no_others(tmp_path: Path, x: str):
    paths = [attacked(tmp_path / f"$run<{i}>", 20.0 + 5 * i, 0.5 + i / 10, algo=f"m{i % 3}") for i in range(3)]
    paths.append(write_run(tmp_path / "alone", algo="local", wire=[wire("private", "body.*", 6, 1)]))
    for out in ("one", "two"):
        frontier.write(paths, tmp_path / out, x)
    names = ["frontier.csv", "frontier.json", "frontier.png", "frontier.svg", "index.html"]
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == names
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)
    page = (tmp_path / "one" / "index.html").read_text()
    assert not re.search(r"(?:src|href)=\"(?!data:)", page)
    assert "$run&lt;0&gt;" in page
    points = json.loads((tmp_path / "one" / "frontier.json").read_text())["points"]
    assert len(points) == 4
    assert all((p["x"] is None) == p["x_infinite"] for p in points)


def test_many_runs_are_told_apart_by_a_legend_and_none_at_all_by_a_sentence(tmp_path: Path):
    many = [attacked(tmp_path / f"r{i:02d}", 20.0 + i, 0.5, algo=f"m{i}") for i in range(14)]
    found = frontier.measure(load_runs(many))
    assert sum(p.pareto for p in found.points) == 1
    assert len(frontier.figure(found).legends) == 2
    nothing = frontier.measure(load_runs([write_run(tmp_path / "bare")]))
    assert [t.get_text() for t in frontier.figure(nothing).texts] == ["No run has both coordinates"]


def test_worse_than_a_guess_is_no_more_private_than_a_guess(tmp_path: Path):
    """The blind guess is at 12 dB: 5 dB is as private as 11 dB, so the more accurate of the two beats the other."""
    found = by_name([attacked(tmp_path / "a", 5.0, 0.4), attacked(tmp_path / "b", 11.0, 0.9)])
    assert (found["a"].pareto, found["b"].pareto) == (False, True)
    assert found["a"].x == 5.0


def test_the_table_has_a_mark_for_every_pareto_point(tmp_path: Path):
    paths = [
        attacked(tmp_path / "a", 20.0, 0.5),
        attacked(tmp_path / "b", 30.0, 0.4),
        attacked(tmp_path / "c", 30.0, 0.9),
    ]
    header, *rows = frontier.table(frontier.measure(load_runs(paths)))
    assert header[:2] == ["pareto", "run"]
    assert [(row[0], row[1], row[4]) for row in rows] == [("*", "a", "20.0"), ("*", "c", "30.0"), ("", "b", "30.0")]
