"""Datasets: what is accepted, and one clear sentence for what is not."""

import io
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pflsec.core import registry
from pflsec.core.errors import DataError, PflsecWarning
from pflsec.data import datasets
from pflsec.data.datasets import Dataset, from_arrays, load


def images(n: int = 6, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, *(shape or (5, 4))), dtype=np.uint8)


LABELS = np.array([0, 1, 2, 0, 1, 2])


def write(folder: Path, **arrays: Any) -> Path:
    path = folder / "mine.npz"
    np.savez_compressed(path, **arrays)
    return path


# --- what is accepted


def test_digits_have_exact_pixels_and_need_no_argument():
    data = load("digits")
    assert (data.images.shape, data.images.dtype, data.classes) == ((1797, 1, 8, 8), np.float32, 10)
    assert np.array_equal(data.images * 16, np.rint(data.images * 16))
    assert (data.images.min(), data.images.max()) == (0, 1)
    assert data.client_ids is None
    assert data.is_test is None


def test_dataset_cards_are_readable_without_importing():
    for name in ("digits", "npz"):
        card = registry.card("datasets", name)
        assert {"Source", "Shape", "Classes", "Size", "Licence"} <= set(card.sections)
        assert card.title


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (images(6, 5, 4), (6, 1, 5, 4)),
        (images(6, 5, 4, 3), (6, 3, 5, 4)),
        (images(6, 5, 4, 1), (6, 1, 5, 4)),
        (images(6, 3, 5, 4), (6, 3, 5, 4)),
        (images(6, 1, 5, 4), (6, 1, 5, 4)),
        (images(6, 9, 1, 16), (6, 9, 1, 16)),  # signals of 9 channels
        (images(6, 5, 1, 3), (6, 3, 5, 1)),  # as before: colours last
    ],
)
def test_layouts(given: np.ndarray, expected: tuple[int, ...]):
    data = from_arrays(given, LABELS)
    assert data.images.shape == expected
    first = given[0] if given.ndim == 3 else given[0, ..., 0] if given.shape[-1] in (1, 3) else given[0, 0]
    assert np.array_equal(data.images[0, 0], first)


def test_kinds_of_pixels_end_in_the_unit_interval():
    whole = from_arrays(images(), LABELS)
    assert torch.equal(whole.pixels([0, 2]), torch.from_numpy(images()[[0, 2], None]).float() / 255)
    assert whole.pixels([0]).dtype == torch.float32
    fractions = from_arrays(images() / 255, LABELS)
    assert fractions.images.dtype == np.float32
    assert torch.allclose(fractions.pixels(range(6)), whole.pixels(range(6)), atol=1e-7, rtol=0)
    bits = from_arrays(images() > 100, LABELS)
    assert set(bits.pixels(range(6)).unique().tolist()) == {0.0, 1.0}


def test_pixels_are_copies():
    data = from_arrays(images() / 255, LABELS)
    before = data.images.copy()
    data.pixels([0, 1]).zero_()
    assert np.array_equal(data.images, before)


def test_tensors_lists_ids_flags_and_names_are_accepted():
    data = from_arrays(
        torch.rand(6, 3, 5, 4, dtype=torch.float64, requires_grad=True),
        LABELS.tolist(),
        client_ids=torch.tensor([7, 7, 7, 9, 9, 9], dtype=torch.int16),
        is_test=np.array([0, 0, 1, 0, 0, 1], dtype=np.int8),
        class_names=["a", "b", "c", "never seen"],
    )
    assert (data.classes, data.class_names[3]) == (4, "never seen")
    assert data.client_ids is not None
    assert data.is_test is not None
    assert (data.labels.dtype, data.client_ids.dtype, data.is_test.dtype) == (np.int64, np.int64, np.bool_)
    assert data.is_test.tolist() == [False, False, True, False, False, True]


def test_npz_round_trip_and_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(
        tmp_path,
        images=images(6, 5, 4, 3),
        labels=LABELS,
        client=LABELS,
        is_test=LABELS > 1,
        other=np.ones(3),
    )
    data = load("npz:~/mine.npz")
    assert (data.name, data.images.shape, data.classes) == ("mine", (6, 3, 5, 4), 3)
    assert data.client_ids is not None
    assert data.client_ids.tolist() == LABELS.tolist()
    assert data.source == str(tmp_path / "mine.npz")


