"""The report in a real browser: nothing overflows or complains, charts are drawn, tables are sorted and filtered."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pflsec.reports import frontier_page, page
from tests.reports import browser
from tests.reports.runs import CAPTURES, not_applicable, score, write_attack, write_run

pytestmark = pytest.mark.skipif(
    browser.FOUND is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is on the PATH"
)
EVIL = "<script>alert(1)<script>"
LONG = "a-name-without-any-blank-in-it-" * 4
SIZES = [(1280, "light"), (1280, "dark"), (380, "light"), (380, "dark")]
ORDER = (
    "[...document.querySelectorAll('#leakage-table tbody tr:not([hidden])')].map((row) => row.cells[{}].textContent)"
)
BUTTON = "[...document.querySelectorAll('#leakage-table thead button')].find((one) => one.textContent.includes('{}'))"
SORTED = "[...document.querySelectorAll('#leakage-table thead th')].map((one) => one.ariaSort).filter((one) => one != 'none')"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of three runs with names that could do harm, and of an attack that did not apply."""
    home = tmp_path_factory.mktemp("runs")
    one, two, long = write_run(home / EVIL), write_run(home / "two", algo="fedavg", common=0.4), write_run(home / LONG)
    write_attack(one, [score(one, c, psnr=9.0) for c in CAPTURES])
    write_attack(one, [score(one, c, "ig", psnr=30.0) for c in CAPTURES], "ig")
    write_attack(two, [score(two, c, psnr=100.0) for c in CAPTURES])
    write_attack(long, [not_applicable(long, c, EVIL, "idlg") for c in CAPTURES], "idlg")
    return page.write([one, two, long], home / "out")


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    with browser.browser() as one:
        yield one


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_nothing_overflows_or_complains_and_every_chart_is_drawn(
    chromium: browser.Browser, report: Path, width: int, scheme: str
):
    seen = chromium.open(report, width, scheme=scheme)
    assert seen.complaints == []
    assert seen.requests == [report.resolve().as_uri()]
    assert seen.run("innerWidth") == width
    assert seen.run("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [width, width]
    assert (
        seen.run("[...document.querySelectorAll('.plot')].map((one) => one.querySelectorAll('.main-svg').length > 0)")
        == [True] * 4
    )
    assert seen.run("document.querySelectorAll('.plot .scatterlayer .point').length") > 10
    ground = seen.run("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 27)" if scheme == "dark" else "rgb(255, 255, 255)")
    assert seen.run("document.scripts.length") == 2  # plotly's and the page's own; none has come from a name


def test_the_button_changes_the_page_and_its_charts(chromium: browser.Browser, report: Path):
    seen = chromium.open(report, 1280)
    ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    assert seen.run(ink) == "rgb(27, 31, 36)"
    seen.run("document.querySelector('.theme').click()")
    assert seen.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
    assert seen.run(ink) == "rgb(230, 233, 236)"
    assert seen.run("document.querySelector('.theme').textContent") == "Light theme"
    assert seen.complaints == []


@pytest.mark.parametrize("width", [1280, 380])
def test_many_norms_are_folded_and_fit_the_page_when_they_are_opened(
    chromium: browser.Browser, report: Path, width: int
):
    seen = chromium.open(report, width)
    assert seen.run("document.querySelector('.norms').open") is False
    seen.run("document.querySelector('.norms').open = true")
    seen.run("new Promise((done) => setTimeout(done, 300))")
    inner = "document.querySelector('.norms .main-svg').getBoundingClientRect().width"
    outer = "document.querySelector('.norms .plot').offsetWidth"
    assert seen.run(f"{outer} - {inner}") in range(25)
    assert seen.run("document.documentElement.scrollWidth") == width
    assert seen.complaints == []


def test_a_table_is_sorted_by_numbers_with_what_has_none_at_the_end(chromium: browser.Browser, report: Path):
    seen = chromium.open(report, 1280)
    heads = seen.run("[...document.querySelectorAll('#leakage-table thead th')].map((head) => head.textContent)")
    median, run = heads.index("median PSNR"), heads.index("run")
    seen.run(BUTTON.format("median PSNR") + ".click()")
    assert (seen.run(ORDER.format(median)), seen.run(SORTED)) == (["100.0", "30.0", "9.0", "–"], ["descending"])
    seen.run(BUTTON.format("median PSNR") + ".focus()")
    seen.press("Enter")
    assert (seen.run(ORDER.format(median)), seen.run(SORTED)) == (["9.0", "30.0", "100.0", "–"], ["ascending"])
    seen.run(BUTTON.format("run") + ".click()")
    assert seen.run(SORTED) == ["ascending"]
    assert seen.run(ORDER.format(run)) == [EVIL, EVIL, LONG, "two"]


def test_a_table_is_filtered_by_words_and_by_choices(chromium: browser.Browser, report: Path):
    seen = chromium.open(report, 380)
    attack = seen.run("[...document.querySelectorAll('#leakage-table thead th')].map((h) => h.textContent)").index(
        "attack"
    )
    enter = "{{ const one = document.querySelector('.filters {}'); one.value = '{}'; \
one.dispatchEvent(new Event('input', {{ bubbles: true }})); }}"
    said = "document.querySelector('.filters output').textContent"
    assert seen.run(said) == "4 of 4 rows"
    options = seen.run("[...document.querySelectorAll('.filters select[name=attack] option')].map((one) => one.value)")
    assert options == ["", "dlg", "idlg", "ig"]
    seen.run(enter.format("select[name=attack]", "dlg"))
    assert (seen.run(ORDER.format(attack)), seen.run(said)) == (["dlg", "dlg"], "2 of 4 rows")
    seen.run(enter.format("input", "FEDAVG"))
    assert seen.run(said) == "1 of 4 rows"
    seen.run(enter.format("input", "nowhere"))
    assert seen.run(ORDER.format(attack)) == []
    seen.run(enter.format("input", ""))
    seen.run(enter.format("select[name=attack]", ""))
    assert seen.run(said) == "4 of 4 rows"


def test_hovering_over_a_point_says_what_it_is_as_text(chromium: browser.Browser, report: Path):
    seen = chromium.open(report, 1280)
    seen.run("""(() => {
        const plot = document.querySelector(".plot");
        const curve = plot.data.findIndex((trace) => trace.name === "fedrep");
        Plotly.Fx.hover(plot, [{ curveNumber: curve, pointNumber: 0 }]);
    })()""")
    said = seen.run("document.querySelector('.plot .hoverlayer').textContent")
    assert EVIL in said
    for fact in ("method: fedrep", "leakage: 30.0 dB", "attack: ig by the server", "n: 12 victims"):
        assert fact in said


def test_the_page_of_the_frontier_is_drawn_too(chromium: browser.Browser, report: Path):
    runs = [path for path in report.parents[1].iterdir() if (path / "run.json").exists()]
    frontier_page.write(runs, report.parent / "frontier")
    seen = chromium.open(report.parent / "frontier" / "index.html", 380)
    assert seen.complaints == []
    assert seen.run("document.documentElement.scrollWidth") == 380
    assert seen.run("document.querySelectorAll('.plot .main-svg').length") > 0
