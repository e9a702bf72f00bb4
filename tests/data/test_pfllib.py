"""Folders of PFLlib: its clients come back, and no pickle is trusted."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pflsec.core.errors import DataError, PflsecWarning
from pflsec.data import datasets, federation
from pflsec.data.datasets import Dataset
from pflsec.data.pfllib import pfllib

ROWS = (8, 4, 7, 3, 9, 5)
"""Images in train/0, test/0, train/1, test/1, train/2 and test/2."""


def levels(channels: int = 1) -> np.ndarray:
    """One image per row, whole levels of 0..255, all different."""
    return np.random.default_rng(0).integers(0, 256, (sum(ROWS), channels, 6, 5), dtype=np.uint8)


LABELS = np.arange(sum(ROWS)) % 4
PARTS = np.split(np.arange(sum(ROWS)), np.cumsum(ROWS)[:-1])


def files(folder: Path) -> list[Path]:
    return [folder / side / f"{client}.npz" for client in range(3) for side in ("train", "test")]


def write(folder: Path, x: Any, y: Any = LABELS, save: Callable[[Path, Any], None] | None = None) -> Path:
    """Write a folder of three clients as PFLlib does."""
    for path, rows in zip(files(folder), PARTS, strict=True):
        path.parent.mkdir(exist_ok=True, parents=True)
        content = {"x": x[rows], "y": y[rows]}
        if save:
            save(path, content)
        else:
            np.savez_compressed(path, data=np.array(content, dtype=object))
    return folder


def normalised(pixels: np.ndarray) -> np.ndarray:
    """As torchvision's ToTensor and Normalize(0.5, 0.5) do it, in float32."""
    return (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


def config(folder: Path, **changes: Any) -> None:
    client = np.repeat([0, 0, 1, 1, 2, 2], ROWS)
    counts = [[[c, int(((client == i) & (c == LABELS)).sum())] for c in range(4)] for i in range(3)]
    facts = {"num_clients": 3, "num_classes": 4, "Size of samples for labels in clients": counts, "batch_size": 10}
    (folder / "config.json").write_text(json.dumps(facts | changes))


def whole(path: Path, payload: bytes) -> None:
    """Write a file that holds this pickle, in place of the one that NumPy would write."""
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": "|O", "fortran_order": False, "shape": ()})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.npy", text.getvalue() + payload)


def boxed(content: Any, protocol: int = 4) -> bytes:
    return pickle.dumps(np.array(content, dtype=object), protocol)


# --- what is read


@pytest.mark.parametrize("channels", [1, 3])
def test_clients_labels_test_rows_and_pixels_come_back(tmp_path: Path, channels: int):
    write(tmp_path / "Toy", normalised(levels(channels)))
    config(tmp_path / "Toy")
    data = pfllib(str(tmp_path / "Toy"))
    assert data.images.dtype == np.uint8
    assert np.array_equal(data.images, levels(channels))
    assert np.array_equal(data.labels, LABELS)
    assert data.client_ids is not None
    assert data.is_test is not None
    assert data.client_ids.tolist() == np.repeat([0, 0, 1, 1, 2, 2], ROWS).tolist()
    assert data.is_test.tolist() == np.repeat([False, True] * 3, ROWS).tolist()
    assert (data.name, data.classes, str(tmp_path) in data.source) == ("Toy", 4, True)


def test_natural_clients_with_given_test_rows_are_pfllibs_own(tmp_path: Path):
    data = pfllib(str(write(tmp_path, normalised(levels()))))
    fed = federation.build(data, partition="natural", clients=None, seed=5, test="given")
    assert fed.clients == 3
    for client, shard in enumerate(fed.shards):
        assert shard.train.tolist() == PARTS[2 * client].tolist()
        assert shard.test.tolist() == PARTS[2 * client + 1].tolist()


