"""MNIST, Fashion-MNIST and CIFAR-10 from tiny files in their real formats, here and over a local network."""

import gzip
import hashlib
import inspect
import io
import pickle
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST

from pflsec.config.train import TrainConfig
from pflsec.core.errors import DataError, PflsecError
from pflsec.data import datasets, federation
from pflsec.data.datasets import Dataset
from pflsec.data.torchvision_sets import cifar10, fashion_mnist, mnist
from pflsec.runtime.setup import prepare

URLOPEN = urllib.request.urlopen
TRAIN, TEST = 30, 12
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
FUNCTIONS: dict[str, Callable[..., Dataset]] = {"mnist": mnist, "fashion-mnist": fashion_mnist, "cifar10": cifar10}
FOLDERS = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw", "cifar10": "cifar-10-batches-py"}


def pixels(rows: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (rows, *shape), dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the format of MNIST: magic number, lengths (big-endian), values."""
    return (
        bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">i4").tobytes() + array.astype(np.uint8).tobytes()
    )


def idx_files() -> dict[str, bytes]:
    arrays = (pixels(TRAIN, 28, 28), np.arange(TRAIN) % 10, pixels(TEST, 28, 28), np.arange(TEST) % 10)
    return {name: idx(array) for name, array in zip(IDX, arrays, strict=True)}


def cifar_files() -> dict[str, bytes]:
    """Batches of 6 training images and one of 12 test images, as pickles of bytes-keyed rows of 3072 values."""
    rows = [pixels(TRAIN, 3072)[6 * i : 6 * i + 6] for i in range(5)] + [pixels(TEST, 3072)]
    found = {
        name: pickle.dumps({"data": data, "labels": [(6 * i + j) % 10 for j in range(len(data))]})
        for i, (name, data) in enumerate(zip(BATCHES, rows, strict=True))
    }
    return found | {"batches.meta": pickle.dumps({"label_names": NAMES})}


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of datasets, which does not exist yet; the internet cannot be reached."""

    def no_network(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was touched")

    monkeypatch.setenv("PFLSEC_DATA", str(tmp_path / "cache" / "data"))
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    return tmp_path / "cache" / "data"


@pytest.fixture
def official(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, bytes]]:
    """For each dataset the content of its files, which torchvision takes for the official ones."""
    cifar = cifar_files()
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5(cifar[name])] for name in BATCHES[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [[name, md5(cifar[name])] for name in BATCHES[5:]])
    meta = {"filename": "batches.meta", "key": "label_names", "md5": md5(cifar["batches.meta"])}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    return {"mnist": idx_files(), "fashion-mnist": idx_files(), "cifar10": cifar}


@pytest.fixture
def present(root: Path, official: dict[str, dict[str, bytes]]) -> Path:
    """The folder of datasets with all files in place."""
    for name, content in official.items():
        (root / FOLDERS[name]).mkdir(parents=True)
        for file, data in content.items():
            (root / FOLDERS[name] / file).write_bytes(data)
    return root


def trace(root: Path) -> list[str]:
    """Everything that exists below, and the folders above that a download would have to make."""
    return [str(path) for path in root.parents[1].rglob("*")]


# --- reading


@pytest.mark.parametrize("name", FUNCTIONS)
def test_official_training_rows_come_first_and_test_rows_are_marked(present: Path, name: str):
    data = FUNCTIONS[name]()
    assert data.is_test is not None
    assert data.is_test.tolist() == [False] * TRAIN + [True] * TEST
    assert data.labels.tolist() == [i % 10 for i in range(TRAIN)] + [
        (i if name != "cifar10" else TRAIN + i) % 10 for i in range(TEST)
    ]
    assert (data.images.dtype, data.classes, data.client_ids) == (np.uint8, 10, None)
    shape = (3, 32, 32) if name == "cifar10" else (1, 28, 28)
    assert data.images.shape == (TRAIN + TEST, *shape)
    flat = (3072,) if name == "cifar10" else (28, 28)
    expected = np.concatenate([pixels(TRAIN, *flat), pixels(TEST, *flat)]).reshape(-1, *shape)
    assert np.array_equal(data.images, expected)