def test_a_class_without_rows_is_warned_about():
    with pytest.warns(PflsecWarning, match="no row has label 1"):
        assert from_arrays(images(), LABELS * 2).classes == 5


@pytest.mark.parametrize(
    ("file", "shape", "natural", "flags"),
    [
        ("mnist/mnist70k.npz", (70000, 1, 28, 28), True, True),
        ("cifar10/cifar10_train10k.npz", (10000, 3, 32, 32), False, False),
        ("fashion_mnist/fashion_mnist_test10k.npz", (10000, 1, 28, 28), False, False),
        ("usps/usps.npz", (9298, 1, 16, 16), False, True),
        ("digits_domains/digits_domains.npz", (4000, 3, 32, 32), False, False),
    ],
)
def test_real_files(shared_data: Path, file: str, shape: tuple, natural: bool, flags: bool):
    data = load(f"npz:{shared_data / file}")
    assert (data.images.shape, data.images.dtype, data.classes) == (shape, np.uint8, 10)
    assert (data.client_ids is not None, data.is_test is not None) == (natural, flags)
    with np.load(shared_data / file) as raw:
        kept = raw["images"][17]
        assert np.array_equal(data.images[17], kept[None] if kept.ndim == 2 else kept.transpose(2, 0, 1))
        assert np.array_equal(data.labels, raw["labels"])
    if "cifar" in file:
        assert "airplane" in data.class_names


# --- what is refused

HUGE = np.iinfo(np.int64).max
BAD_ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"images": images()[:0]}, r"images have shape \[0, 1, 5, 4\].*\[N, C, H, W\]"),
    ({"images": images(6, 5, 4, 2)}, "ambiguous: neither the second nor the last axis"),
    ({"images": images(6, 3, 5, 3)}, "ambiguous: both the second and the last axis"),
    ({"images": images(6, 1, 5, 3)}, "ambiguous: both"),
    ({"images": images(6)[:, 0]}, r"shape \[6, 4\]; use \[N, H, W\]"),
    ({"images": images().astype(np.int64)}, "dtype int64; use uint8"),
    ({"images": images().astype(np.float32)}, r"must lie in \[0, 1\].*divide by 255"),
    ({"images": images() / -255}, r"these lie in \[-0.97\d*, .*undo any normalisation"),
    ({"images": np.where(images() == images()[3, 0, 0], np.nan, 0.5)}, "image [0-3] .*NaN or an infinity"),
    (
        {"images": np.where(np.arange(6)[:, None, None] == 4, np.inf, images() / 255)},
        "image 4 .*NaN or an inf",
    ),
    ({"images": images().astype(object)}, "images holds Python objects; store it as a plain"),
    ({"images": [[[1, 2]], [[1]]]}, "images is no regular array; give all rows one shape"),
    ({"labels": LABELS[:5]}, "labels has 5 values for 6 images"),
    ({"labels": LABELS[:, None]}, r"labels has shape \[6, 1\]; give a vector"),
    ({"labels": LABELS / 2}, "labels must be whole numbers.*float64.*int64"),
    ({"labels": np.array(list("abcabc"))}, "labels must be whole numbers"),
    ({"labels": LABELS - 1}, "label -1 is outside 0..1"),
    ({"labels": LABELS * 0}, "at least 2 classes are needed, but all labels are 0"),
    ({"labels": LABELS * 0 + 3}, "at least 2 classes are needed, but all labels are 3"),
    ({"labels": LABELS * 100}, "labels go up to 200 in 6 rows"),
    ({"labels": LABELS * (HUGE // 2)}, "labels go up to .* in 6 rows"),
    ({"class_names": ["a", "b"]}, "label 2 is outside 0..1"),
    ({"class_names": [1, 2, 3]}, "class_names must be a list of texts"),
    ({"client_ids": LABELS[:5]}, "client_ids has 5 values for 6 images"),
    ({"client_ids": LABELS + 0.5}, "client must be whole numbers"),
    ({"is_test": LABELS}, "is_test must be true/false or 0/1"),
    ({"is_test": LABELS[:5] > 1}, "is_test has 5 values for 6 images"),
    ({"is_test": LABELS / 2}, "is_test must be true/false or 0/1"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("change", "message"), BAD_ARRAYS, ids=[message for _, message in BAD_ARRAYS])
def test_bad_arrays(change: dict[str, Any], message: str):
    arguments: dict[str, Any] = {"images": images(), "labels": LABELS} | change
    with pytest.raises(DataError, match=message) as caught:
        from_arrays(arguments.pop("images"), arguments.pop("labels"), name="cats", **arguments)
    assert str(caught.value).startswith("dataset 'cats': ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": images()}, r"shape \[6, 5, 4\]"),
        ({"images": images(6, 1, 5, 4) / 255}, "dtype float64"),
        ({"labels": LABELS.astype(np.int32)}, "labels has dtype int32; it must be int64"),
        ({"classes": 2, "class_names": ("a", "b")}, "label 2 is outside"),
        ({"class_names": ("a",)}, "class_names has 1 names for 3 classes"),
        ({"is_test": LABELS}, "is_test has dtype int64; it must be bool"),
    ],
)
def test_a_dataset_made_by_hand_is_checked_too(change: dict[str, Any], message: str):
    good = Dataset("hand", images(6, 1, 5, 4), LABELS, 3, ("a", "b", "c"), None, None, "here")
    with pytest.raises(DataError, match=message):
        replace(good, **change)