def test_every_level_comes_back_from_either_normalisation(tmp_path: Path):
    pixels = np.resize(np.arange(256, dtype=np.uint8), levels().shape)
    for number, x in enumerate((normalised(pixels), pixels.astype(np.float32) / np.float32(255))):
        data = pfllib(str(write(tmp_path / str(number), x)))
        assert data.images.dtype == np.uint8
        assert np.array_equal(data.images, pixels)


def test_a_bright_client_is_scaled_as_the_others_are(tmp_path: Path):
    pixels = levels()
    pixels[PARTS[2]] |= 128
    assert np.array_equal(pfllib(str(write(tmp_path, normalised(pixels)))).images, pixels)


@pytest.mark.parametrize("low", [0, -1])
def test_pixels_between_the_levels_stay_fractions(tmp_path: Path, low: int):
    fractions = np.random.default_rng(0).random(levels().shape, dtype=np.float32)
    data = pfllib(str(write(tmp_path, fractions * (1 - low) + low)))
    assert data.images.dtype == np.float32
    assert np.abs(data.images - fractions).max() < 1e-6
    assert data.images.min() >= 0
    assert data.images.max() <= 1


def test_truth_values_and_bytes_are_pixels(tmp_path: Path):
    ink = levels() > 99
    assert np.array_equal(pfllib(str(write(tmp_path / "bits", ink))).images, ink * np.uint8(255))
    assert np.array_equal(pfllib(str(write(tmp_path / "bytes", levels()))).images, levels())


def as_lists(path: Path, content: dict[str, Any]) -> None:
    """As for Omniglot, Camelyon17 and iWildCam: a list of arrays, and a list of numbers."""
    whole(path, boxed({"x": list(content["x"]), "y": content["y"].tolist()}))


def as_numpy_scalars(path: Path, content: dict[str, Any]) -> None:
    whole(path, boxed({"x": list(content["x"]), "y": list(content["y"])}))


def as_old_numpy(path: Path, content: dict[str, Any]) -> None:
    """Protocol 3, and the module names from before NumPy 2."""
    payload = boxed(content, 3)
    assert b"numpy._core.multiarray\n" in payload
    whole(path, payload.replace(b"numpy._core.", b"numpy.core."))


def as_protocol_5(path: Path, content: dict[str, Any]) -> None:
    payload = boxed(content, 5)
    assert b"_frombuffer" in payload
    whole(path, payload)


def by_columns(path: Path, content: dict[str, Any]) -> None:
    whole(path, boxed({"x": np.asfortranarray(content["x"]), "y": content["y"]}))


def big_endian(path: Path, content: dict[str, Any]) -> None:
    whole(path, boxed({"x": content["x"].astype(">f4"), "y": content["y"].astype(">i4")}))


@pytest.mark.parametrize("save", [as_lists, as_numpy_scalars, as_old_numpy, as_protocol_5, by_columns, big_endian])
def test_forms_of_pickles(tmp_path: Path, save: Callable[[Path, Any], None]):
    data = pfllib(str(write(tmp_path, normalised(levels(3)), save=save)))
    assert np.array_equal(data.images, levels(3))
    assert np.array_equal(data.labels, LABELS)


def test_pfllibs_mnist(shared_data: Path, tmp_path: Path):
    """PFLlib's own clients, cut to 30 rows a side: the order of rows and every pixel."""
    with (
        np.load(shared_data / "mnist" / "mnist70k.npz") as mnist,
        np.load(shared_data / "mnist" / "pfllib_dir01_order.npz") as order,
    ):
        rows = [order[f"{side}_{client}"][:30] for client in range(20) for side in ("train", "test")]
        images, labels = mnist["images"][:, None], mnist["labels"]
    for i, held in enumerate(rows):
        path = tmp_path / ("train", "test")[i % 2] / f"{i // 2}.npz"
        path.parent.mkdir(exist_ok=True)
        np.savez_compressed(path, data=np.array({"x": normalised(images[held]), "y": labels[held]}, dtype=object))
    data = pfllib(str(tmp_path))
    assert np.array_equal(data.images, images[np.concatenate(rows)])
    assert np.array_equal(data.labels, labels[np.concatenate(rows)])
    fed = federation.build(data, partition="natural", clients=None, seed=0, test="given")
    assert fed.sizes() == [len(held) for held in rows[::2]]
    assert np.array_equal(fed.train(19)[1].numpy(), labels[rows[38]])