def test_class_names(present: Path):
    assert mnist().class_names == tuple("0123456789")
    assert fashion_mnist().class_names[0] == "T-shirt/top"
    assert cifar10().class_names == tuple(NAMES)


def test_no_official_test_row_is_trained_on(present: Path):
    data = mnist()
    assert data.is_test is not None
    fed = federation.build(data, partition="iid", clients=4, seed=0, test="given")
    assert fed.global_test.tolist() == list(range(TRAIN, TRAIN + TEST))
    assert not any(data.is_test[shard.train].any() or data.is_test[shard.test].any() for shard in fed.shards)


def test_cards_have_all_their_lines():
    for function in FUNCTIONS.values():
        lines = (inspect.getdoc(function) or "").splitlines()
        assert [line.split()[0] for line in lines[2:]] == ["Source", "Shape", "Classes", "Size", "Licence"]


# --- what is absent or damaged


@pytest.mark.parametrize("name", FUNCTIONS)
def test_absent_files_are_named_with_both_remedies(root: Path, name: str):
    with pytest.raises(DataError) as caught:
        FUNCTIONS[name]()
    text = str(caught.value)
    assert text.startswith(f"dataset '{name}': {root / FOLDERS[name]}")
    assert "does not exist. Use --download, or put the official files, unpacked, into" in text
    assert all(file in text for file in (BATCHES if name == "cifar10" else IDX))
    assert "\n" not in text
    assert trace(root) == []


@pytest.mark.parametrize("file", IDX)
def test_one_absent_file_is_named(present: Path, file: str):
    (present / "MNIST" / "raw" / file).unlink()
    with pytest.raises(DataError, match=f"raw/{file} does not exist"):
        mnist()


def test_without_a_variable_the_folder_is_in_the_home_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PFLSEC_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(DataError, match=str(tmp_path / ".cache" / "pflsec" / "data" / "MNIST" / "raw")):
        mnist()


@pytest.mark.parametrize("file", IDX)
@pytest.mark.parametrize("keep", [0, 3, 6, -1])
def test_truncated_idx_files(present: Path, file: str, keep: int):
    path = present / "FashionMNIST" / "raw" / file
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=f"{path} is truncated or damaged: it") as caught:
        fashion_mnist()
    assert "--download" in str(caught.value)


BAD_IDX: list[tuple[bytes, str]] = [
    (idx(pixels(TRAIN, 28, 28)) + b"x", "should have 23536"),
    (b"\x00\x00\x0d\x03" + idx(pixels(TRAIN, 28, 28))[4:], "does not begin as an idx file of bytes"),
    (gzip.compress(idx(pixels(TRAIN, 28, 28))), "does not begin as an idx file"),
    (idx(pixels(TRAIN)), "cannot be read: x should have 3 dimension"),
    (idx(pixels(TRAIN - 1, 28, 28)), f"labels has {TRAIN + TEST} values for {TRAIN + TEST - 1} images"),
]


@pytest.mark.parametrize(("content", "message"), BAD_IDX, ids=[message for _, message in BAD_IDX])
def test_other_idx_files(present: Path, content: bytes, message: str):
    (present / "MNIST" / "raw" / IDX[0]).write_bytes(content)
    with pytest.raises(DataError, match=message):
        mnist()


