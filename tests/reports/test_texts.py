"""The gallery of texts: recovered words marked one by one, everything escaped, and readable as a picture."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

from pflsec import api
from pflsec.core.errors import RunError
from pflsec.core.tensors import read_items, write_items
from pflsec.reports import figures, texts
from pflsec.reports.load import load_run
from tests import toys
from tests.reports.runs import without_scripts

RECALL = "token_recall"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on texts whose vocabulary could do harm, attacked twice: with and without success."""
    data = toys.texts()
    assert data.words is not None
    named = replace(data, words=(*data.words[:5], "<b>", "$x$", "&amp;", *data.words[8:]))
    run = api.train(dataset=named, partition="natural", test="given", rounds=1, capture_clients="1,3", victims=2,
                    capture_rounds="0", runs_dir=tmp_path_factory.mktemp("runs"), name="texts")  # fmt: skip
    api.attack(run, "embedding-rows,dlg", lpips="none")
    return run.path


def attacked(path: Path):
    run = load_run(path)
    return run, next(a for a in run.attacks if a.name == "embedding-rows")


def change(path: Path, index: int, tokens: list[int]) -> None:
    """Replace what was found of the text with this place."""
    _, attack = attacked(path)
    file = attack.folder / "reconstructions.safetensors"
    items = read_items(file, "reconstructions")
    name = attack.captures[index].text
    row = items[name].new_tensor([tokens])
    write_items(file, items | {name: row})


@pytest.fixture
def own(path: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(path, tmp_path / "texts"))


def test_all_words_are_marked_where_all_were_found(path: Path):
    told, total = texts.tellings(*attacked(path))
    assert (len(told), total) == (4, 4)
    for one in told:
        assert all(hit for _, hit in one.words)
        assert one.added == ()
        assert one.summary.startswith(
            f"{len(one.words)} of {len(one.words)} words recovered, as often each and no other"
        )
        assert one.label == one.about.split(" · ")[-1]


def test_a_word_is_marked_as_often_as_it_was_found_and_the_rest_stands_apart(own: Path):
    """The first two words of a toy text are the same one; found once, its first place is marked, its second is not."""
    truth = texts.tellings(*attacked(own))[0][0].words
    run, attack = attacked(own)
    tokens = read_items(run.path / "vault" / f"{attack.captures[0].text}.safetensors", "truth")["x"][0].tolist()
    foreign = next(t for t in range(5, 30) if t not in tokens)
    change(own, 0, [tokens[0], foreign, 0])
    one = texts.tellings(*attacked(own))[0][0]
    first, *others = (hit for _, hit in one.words)
    assert [word for word, _ in one.words] == [word for word, _ in truth]
    assert first
    assert not any(others)
    assert one.added == (run.word(foreign),)
    assert (one.found, "as often each" in one.summary) == (1, False)


def test_the_picture_has_every_word_once_and_nothing_outside_it(own: Path):
    change(own, 1, [9, 9, 9])
    run, attack = attacked(own)
    figure = figures.gallery(run, attack)
    told, _ = texts.tellings(run, attack)
    drawn = [t.get_text() for t in figure.findobj(Text) if isinstance(t, Text)]
    for word in {word for one in told for word, _ in one.words}:
        assert drawn.count(word) == sum(w == word for one in told for w, _ in one.words)
    assert drawn.count("+" + run.word(9)) == sum(one.added.count(run.word(9)) for one in told)
    figures.encode(figure, "png")
    width, height = figure.get_size_inches() * figure.dpi
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= width
        assert box.y0 >= 0
        assert box.y1 <= height


def test_lines_are_no_wider_than_the_sheet_and_keep_the_order():
    words = tuple((f"word{i}" * (1 + i % 12), i % 2 == 0) for i in range(60))
    lines = texts._lines(texts.Telling(words, ("more",), 0, "", "", "budget"))
    assert all(column + len(word) <= texts.WIDTH for line in lines for column, word, _ in line)
    assert [kind for line in lines for _, _, kind in line] == ["hit", "miss"] * 30 + ["added"]


def test_the_gallery_is_written_and_the_same_each_time(own: Path):
    _, attack = attacked(own)
    first = figures.write_gallery(own, attack.id).read_bytes()
    assert first[:4] == b"\x89PNG"
    assert figures.write_gallery(own, attack.id).read_bytes() == first


def test_the_page_shows_texts_as_text_escaped(own: Path):
    page = without_scripts(api.report(own).read_text(encoding="utf8"))
    told, _ = texts.tellings(*attacked(own))
    words = [word for one in told for word, _ in one.words]
    assert page.count("<mark>") == len(words) + 1
    assert "<b>" in words
    assert "<b>" not in page
    assert page.count("<mark>&lt;b&gt;</mark>") == words.count("<b>")
    assert "The attack gave no text." in page
    assert "embedding-rows by the server recovers 100.0\u00a0% of the words of 4 texts" in page
    with (own / "report" / "tables" / "tokens.csv").open(encoding="utf8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["texts"], row["recall"], row["multiset"], row["identified"]) == ("4", "1", "1", "1")
    assert list((own / "report" / "figures").glob("gallery-*.png"))


def test_without_originals_no_text_is_shown(own: Path):
    api.report(own)
    page = without_scripts(api.report(own, originals=False).read_text(encoding="utf8"))
    assert "<mark>" not in page
    assert not list((own / "report" / "figures").glob("gallery-*"))


def test_damage_is_one_sentence(own: Path):
    run, attack = attacked(own)
    items = read_items(attack.folder / "reconstructions.safetensors", "reconstructions")
    write_items(attack.folder / "reconstructions.safetensors", {k: v[0] for k, v in items.items()})
    with pytest.raises(RunError, match="they do not fit each other"):
        texts.tellings(run, attack)


def test_a_token_without_a_word_is_its_number(path: Path):
    assert load_run(path).word(30) == "#30"
    assert load_run(path).word(5) == "<b>"
    assert np.isfinite(attacked(path)[1].tokens[RECALL]).all()