# --- config.json


def test_without_a_configuration_the_largest_label_counts(tmp_path: Path):
    assert pfllib(str(write(tmp_path, levels()))).classes == 4


def test_a_configuration_may_know_more_classes(tmp_path: Path):
    write(tmp_path, levels())
    config(tmp_path, num_classes=6)
    assert pfllib(str(tmp_path)).classes == 6


def test_a_configuration_without_counts_is_accepted(tmp_path: Path):
    write(tmp_path, levels())
    config(tmp_path, **{"Size of samples for labels in clients": None})
    assert pfllib(str(tmp_path)).classes == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_clients": 20}, "num_clients is 20, but there are 3"),
        ({"num_classes": 2}, "num_classes is 2, but labels go up to 3"),
        ({"num_classes": None}, "num_classes is None, but labels go up to 3"),
        ({"num_classes": 10**9}, "num_classes is 1000000000, but labels go up to 3"),
        ({"Size of samples for labels in clients": [[[0, 1]]] * 3}, "labels of client 0 are not those of its files"),
        ({"Size of samples for labels in clients": [[[0, 1]]]}, "labels of 1 clients, but there are 3"),
        ({"Size of samples for labels in clients": [1, 2, 3]}, "cannot be understood"),
        ({"Size of samples for labels in clients": {"a": 1, "b": 2, "c": 3}}, "cannot be understood"),
    ],
)
def test_differences_are_warned_about_and_the_files_are_believed(tmp_path: Path, changes: dict[str, Any], message: str):
    write(tmp_path, levels())
    config(tmp_path, **changes)
    with pytest.warns(PflsecWarning, match=message) as caught:
        data = pfllib(str(tmp_path))
    assert str(tmp_path / "config.json") in str(caught[0].message)
    assert data.client_ids is not None
    assert (data.classes, len(np.unique(data.client_ids))) == (4, 3)


@pytest.mark.parametrize("text", ["{", "[]", "7", "\udcff", "[" * 100_000])
def test_a_damaged_configuration_is_warned_about(tmp_path: Path, text: str):
    write(tmp_path, levels())
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(PflsecWarning, match="cannot be understood"):
        assert pfllib(str(tmp_path)).classes == 4


# --- what is refused