class Trap:
    """Pickles as a call that leaves a mark."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("file", [*BATCHES, "batches.meta"])
def test_a_pickle_with_a_wrong_md5_is_never_opened(present: Path, tmp_path: Path, file: str):
    path = present / "cifar-10-batches-py" / file
    path.write_bytes(
        pickle.dumps({"data": Trap(tmp_path / "ran"), "labels": [], "label_names": Trap(tmp_path / "ran")})
    )
    with pytest.raises(DataError, match=f"{path} is not the official file: its md5 is not .* not opened"):
        cifar10()
    with pytest.raises(RuntimeError, match="corrupted"):  # torchvision's own check says the same
        CIFAR10(present, train=True)
    assert not (tmp_path / "ran").exists()


def test_synthetic_files_do_not_pass_for_the_official_ones(root: Path):
    (root / "cifar-10-batches-py").mkdir(parents=True)
    for name, data in cifar_files().items():
        (root / "cifar-10-batches-py" / name).write_bytes(data)
    with pytest.raises(DataError, match="data_batch_1 is not the official file: its md5 is not c99cafc152244af753f7"):
        cifar10()


# --- downloading


def archive(content: dict[str, bytes]) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return whole.getvalue()


@pytest.fixture
def mirror(
    tmp_path_factory: pytest.TempPathFactory,
    official: dict[str, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """A folder that a local server hands out as the place of all downloads."""

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    served = tmp_path_factory.mktemp("mirror")
    monkeypatch.setattr(urllib.request, "urlopen", URLOPEN)
    monkeypatch.setenv("no_proxy", "*")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(served)))
    url = f"http://127.0.0.1:{server.server_port}/"
    for kind, name in ((MNIST, "mnist"), (FashionMNIST, "fashion-mnist")):
        packed = {f"{file}.gz": gzip.compress(data, mtime=0) for file, data in official[name].items()}
        for file, data in packed.items():
            (served / file).write_bytes(data)
        monkeypatch.setattr(kind, "mirrors", [url])
        monkeypatch.setattr(kind, "resources", [(file, md5(data)) for file, data in packed.items()])
    (served / "cifar-10-python.tar.gz").write_bytes(archive(official["cifar10"]))
    monkeypatch.setattr(CIFAR10, "url", url + "cifar-10-python.tar.gz")
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive(official["cifar10"])))
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_download_leaves_the_official_files_and_nothing_else(
    root: Path, mirror: Path, official: dict[str, dict[str, bytes]], name: str, capsys: pytest.CaptureFixture[str]
):
    data = FUNCTIONS[name](download=True)
    assert len(data.labels) == TRAIN + TEST
    kept = {path.relative_to(root / FOLDERS[name]).as_posix(): path for path in root.rglob("*") if path.is_file()}
    assert {file: path.read_bytes() for file, path in kept.items()} == official[name]
    assert [path.name for path in root.iterdir()] == [FOLDERS[name].split("/")[0]]
    assert capsys.readouterr().out == "", "stdout is for results"
    again = FUNCTIONS[name]()
    assert np.array_equal(again.images, data.images)


def test_files_that_are_here_are_not_downloaded(present: Path):
    for function in FUNCTIONS.values():
        assert len(function(download=True).labels) == TRAIN + TEST


def test_a_download_repairs_what_is_damaged(root: Path, mirror: Path):
    cifar10(download=True)
    mnist(download=True)
    for path in (root / "cifar-10-batches-py" / "data_batch_2", root / "MNIST" / "raw" / IDX[2]):
        path.write_bytes(path.read_bytes()[:-1])
    for function in (mnist, cifar10):
        with pytest.raises(DataError):
            function()
        assert len(function(download=True).labels) == TRAIN + TEST
        function()


def unreachable(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise urllib.error.URLError("Temporary failure in name resolution")

    monkeypatch.setattr(urllib.request, "urlopen", fail)


def last_file_missing(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mirror / f"{IDX[3]}.gz").unlink()
    (mirror / "cifar-10-python.tar.gz").unlink()


def changed_on_the_way(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (mirror / f"{IDX[3]}.gz", mirror / "cifar-10-python.tar.gz"):
        path.write_bytes(path.read_bytes() + b"!")


def one_batch_missing(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is what was announced, but not what was promised."""
    content = archive({name: data for name, data in cifar_files().items() if name != "test_batch"})
    (mirror / "cifar-10-python.tar.gz").write_bytes(content)
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(content))
    (mirror / f"{IDX[3]}.gz").write_bytes(b"no gzip")
    found = [(file, md5((mirror / file).read_bytes())) for file, _ in MNIST.resources]
    monkeypatch.setattr(MNIST, "resources", found)