def not_a_zip(path: Path) -> None:
    path.write_bytes(b"not a zip file at all")


def plain_npy(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, images())


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def cut_to_three_bytes(path: Path) -> None:
    path.write_bytes(b"PK\x03")


def bytes_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[80:110] = bytes(30)
    path.write_bytes(bytes(data))


def without_labels(path: Path) -> None:
    np.savez(path, images=images(), target=LABELS)


def pickled(path: Path) -> None:
    np.savez(path, images=images(), labels=np.array([{"a": 1}] * 6, dtype=object))


def not_an_array(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images", b"hello")
        archive.writestr("labels", b"hello")


def lying_header(path: Path) -> None:
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": "|u1", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", text.getvalue() + b"abc")
        archive.writestr("labels.npy", b"")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "mine.npz does not exist; give the path"),
        (a_folder, "mine.npz is not a file"),
        (not_a_zip, r"is no \.npz \(zip\) archive"),
        (plain_npy, r"is no \.npz \(zip\) archive"),
        (cut_short, "truncated or damaged"),
        (cut_to_three_bytes, "truncated or damaged"),
        (bytes_flipped, "truncated or damaged"),
        (without_labels, "lacks the array 'labels'; it holds 'images', 'target'"),
        (pickled, "'labels' holds Python objects, which could run code"),
        (not_an_array, "'images' is no NumPy array"),
        (lying_header, "'images' (is truncated or damaged|does not fit into memory)"),
    ],
)
def test_bad_files(tmp_path: Path, damage: Callable[[Path], None], message: str):
    path = write(tmp_path, images=images(), labels=LABELS)
    damage(path)
    with pytest.raises(DataError, match=message) as caught:
        load(f"npz:{path}")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reading_a_file_never_runs_its_code(tmp_path: Path):
    marker = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    trap = np.empty(6, dtype=object)
    trap[:] = [Trap()] * 6
    path = write(tmp_path, images=images(), labels=trap)
    with pytest.raises(DataError, match="Python objects"):
        load(f"npz:{path}")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "dataset 'digit' is not known; did you mean digits?"),
        ("", "dataset '' is not known"),
        ("digits:here", "'digits' takes no argument, but got 'here'; write --data digits."),
        ("npz", "'npz' needs an argument and got none; write --data npz:PATH."),
        ("npz:", "needs an argument and got none"),
    ],
)
def test_bad_names(spec: str, message: str):
    with pytest.raises(DataError, match=re.escape(message)):
        load(spec)


def test_a_strangers_dataset_is_found_and_checked(monkeypatch: pytest.MonkeyPatch):
    def ours(group: str) -> list[EntryPoint]:
        return [
            EntryPoint("good", f"{__name__}:stranger", group),
            EntryPoint("wrong", f"{__name__}:write", group),
            EntryPoint("number", f"{__name__}:number", group),
            EntryPoint("gone", "no_such_module_here:x", group),
        ]

    monkeypatch.setattr(datasets, "entry_points", ours)
    assert load("Good").name == "stranger"
    assert load("good:7").name == "7"
    with pytest.raises(DataError, match=r"'gone' \(no_such_module_here:x\) cannot be imported"):
        load("gone")
    with pytest.raises(DataError, match="returned a int, not a Dataset"):
        load("number")


def stranger(name: str = "stranger") -> Dataset:
    return from_arrays(images(), LABELS, name=name)


def number() -> int:
    return 3