class Call:
    """Pickles as a call, which happens as soon as the pickle is opened by an ordinary reader."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, f"{os.system.__module__}.system"), (eval, "builtins.eval"), (np.load, "numpy.load")],
)
@pytest.mark.parametrize("place", ["alone", "x", "inside a list", "shape"])
def test_calls_are_refused_by_name_and_do_not_happen(
    tmp_path: Path, function: Callable[..., Any], name: str, place: str
):
    marker = tmp_path / "ran"
    argument = {
        "system": f"touch {marker}",
        "eval": f"__import__('pathlib').Path({str(marker)!r}).touch()",
        "load": str(marker),
    }[function.__name__]
    call = Call(function, argument)
    write(tmp_path / "set", levels())
    bad = files(tmp_path / "set")[3]
    good = {"x": levels(), "y": LABELS}
    content = {
        "alone": call,
        "x": good | {"x": call},
        "inside a list": good | {"x": [call]},
        "shape": good | {"z": call},
    }
    whole(bad, boxed(content[place]))
    with pytest.raises(DataError, match=name) as caught:
        pfllib(str(tmp_path / "set"))
    assert str(bad) in str(caught.value)
    assert not marker.exists()


def globals_of(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


NDARRAY = globals_of("numpy", "ndarray")
NOT_PLAIN: list[tuple[str, bytes, str]] = [
    ("a bare array in memory", NDARRAY + b"K\x05\x85R.", "without saying what it holds"),
    ("a changed function", NDARRAY + b"}X\x04\x00\x00\x00doctX\x01\x00\x00\x00ysb.", "tries to change a function"),
    ("a new object", NDARRAY + b")\x81.", "truncated or damaged"),
    ("a dtype of objects in a scalar", globals_of("numpy.core.multiarray", "scalar") + globals_of("numpy", "dtype")
     + b"X\x02\x00\x00\x00O8\x85RC\x00\x86R.", "Python objects"),
    ("a structured dtype", globals_of("numpy", "dtype") + b"X\x03\x00\x00\x00V16\x85R.", "elements of kind 'V16'"),
    ("memory for values that are not there", b"Nr\xff\xff\xff\xff.", "numbers its values without need"),
    ("the same in words", b"Np4294967295\n.", "numbers its values without need"),
    ("an object by number", b"\x82\x01.", "truncated or damaged"),
    ("a persistent object", b"Pabc\n.", "truncated or damaged"),
    ("not a dictionary", b"K\x01.", "does not hold a dictionary with x and y"),
    ("nothing", b"", "truncated or damaged"),
    ("half of a pickle", boxed({"x": levels(), "y": LABELS})[:-300], "truncated or damaged"),
]  # fmt: skip


@pytest.mark.parametrize(("payload", "message"), [case[1:] for case in NOT_PLAIN], ids=[case[0] for case in NOT_PLAIN])
def test_pickles_that_are_no_images(tmp_path: Path, payload: bytes, message: str):
    write(tmp_path, levels())
    whole(files(tmp_path)[2], payload)
    with pytest.raises(DataError, match=message) as caught:
        pfllib(str(tmp_path))
    assert str(files(tmp_path)[2]) in str(caught.value)
    assert "\n" not in str(caught.value)


def texts(n: int) -> np.ndarray:
    rows = np.empty((n, 2), dtype=object)
    rows[:] = [[[1, 2, 3], 3]] * n
    return rows


OTHER: list[tuple[str, Any, Any, str]] = [
    ("AG News", texts(5), np.arange(5), "Python objects .as PFLlib's texts do.*only folders of images are read"),
    ("Shakespeare", np.ones((5, 80), dtype=np.int64), np.arange(5), r"int64 \[5, 80\].*only folders of images"),
    ("HAR", np.ones((5, 9, 1, 128)), np.arange(5), r"float64 \[5, 9, 1, 128\].*only folders of images"),
    ("integers", np.ones((5, 1, 6, 5), dtype=np.int64), np.arange(5), r"int64 \[5, 1, 6, 5\]"),
    ("complex numbers", np.ones((5, 1, 6, 5), dtype=complex), np.arange(5), "elements of kind 'c16'"),
    ("words", np.ones((5, 1, 6, 5), dtype="U3"), np.arange(5), "elements of kind 'U3'"),
    ("nothing", levels()[:0], np.arange(0), "for 0 images"),
    ("flat images", np.ones((5, 1, 0, 5), dtype=np.float32), np.arange(5), "for 5 images"),
    ("an empty list", [], [], "of different shapes, or empty"),
    ("ragged", [np.ones((1, 6, 5)), np.ones((1, 5, 6))], [0, 1], "of different shapes, or empty"),
    ("a dictionary", {"a": 1}, [0, 1], "x is no array and no list of arrays"),
    ("texts in a list", ["a", "b"], [0, 1], "x is no array and no list of arrays"),
    ("another size", np.ones((5, 1, 7, 5), dtype=np.float32), np.arange(5), r"float32 \[1, 7, 5\], but in"),
    ("another dtype", np.ones((5, 1, 6, 5), dtype=bool), np.arange(5), r"bool \[1, 6, 5\], but in"),
    ("few labels", np.ones((5, 1, 6, 5), dtype=np.float32), np.arange(4), r"y is int64 \[4\] for 5 images"),
    ("half labels", np.ones((5, 1, 6, 5), dtype=np.float32), np.arange(5) / 2, r"y is float64 \[5\] for 5 images"),
    ("wide range", np.full((5, 1, 6, 5), 2, dtype=np.float32), np.arange(5) % 4, r"lie in \[-1, 2\]"),
    ("not a number", np.full((5, 1, 6, 5), np.nan, dtype=np.float32), np.arange(5) % 4, "x holds a NaN"),
    ("many classes", np.ones((5, 1, 6, 5), dtype=np.float32), np.arange(5) * 10**9, "labels go up to 4000000000 in"),
]


@pytest.mark.parametrize(("x", "y", "message"), [case[1:] for case in OTHER], ids=[case[0] for case in OTHER])
def test_contents_that_are_no_images(tmp_path: Path, x: Any, y: Any, message: str):
    pixels = levels()
    pixels[0] = 0
    write(tmp_path, normalised(pixels))
    whole(files(tmp_path)[-1], boxed({"x": x, "y": y}))
    with pytest.raises(DataError, match=message) as caught:
        pfllib(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def no_archive(path: Path) -> None:
    path.write_bytes(b"something else")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def garbled(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[90:130] = bytes(40)
    path.write_bytes(bytes(content))


def plain_arrays(path: Path) -> None:
    np.savez(path, x=levels(), y=LABELS)


def a_number(path: Path) -> None:
    np.savez(path, data=np.ones(3))


def a_bomb(path: Path) -> None:
    """Announces more bytes than are read; they need not be there."""
    whole(path, b"N.")
    content = path.read_bytes()
    start = content.index(b"PK\x01\x02") + 24
    path.write_bytes(content[:start] + struct.pack("<I", 0xFFFFFFF0) + content[start + 4 :])
    with zipfile.ZipFile(path) as archive:
        assert archive.infolist()[0].file_size == 0xFFFFFFF0


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_archive, r"no \.npz \(zip\) archive"),
        (cut_short, "truncated"),
        (garbled, "truncated or damaged"),
        (plain_arrays, "must hold data.npy alone.*x.npy, y.npy"),
        (a_number, r"data.npy is float64 \[3\], not a dictionary"),
        (a_bomb, "unpacks to 4.0 GiB; at most 3"),
        (a_folder, "is no .npz|cannot be read"),
        (Path.unlink, "lacks train/1.npz, though it has clients up to 2"),
    ],
)
def test_damaged_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], message: str):
    monkeypatch.setattr("pflsec.data.pfllib.LARGEST", 3 * 2**30)
    write(tmp_path, levels())
    damage(files(tmp_path)[2])
    with pytest.raises(DataError, match=message) as caught:
        pfllib(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def without_tests(folder: Path) -> None:
    shutil.rmtree(folder / "test")


def as_femnist(folder: Path) -> None:
    for side in ("train", "test"):
        for path in (folder / side).iterdir():
            path.rename(folder / f"{side}{path.name}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "does not exist; give it as in --data pfllib:PATH"),
        (without_tests, "lacks test/0.npz"),
        (as_femnist, r"has (train|test)\d.npz beside train/, as PFLlib's FEMNIST has; only folders of images are read"),
        (lambda folder: (folder / "train" / "2.npz").rename(folder / "train" / "02.npz"), "lacks train/2.npz"),
        (lambda folder: [shutil.rmtree(folder / side) for side in ("train", "test")], "has no train/0.npz"),
    ],
)
def test_folders_of_another_form(tmp_path: Path, change: Callable[[Path], Any], message: str):
    folder = write(tmp_path / "set", levels())
    change(folder)
    with pytest.raises(DataError, match=message):
        pfllib(str(folder))


def test_it_is_named_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets, "entry_points", registered)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "set", levels())
    data: Dataset = datasets.load("pfllib:~/set", download=True)
    assert len(data.labels) == sum(ROWS)
    with pytest.raises(DataError, match="write --data pfllib:PATH"):
        datasets.load("pfllib")


def registered(group: str) -> Sequence[Any]:
    from importlib.metadata import EntryPoint

    return [EntryPoint("pfllib", "pflsec.data.pfllib:pfllib", group)]
