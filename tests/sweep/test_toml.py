"""Where the keys of a TOML file stand, and what is no TOML file."""

from pathlib import Path

import pytest

from pflsec.core.errors import ConfigError
from pflsec.sweep import toml

TEXT = '''\
# lr = 0
name = "lr"

[train]
about = """
lr = 5
[settings]
"""
defense = [
  ["lr"],
  []
]
  lr = 1
"alpha" = 2

[[attack]]
name = "a"

[[attack]]
lr = 3
settings = { tv = 1 }
[settings.fedprox]
mu = 1
'''


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (("name",), (2, 1)),
        (("train",), (4, 2)),
        (("train", "lr"), (13, 3)),
        (("train", "alpha"), (14, 2)),
        (("train", "defense"), (9, 1)),
        (("train", "defense", 0), (9, 1)),
        (("attack", 1), (19, 3)),
        (("attack", 1, "lr"), (20, 1)),
        (("attack", 1, "settings", "tv"), (21, 14)),
        (("settings", "fedprox", "mu"), (23, 1)),
        (("attack", 0, "lr"), None),
        (("gone",), None),
    ],
)
def test_a_key_is_found_where_it_stands(tmp_path: Path, key: tuple, place: tuple[int, int] | None):
    (tmp_path / "x.toml").write_text(TEXT)
    assert toml.read(tmp_path / "x.toml").locate(key) == place


def test_a_mistake_about_what_is_absent_points_at_its_table(tmp_path: Path):
    (tmp_path / "x.toml").write_text(TEXT)
    assert str(toml.read(tmp_path / "x.toml").mistake(("attack", 0, "lr"), "no")).endswith(
        "x.toml, line 16, column 3: no"
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a = 1\nb = = 2\n", "line 2, column 5: this is no TOML: Invalid value"),
        (b"a = 1\na = 2\n", "line 2, column 6: this is no TOML: Cannot overwrite a value"),
        (b"a = [1,", "this is no TOML"),
        (b"\x89PNG\xff\xfe", "is no text in UTF-8: byte 0"),
        (b"a = " + b"[" * 100_000, "this is no TOML"),
        (b"a = " + b"9" * 10_000, "this is no TOML"),
        (b"#" * 1_000_001, "more than 1 MB"),
    ],
    ids=["syntax", "twice", "open", "binary", "deep", "long number", "huge"],
)
def test_what_is_no_toml_file_is_said_in_one_line(tmp_path: Path, data: bytes, said: str):
    (tmp_path / "x.toml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        toml.read(tmp_path / "x.toml")
    assert said in str(caught.value)
    assert "x.toml" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_no_file_and_a_folder_are_said(tmp_path: Path):
    for path, said in ((tmp_path / "gone.toml", "does not exist"), (tmp_path, "cannot be read: Is a directory")):
        with pytest.raises(ConfigError, match=said):
            toml.read(path)
