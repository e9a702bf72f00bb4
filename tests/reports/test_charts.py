"""Charts: the data that plotly is given are those of the tables, and texts in them are no markup."""

import json
from html import unescape
from pathlib import Path
from typing import Any

from pflsec.reports import charts
from pflsec.reports.frontier import measure
from pflsec.reports.load import load_runs
from tests.reports.runs import CAPTURES, score, wire, write_attack, write_run

EVIL = "<b onmouseover=alert(1)>&amp;%{x}"


def attacked(path: Path, psnr: float, accuracy: float, **changes: Any) -> Path:
    run = write_run(path, accuracies=(0.1, accuracy), **changes)
    write_attack(run, [score(run, c, psnr=psnr) for c in CAPTURES])
    return run


def traces(chart: charts.Chart | None) -> dict[str, dict[str, Any]]:
    assert chart
    json.dumps(chart, allow_nan=False)
    return {unescape(trace["name"]): trace for trace in chart["data"] if "name" in trace}


def test_the_frontier_has_points_steps_blind_level_and_hover(tmp_path: Path):
    paths = [
        attacked(tmp_path / "a", 20.0, 0.5),
        attacked(tmp_path / "b", 30.0, 0.9),
        attacked(tmp_path / "c", 40.0, 0.4),
    ]
    paths.append(write_run(tmp_path / "alone", algo="local", wire=[wire("private", "body.*", 6, 1)]))
    found = measure(load_runs(paths))
    chart = charts.frontier(found)
    seen = traces(chart)
    assert sorted(zip(seen["fedrep"]["x"], seen["fedrep"]["y"], strict=True)) == [(20.0, 0.5), (30.0, 0.9), (40.0, 0.4)]
    steps = seen["not beaten in both (Pareto)"]
    assert (steps["x"], steps["y"], steps["line"]["shape"]) == ([12.0, 30.0], [0.7, 0.9], "hv")
    assert seen["local"]["marker"]["symbol"] == ["diamond"]
    assert set(seen["fedrep"]["marker"]["symbol"]) == {"circle-open"}
    assert chart
    assert [shape["x0"] for shape in chart["layout"]["shapes"]] == [12.0, 20.0]
    hover = next(text for text in seen["fedrep"]["hovertext"] if text.startswith("b<br>"))
    for fact in ("method: fedrep", "defense: none", "epsilon: –", "mean personal accuracy: 90.0", "leakage: 30.0 dB",
                 "attack: dlg by the server", "n: 12 victims", "blind guess: 12.0"):  # fmt: skip
        assert fact in hover


def test_no_name_is_markup_for_plotly(tmp_path: Path):
    runs = load_runs([attacked(tmp_path / EVIL, 20.0, 0.5, algo=EVIL)])
    for chart in (charts.frontier(measure(runs)), charts.accuracy(runs), charts.loss(runs)):
        text = json.dumps(chart)
        assert "<b " not in text
        assert "&lt;b onmouseover" in text
        assert "hovertemplate" not in text


def test_curves_are_the_rounds_that_were_tested(tmp_path: Path):
    runs = load_runs([write_run(tmp_path / "a", accuracies=(0.5, None, 0.6)), write_run(tmp_path / "b", accuracies=())])
    seen = traces(charts.accuracy(runs))
    assert (seen["a"]["x"], seen["a"]["y"]) == ([0, 2], [0.5, 0.6])
    assert seen["a, worst tenth"]["y"] == [0.25, 0.35]
    assert "b" not in seen
    assert traces(charts.loss(runs))["a"]["y"] == [1.0, 0.5, 1 / 3]
    assert charts.epsilon(runs) is None


def test_without_data_there_is_no_chart(tmp_path: Path):
    runs = load_runs([write_run(tmp_path / "young", accuracies=())])
    assert [charts.frontier(measure(runs)), charts.accuracy(runs), charts.loss(runs)] == [None] * 3


def test_infinity_stands_at_the_right_end(tmp_path: Path):
    chart = charts.frontier(measure(load_runs([attacked(tmp_path / "a", 20.0, 0.5)]), x="epsilon"))
    assert traces(chart)["fedrep"]["x"] == [1.0]
    assert chart
    assert chart["layout"]["xaxis"]["ticktext"][-1] == "infinite"


def test_norms_are_a_line_for_each_part_of_what_server_and_clients_hold(tmp_path: Path):
    (run,) = load_runs([write_run(tmp_path / "a")])
    seen = traces(charts.norms([run]))
    assert {name: trace["y"] for name, trace in seen.items()} == {
        "a: server, body": [9.0, 10.0, 11.0],
        "a: clients, head": [2.0, 2.0, 2.0],
        "a: clients, control": [0.0, None, None],
    }
    assert seen["a: server, body"]["x"] == [0, 1, 2]
    assert charts.norms(load_runs([write_run(tmp_path / "young", accuracies=())])) is None