def disk_full(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", fail)


@pytest.mark.parametrize("name", ["mnist", "cifar10"])
@pytest.mark.parametrize("break_it", [unreachable, last_file_missing, changed_on_the_way, one_batch_missing, disk_full])
def test_a_failed_download_is_one_sentence_and_leaves_nothing(
    root: Path,
    mirror: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    break_it: Callable[[Path, pytest.MonkeyPatch], None],
):
    break_it(mirror, monkeypatch)
    with pytest.raises(DataError, match=f"dataset '{name}' could not be downloaded to {root}: ") as caught:
        FUNCTIONS[name](download=True)
    text = str(caught.value)
    assert "\n" not in text
    assert "nothing was kept" in text
    assert "Use --download" not in text
    assert "Put the official files, unpacked, into" in text
    assert caught.value.exit_code == 2
    assert trace(root) == []


def test_a_failed_download_leaves_what_was_there(present: Path, mirror: Path):
    damaged = present / "MNIST" / "raw" / IDX[0]
    damaged.write_bytes(b"half")
    last_file_missing(mirror, pytest.MonkeyPatch())
    before = trace(present)
    with pytest.raises(DataError, match="could not be downloaded"):
        mnist(download=True)
    assert trace(present) == before
    assert damaged.read_bytes() == b"half"


def test_an_interrupted_download_leaves_nothing(root: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchvision.datasets.utils.extract_archive", interrupt)
    with pytest.raises(KeyboardInterrupt):
        mnist(download=True)
    assert trace(root) == []


# --- from the command line's option to the function


def registered(group: str) -> Sequence[EntryPoint]:
    module = "pflsec.data.torchvision_sets"
    functions = {"mnist": "mnist", "fashion-mnist": "fashion_mnist", "cifar10": "cifar10"}
    ours = [EntryPoint(name, f"{module}:{function}", group) for name, function in functions.items()]
    return [*ours, EntryPoint("digits", "pflsec.data.datasets:digits", group)]


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "entry_points", registered)


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("name", ["fashion-mnist", "Fashion_MNIST", "FashionMNIST", "MNIST", "CIFAR-10"])
def test_case_and_dashes_do_not_matter(present: Path, name: str):
    assert len(datasets.load(name).labels) == TRAIN + TEST


@pytest.mark.usefixtures("_registered")
def test_download_is_asked_for_by_the_option_alone(root: Path, mirror: Path):
    with pytest.raises(DataError, match="Use --download"):
        datasets.load("mnist")
    assert trace(root) == []
    assert len(datasets.load("mnist", download=True).labels) == TRAIN + TEST
    assert len(datasets.load("digits", download=True).labels) == 1797
    with pytest.raises(DataError, match="'mnist' takes no argument, but got 'yes'"):
        datasets.load("mnist:yes", download=True)


@pytest.mark.usefixtures("_registered")
def test_a_run_downloads_when_told_to_and_does_not_record_that(root: Path, mirror: Path):
    options: dict[str, Any] = {
        "data": "mnist",
        "clients": 2,
        "partition": "iid",
        "model": "mlp",
        "capture_rounds": "none",
    }
    with pytest.raises(PflsecError, match="Use --download"):
        prepare(TrainConfig(**options))
    setup = prepare(TrainConfig(**options, download=True))
    assert setup.federation.dataset.name == "mnist"
    later = prepare(TrainConfig(**options))
    assert setup.config.model_dump() == later.config.model_dump()
    assert setup.federation.fingerprint() == later.federation.fingerprint()
