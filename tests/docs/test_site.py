"""The generated pages say what the code says, and the site builds without a warning and without the network."""

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pflsec.core import registry
from pflsec.leakage.results import COLUMNS
from tests.docs.blocks import REPOSITORY
from tests.reports import browser

EVERY = [(group, name) for group in registry.GROUPS for name in registry.names(group)]
EXTERNAL = re.compile(r"<(?:script|img|link|iframe|source)[^>]*\s(?:src|href)=\"?(?:https?:)?//[^>]*>")

SEARCH = """new Promise((done) => {
  const links = document.querySelector(".md-search-result__list");
  new MutationObserver(() => done([...links.querySelectorAll("a")].map((one) => one.href))).observe(links, {childList: true});
  document.getElementById("__search").click();
  const field = document.querySelector(".md-search__input");
  field.value = "fedrep";
  field.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
})"""
"""Searches for fedrep; its value are the addresses of what is found."""


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """docs/generate/pages.py."""
    spec = importlib.util.spec_from_file_location("pages", REPOSITORY / "docs" / "generate" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pages"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(generator: ModuleType) -> dict[str, str]:
    return generator.pages()


def uris(navigation: Any) -> list[str]:
    """Return all paths in a navigation."""
    if isinstance(navigation, str):
        return [navigation]
    values = navigation.values() if isinstance(navigation, dict) else navigation
    return [uri for value in values for uri in uris(value)]


def test_everything_registered_has_one_page_and_one_place_in_the_navigation(generator, made):
    wanted = {generator.uri(group, name) for group, name in EVERY}
    assert wanted <= set(made)
    assert sorted(uris(generator.navigation())) == sorted(made)


@pytest.mark.parametrize(("group", "name"), EVERY)
def test_a_page_holds_all_that_the_card_says(generator, made, group, name):
    page, card = made[generator.uri(group, name)], registry.card(group, name)
    assert generator.text(card.title) in page
    for label, value in card.sections.items():
        assert f"\n| **{label}** | " in page
        assert generator.text(value) in page or generator.code(value) in page
    for setting in card.settings:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| {generator.code(setting.name)} | ")]
        assert generator.code(setting.default) in row
        assert all(generator.text(value) in row for value in setting.cited.values())
    for item in [*card.attributes.get("down", {}), *card.attributes.get("up", {})]:
        assert generator.code(item.rstrip("?")) in page


def test_what_refuses_private_training_or_batchnorm_says_why(generator, made):
    for name in registry.names("algorithms"):
        kind, page = registry.load("algorithms", name), made[generator.uri("algorithms", name)]
        assert ("**Covered.**" in page) == (kind.dp_support == "full")
        for declared in (kind.dp_support, kind.batchnorm):
            assert generator.text(declared.partition(": ")[2]) in page


def test_measured_rows_are_those_of_the_tables(generator):
    for path in (generator.TABLES).glob("leakage-*.md"):
        whole = path.read_text(encoding="utf8").count("\n| fedrep |")
        assert len([one for one in generator.measured("fedrep") if one.file == path.name]) == whole > 0


@pytest.mark.parametrize("value", ["a|b", "x_1 * y_2", "<b>", "[C, d]", "a ` b"])
def test_text_and_code_show_as_they_are(generator, value):
    markdown = pytest.importorskip("markdown", reason="the site's extra is not installed: pip install -e '.[docs]'")
    for made in (generator.text(value), generator.code(value)):
        page = markdown.markdown("\n".join(generator.table(["a", "b"], [[made, "next"]])), extensions=["tables"])
        shown = re.sub(r"</?(?:table|thead|tbody|tr|td|th|code)>|\n", "", page).removeprefix("ab").removesuffix("next")
        assert html.unescape(shown) == value


def test_names_between_backticks_show_as_code(generator):
    markdown = pytest.importorskip("markdown", reason="the site's extra is not installed: pip install -e '.[docs]'")
    page = markdown.markdown(generator.text("see `x_1.*` and `y`, <b> not"))
    assert html.unescape(page) == "<p>see <code>x_1.*</code> and <code>y</code>, <b> not</p>"


def test_the_metrics_page_explains_every_column():
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf8")
    assert [name for name in COLUMNS if f"`{name}`" not in page] == []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=REPOSITORY, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_the_site_has_all_pages_and_can_be_searched(site, made):
    for uri in made:
        assert (site / uri).with_suffix(".html").exists()
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf8"))
    assert any("fedrep" in doc["location"] for doc in index["docs"])


def test_no_page_loads_anything_from_elsewhere(site):
    found = {
        (page.name, tag) for page in site.rglob("*.html") for tag in EXTERNAL.findall(page.read_text(encoding="utf8"))
    }
    assert found == set()


@pytest.mark.skipif(browser.FOUND is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is on the PATH")
def test_a_page_opened_as_a_file_is_searched_without_any_request_to_elsewhere(site):
    with browser.browser() as chromium:
        page = chromium.open(site / "index.html", 1280)
        found = page.run(SEARCH)
    assert found[0].endswith("reference/algorithms/fedrep.html")
    assert page.complaints == []
    assert {url for url in page.requests if not url.startswith(site.resolve().as_uri())} == set()


def test_the_generator_is_no_part_of_the_site(site):
    assert not (site / "generate").exists()
