"""Texts: tokens, vocabulary, cutting and padding, and files that are refused in one line."""

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from pflsec.core.errors import DataError
from pflsec.data import federation
from pflsec.data.datasets import Dataset, load
from pflsec.data.texts import numbered, tokenised, vocabulary
from tests import toys

ROWS = [("1", "Cats win", "A cat wins again."), ("2", "Rain", "It rains. It pours."), ("2", "", "!")]


def write(path: Path, rows: Sequence[Sequence[str]] = ROWS) -> Path:
    with path.open("w", encoding="utf8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return path


def test_words_and_marks_are_tokens_in_lower_case():
    assert tokenised("The team\\'s #36;10 Don't—stop.") == [
        "the", "team", "'", "s", "#", "36", ";", "10", "don't", "—", "stop", ".",
    ]  # fmt: skip


def test_the_commonest_words_are_kept_and_ties_are_alphabetical():
    texts = [["b", "a", "c"], ["c", "d"]]
    assert vocabulary(texts, 100) == ("<pad>", "<unk>", "c", "a", "b", "d")
    assert vocabulary(texts, 4) == ("<pad>", "<unk>", "c", "a")


def test_texts_are_cut_and_padded_and_never_empty():
    rows = numbered([["x", "y", "x", "x"], ["z"], []], ("<pad>", "<unk>", "x", "y"), 3)
    assert rows.tolist() == [[2, 3, 2], [1, 0, 0], [1, 0, 0]]


def test_a_file_becomes_tokens_with_classes_from_0(tmp_path: Path):
    (tmp_path / "classes.txt").write_text("animals\nweather\n", encoding="utf8")
    data = load(f"text:{write(tmp_path / 'mine.csv')},words=8,length=6")
    assert (data.name, data.images.shape, data.images.dtype) == ("mine", (3, 6), np.int64)
    assert data.labels.tolist() == [0, 1, 1]
    assert data.class_names == ("animals", "weather")
    assert data.words is not None
    assert len(data.words) == 8
    assert data.words[:4] == ("<pad>", "<unk>", ".", "it")
    assert data.words[int(data.images[1, 1])] == "it"
    assert data.pixels([1]).tolist() == data.images[1:2].tolist()


def test_without_names_the_classes_are_their_numbers(tmp_path: Path):
    (tmp_path / "classes.txt").write_text("one name only\n", encoding="utf8")
    assert load(f"text:{write(tmp_path / 'mine.csv')}").class_names == ("1", "2")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no row"),
        ([("1", "title")], "row 1 has 2 columns"),
        ([("1", "a", "b"), ("0", "a", "b")], "row 2 has the class '0'"),
        ([("x", "a", "b")], "row 1 has the class 'x'"),
        ([("9" * 30, "a", "b")], "number classes from 1"),
        ([("1", "a", "b")], "at least 2 classes"),
    ],
    ids=str,
)
def test_a_file_of_another_layout_is_refused_in_one_line(tmp_path: Path, rows: list[tuple[str, ...]], message: str):
    with pytest.raises(DataError, match=message) as caught:
        load(f"text:{write(tmp_path / 'mine.csv', rows)}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe", "not UTF-8"), (b'"1","a","b', "no CSV table"), (None, "does not exist")]
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "mine.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(f"text:{path}")


@pytest.mark.parametrize("option", ["words=2", "words=x", "length=0", "length=-1", "words=1e3", "length=99999"])
def test_options_out_of_range_are_refused(tmp_path: Path, option: str):
    with pytest.raises(DataError, match="must be a whole number from"):
        load(f"text:{write(tmp_path / 'mine.csv')},{option}")


@pytest.mark.parametrize("bad", [30, -1])
def test_tokens_outside_the_vocabulary_are_refused(bad: int):
    data = toys.texts()
    tokens = data.images.copy()
    tokens[3, 2] = bad
    with pytest.raises(DataError, match=rf"token {bad} is outside 0\.\.29"):
        Dataset("bad", tokens, data.labels, 3, data.class_names, None, None, "here", data.words)


def test_a_federation_hands_out_the_tokens_themselves():
    data = toys.texts()
    fed = federation.build(data, partition="natural", clients=4, seed=0, test="given")
    x, y = fed.train(1)
    assert fed.input.vocabulary == 30
    assert fed.input.shape == (8,)
    assert x.dtype == torch.int64
    assert x.tolist() == data.images[fed.shards[1].train].tolist()
    assert y.tolist() == data.labels[fed.shards[1].train].tolist()


def test_copies_of_a_text_never_straddle_the_split():
    data = toys.texts()
    tokens = np.repeat(data.images[:12], 4, axis=0)
    labels = np.repeat(data.labels[:12], 4)
    twice = Dataset("twice", tokens, labels, 3, data.class_names, None, None, "here", data.words)
    fed = federation.build(twice, partition="iid", clients=2, seed=0)
    for shard in fed.shards:
        assert not {t.tobytes() for t in tokens[shard.train]} & {t.tobytes() for t in tokens[shard.test]}


def test_no_other_guess_of_its_size_shares_more_words_with_the_training_texts():
    """Exchanging any word of the guess for any other never helps: the expected overlap is concave in each word's count."""
    data = toys.texts()
    fed = federation.build(data, partition="natural", clients=4, seed=0, test="given")
    texts = [Counter(t[t != 0].tolist()) for t in data.images[np.concatenate([s.train for s in fed.shards])]]
    guess = fed.mean_image()
    best = Counter(guess[guess != 0].tolist())
    assert guess.shape == (8,)
    assert best.total() == round(sum(t.total() for t in texts) / len(texts))

    def shared(words: Counter[int]) -> int:
        return sum((words & t).total() for t in texts)

    assert all(shared(best) >= shared(best - Counter([old]) + Counter([new])) for old in best for new in range(1, 30))


def test_ag_news_is_read_whole(shared_data: Path):
    data = load(f"text:{shared_data / 'ag_news' / 'test.csv'}")
    assert (data.name, data.images.shape, data.classes) == ("ag_news", (7600, 32), 4)
    assert data.class_names == ("World", "Sports", "Business", "Sci/Tech")
    assert np.bincount(data.labels).tolist() == [1900] * 4
    assert data.words is not None
    assert len(data.words) == 2000
    first = [data.words[t] for t in data.images[0]]
    assert first[:9] == ["fears", "for", "t", "n", "pension", "after", "talks", "unions", "<unk>"]
    assert first[-5:] == [".", *["<pad>"] * 4]
