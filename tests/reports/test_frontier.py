"""The frontier: its points and its Pareto marks by hand and by another algorithm, and the files that it leaves."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Annotation, Text

from pflsec.core.errors import ConfigError, RunError
from pflsec.reports import figures, frontier, frontier_page
from pflsec.reports.load import load_runs
from tests.reports.runs import CAPTURES, not_applicable, score, wire, without_scripts, write_attack, write_run


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
    return {p.name: p for p in frontier.measure(load_runs(paths), **axes).points}


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
        frontier_page.write([write_run(tmp_path / "a")], tmp_path / "out", x, y)
    with pytest.raises(RunError, match="needs runs"):
        frontier_page.write([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("x", [x for x in frontier.X if x != "recall"])  # these data are images
def test_the_files_are_complete_equal_each_time_and_need_no_others(tmp_path: Path, x: str):
    paths = [attacked(tmp_path / f"$run<{i}>", 20.0 + 5 * i, 0.5 + i / 10, algo=f"m{i % 3}") for i in range(3)]
    paths.append(write_run(tmp_path / "alone", algo="local", wire=[wire("private", "body.*", 6, 1)]))
    for out in ("one", "two"):
        frontier_page.write(paths, tmp_path / out, x)
    names = [*(f"frontier.{kind}" for kind in ("csv", "json", "pdf", "png", "svg", "tex")), "index.html"]
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == names
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)
    page = without_scripts((tmp_path / "one" / "index.html").read_text())
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", page)
    assert "$run&lt;0&gt;" in page
    points = json.loads((tmp_path / "one" / "frontier.json").read_text())["points"]
    assert len(points) == 4
    assert all((p["x"] is None) == p["x_infinite"] for p in points)


def said(found: frontier.Frontier) -> list[str]:
    """Return everything that the figure says."""
    figure = figures.frontier(found)
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]


def test_many_runs_are_told_apart_by_numbers_with_a_key_and_none_at_all_by_a_sentence(tmp_path: Path):
    many = [attacked(tmp_path / f"r{i:02d}", 20.0 + i, 0.5, algo=f"m{i}") for i in range(14)]
    found = frontier.measure(load_runs(many))
    assert sum(p.pareto for p in found.points) == 1
    words = said(found)
    assert {str(i) for i in range(1, 15)} <= set(words)
    assert {f"{i}  {p.name}" for i, p in enumerate(found.points, start=1)} <= set(words)
    nothing = frontier.measure(load_runs([write_run(tmp_path / "bare")]))
    assert said(nothing) == ["No run has both coordinates"]


def test_no_two_labels_of_a_figure_overlap(tmp_path: Path):
    """Ten runs with long names in one place: the names find no room, so numbers stand for them, one text for equal places."""
    paths = [attacked(tmp_path / f"a-run-with-quite-a-long-name-{i}", 30.0 + i // 2, 0.5) for i in range(10)]
    figure = figures.frontier(frontier.measure(load_runs(paths)))
    figure.draw_without_rendering()
    texts = [text for text in figure.axes[0].texts if isinstance(text, Annotation)]
    assert sorted(text.get_text() for text in texts) == ["1, 2", "3, 4", "5, 6", "7, 8", "9, 10"]
    boxes = [Text.get_window_extent(text) for text in texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


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
    assert header[:2] == ["method", "pareto"]
    assert [(row[0], row[1], row[4]) for row in rows] == [("a", "*", "20.0"), ("c", "*", "30.0"), ("b", "", "30.0")]


# --- seeds, controls, naive attackers, and methods of which nothing is seen


def seeded(path: Path, seed: int, psnr: float, accuracy: float, **options: Any) -> Path:
    """Write a run that differs from others by its seed, and by `options`."""
    run = attacked(path, psnr, accuracy)
    configure(run, seed=seed, **options)
    return run


def configure(run: Path, **options: Any) -> None:
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"] |= options
    (run / "run.json").write_text(json.dumps(manifest))


def test_seeds_are_one_point_with_mean_and_spread(tmp_path: Path):
    """PSNR 20 and 24, accuracy 0.5 and 0.7: means 22 and 0.6, sample SD 2 * sqrt 2 and 0.1 * sqrt 2."""
    paths = [seeded(tmp_path / "a", 0, 20.0, 0.5), seeded(tmp_path / "b", 1, 24.0, 0.7)]
    (point,) = frontier.measure(load_runs(paths)).points
    assert (point.name, point.runs, point.seeds, point.n) == ("fedrep (2 seeds)", "a, b", 2, 24)
    assert (point.x, point.y) == (22.0, pytest.approx(0.6))
    assert (point.x_spread, point.y_spread) == (pytest.approx(2 * 2**0.5), pytest.approx(0.1 * 2**0.5))
    _, row = frontier.table(frontier.measure(load_runs(paths)))
    assert row[4:6] == ["22.0 ± 2.8", "60.0\u00a0% ± 14.1\u00a0%"]


def test_what_differs_in_more_than_the_seed_and_a_seed_played_twice_stand_apart(tmp_path: Path):
    paths = [
        seeded(tmp_path / "a", 0, 20.0, 0.5),
        seeded(tmp_path / "again", 0, 20.0, 0.5),
        seeded(tmp_path / "fast", 1, 20.0, 0.5, lr=0.1),
        seeded(tmp_path / "private", 1, 20.0, 0.5, defense=["dp-sgd:epsilon=8"]),
        seeded(tmp_path / "b", 1, 20.0, 0.5, executor="processes", workers=2),
    ]
    found = frontier.measure(load_runs(paths))
    assert {p.name: p.seeds for p in found.points} == {"fedrep (2 seeds)": 2, "again": 1, "fast": 1, "private": 1}


def test_seeds_that_were_not_attacked_alike_are_named(tmp_path: Path):
    paths = [seeded(tmp_path / "a", 0, 20.0, 0.5), seeded(tmp_path / "b", 1, 24.0, 0.7)]
    write_attack(paths[1], [score(paths[1], c, "ig", psnr=60.0) for c in CAPTURES], "ig")
    found = frontier.measure(load_runs(paths))
    assert "The seeds of fedrep (2 seeds) were not all attacked by the same attacks." in found.cautions
    assert found.points[0].attack == "dlg, ig"


@pytest.mark.parametrize("how", ["meta", "reason"])
def test_the_strongest_attack_counts_even_where_it_is_naive_and_says_so(tmp_path: Path, how: str):
    run = seeded(tmp_path / "a", 0, 20.0, 0.5, defense=["prune:keep=0.1"])
    reason = "naive: the attacker does not know of the defense" if how == "reason" else ""
    changes: dict[str, Any] = {"naive": True} if how == "meta" else {}
    write_attack(run, [score(run, c, "ig", psnr=31.0, reason=reason) for c in CAPTURES], "ig", **changes)
    found = frontier.measure(load_runs([run]))
    assert (found.points[0].x, found.points[0].naive) == (31.0, True)
    assert frontier.table(found)[1][7] == "ig (naive)"
    weaker = seeded(tmp_path / "b", 0, 40.0, 0.5, defense=["prune:keep=0.1"])
    write_attack(weaker, [score(weaker, c, "ig", psnr=31.0) for c in CAPTURES], "ig", naive=True)
    assert frontier.measure(load_runs([weaker])).points[0].naive is False


def test_an_attack_that_rebuilds_from_nothing_is_no_evidence(tmp_path: Path):
    failed = {"positive": {"verdict": "passed", "reason": ""}, "negative": {"verdict": "failed", "reason": "5 dB"}}
    run = attacked(tmp_path / "a", 20.0, 0.5)
    write_attack(run, [score(run, c, "ig", psnr=60.0) for c in CAPTURES], "ig", controls=failed)
    assert by_name([run])["a"].x == 20.0
    only = write_run(tmp_path / "b")
    write_attack(only, [score(only, c, "ig", psnr=60.0) for c in CAPTURES], "ig", controls=failed)
    assert "no attack passed the negative control" in frontier.measure(load_runs([only])).missing["b"]


def test_where_no_single_upload_is_seen_the_accuracy_still_stands(tmp_path: Path):
    sums = write_run(tmp_path / "sums", accuracies=(0.5, 0.8), captures=())
    configure(sums, defense=["secagg"])
    found = frontier.measure(load_runs([sums, attacked(tmp_path / "a", 30.0, 0.7)]))
    assert [(u.name, u.y) for u in found.unseen] == [("sums", 0.8)]
    assert found.unseen[0].reason.startswith("no single upload is seen: secure aggregation shows")
    assert found.missing == {}
    row = frontier.table(found)[-1]
    assert row[0] == "sums"
    assert row[4].startswith("no single upload is seen")
    assert row[5] == "80.0\u00a0%"
    assert "sums: no single upload is seen" in said(found)


def test_the_untrained_network_is_a_control(tmp_path: Path):
    """Round 0 is rebuilt at 50 dB, round 2 at 10: the median over both is 30, the untrained network alone gives 50."""
    run = write_run(tmp_path / "a")
    write_attack(run, [score(run, c, psnr=50.0 if c.startswith("r000") else 10.0) for c in CAPTURES])
    point = by_name([run])["a"]
    assert (point.x, point.untrained) == (30.0, 50.0)
    late = write_run(tmp_path / "late")
    write_attack(late, [score(late, c) for c in CAPTURES if not c.startswith("r000")])
    assert by_name([late])["late"].untrained is None


def test_controls_are_named_and_so_is_their_absence(tmp_path: Path):
    bare = attacked(tmp_path / "bare", 30.0, 0.7)
    defended = seeded(tmp_path / "defended", 0, 20.0, 0.5, defense=["fp16"])
    alone = write_run(tmp_path / "alone", algo="local", wire=[wire("private", "body.*", 6, 1)])
    text = " ".join(frontier.measure(load_runs([bare, defended, alone])).controls)
    assert "No communication: alone." in text
    assert "No defense: fedrep without one is bare." in text
    assert "Architecture only: attacks on round 0" in text
    write_attack(late := write_run(tmp_path / "late"), [score(late, c) for c in CAPTURES[6:]])
    configure(late, defense=["fp16"])
    text = " ".join(frontier.measure(load_runs([late])).controls)
    assert "no run of local is among these" in text
    assert "no run of fedrep without one is among these" in text
    assert "no capture of round 0 was attacked" in text


@pytest.mark.parametrize(
    ("defense", "dp", "unit"),
    [
        ("dp-sgd:epsilon=8", {"enabled": True, "unit": "record"}, "record"),
        ("dp-fedavg:epsilon=8", {"enabled": True, "unit": "user"}, "user"),
        ("other", {}, "not recorded"),
    ],
)
def test_epsilon_stands_with_whom_it_protects(tmp_path: Path, defense: str, dp: dict[str, Any], unit: str):
    run = seeded(tmp_path / "a", 0, 20.0, 0.5, defense=[defense])
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"dp": dp}))
    lines = [json.loads(line) | {"epsilon": 7.5} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = frontier.measure(load_runs([run]))
    assert (found.points[0].epsilon, found.points[0].unit) == (7.5, unit)
    assert frontier.table(found)[1][3] == f"7.50 per {unit}"
