"""LPIPS with stand-in weights: the right file is used, every other one refused, nothing fetched."""

import dataclasses
import hashlib
import os
import warnings
from pathlib import Path
from typing import cast

import lpips
import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from pflsec.core.errors import ConfigError
from pflsec.leakage import perceptual
from pflsec.leakage.perceptual import TRUNKS, Perceptual
from tests.leakage.arrays import check_pair

FILES = {net: trunk.file for net, trunk in TRUNKS.items()}
BUILDERS = {
    "alex": torchvision.models.alexnet,
    "vgg": torchvision.models.vgg16,
    "squeeze": torchvision.models.squeezenet1_1,
}


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch) -> Path:
    """An empty home for torch, and no way to the network."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("something tried to download")

    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    return tmp_path / "torch" / "hub" / "checkpoints"


def random_state(net: str, only: str = "") -> dict[str, Tensor]:
    """Return random numbers in the layout of torchvision's file, small, so that activations stay finite."""
    with torch.device("meta"):
        layout = BUILDERS[net](weights=None).state_dict()
    rng = torch.Generator().manual_seed(1)
    return {k: 0.05 * torch.randn(v.shape, generator=rng) for k, v in layout.items() if k.startswith(only)}


def accept(monkeypatch: pytest.MonkeyPatch, net: str, path: Path) -> None:
    """Make this file's hash the expected one."""
    begins = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    monkeypatch.setitem(perceptual.TRUNKS, net, dataclasses.replace(TRUNKS[net], sha256=begins))


def install(
    monkeypatch: pytest.MonkeyPatch, net: str, path: Path, state: dict[str, Tensor] | None = None, **how
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(random_state(net) if state is None else state, path, **how)
    accept(monkeypatch, net, path)
    return path


@dataclasses.dataclass(frozen=True)
class Both:
    """Our metric, and the package's own model on the same trunk, which it loads from torch's home by itself."""

    ours: Perceptual
    native: Perceptual
    package: nn.Module

    def expected(self, truth: np.ndarray, rec: np.ndarray) -> float:
        """Return the package's LPIPS of images [3, H, W] in [0, 1], brought to its [-1, 1] by hand."""
        a, b = (torch.tensor(image[None], dtype=torch.float32) * 2 - 1 for image in (truth, rec))
        with torch.no_grad():
            return float(self.package(a, b))


@pytest.fixture(scope="module", params=["alex", "squeeze"])
def both(request, tmp_path_factory) -> Both:
    net, home = request.param, tmp_path_factory.mktemp("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_HOME", str(home))
        path = install(patch, net, home / "hub" / "checkpoints" / FILES[net])
        made = Both(Perceptual.find(net, None), Perceptual.find(net, None, native=True), package_model(net))
    path.unlink()  # large; pytest keeps its folders for some runs
    return made


@pytest.fixture
def squeeze(hub, monkeypatch) -> Perceptual:
    install(monkeypatch, "squeeze", hub / FILES["squeeze"])
    return Perceptual.find("squeeze", None)


def package_model(net: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lpips.LPIPS(net=net, verbose=False)


def resized(image: np.ndarray) -> np.ndarray:
    batch = torch.from_numpy(image)[None]
    return nn.functional.interpolate(batch, (64, 64), mode="bilinear", align_corners=False)[0].numpy()


def test_values_are_the_packages_own_on_the_same_trunk(both):
    truth, rec = check_pair(3, 64)
    assert (both.ours.status, both.ours.remedy) == ("ok", "")
    assert both.ours.name == f"lpips_{both.ours.net}64"
    assert both.ours(truth, rec) == pytest.approx(both.expected(truth, rec), abs=1e-6)
    assert both.ours(truth, rec) > 1e-3
    wide = np.tile(truth, (1, 1, 2)), np.tile(rec, (1, 1, 2))  # 64x128: no resizing
    assert both.ours(*wide) == pytest.approx(both.expected(*wide), abs=1e-6)


def test_small_images_are_resized_and_grey_ones_repeated(both):
    truth, rec = check_pair(3, 32)
    assert both.ours(truth, rec) == pytest.approx(both.expected(resized(truth), resized(rec)), abs=1e-6)
    grey, guess = check_pair(1, 28)
    expected = both.expected(resized(grey.repeat(3, axis=0)), resized(guess.repeat(3, axis=0)))
    assert both.ours(grey, guess) == pytest.approx(expected, abs=1e-6)
    assert both.ours(torch.from_numpy(grey).float(), guess) == pytest.approx(expected, abs=1e-6)


def test_native_size_has_another_name_and_a_smallest_side(both):
    net, smallest = both.native.net, TRUNKS[both.native.net].smallest
    assert both.native.name == f"lpips_{net}"
    truth, rec = check_pair(3, 32)
    assert both.native(truth, rec) == pytest.approx(both.expected(truth, rec), abs=1e-6)
    at, below = ((truth[:, :side, :side], rec[:, :side, :side]) for side in (smallest, smallest - 1))
    assert both.native(*at) > 0
    assert both.native(*below) is None
    assert both.native.reason(below[0].shape) == "image-too-small"
    with pytest.raises(RuntimeError):
        both.expected(*below)


def test_equal_images_have_no_distance_and_calls_agree(squeeze):
    truth, rec = check_pair(3, 32)
    assert squeeze(truth, truth) == 0.0
    assert squeeze(truth, rec) == squeeze(truth, rec)
    black = np.zeros((1, 28, 28))
    assert squeeze(black, black) == 0.0
    assert 0 <= squeeze(black, black + 1e-4) < 1


def test_vgg_by_the_definition_of_the_metric(hub, monkeypatch):
    """sum over layers of mean over positions of w . (f/|f| - f'/|f'|)^2, with torchvision's own features."""
    state = random_state("vgg", only="features.")
    path = install(monkeypatch, "vgg", hub / FILES["vgg"], state)
    metric = Perceptual.find("vgg", None)
    path.unlink()
    with torch.device("meta"):
        features = cast(nn.Sequential, torchvision.models.vgg16(weights=None).features)
    features.load_state_dict({k.removeprefix("features."): v for k, v in state.items()}, assign=True)
    heads = torch.load(Path(lpips.__file__).parent / "weights/v0.1/vgg.pth", weights_only=True, map_location="cpu")
    truth, rec = check_pair(3, 64)
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    flow = torch.stack([torch.tensor(truth), torch.tensor(rec)]).float() * 2 - 1
    flow, total, depth = (flow - shift[:, None, None]) / scale[:, None, None], 0.0, 0
    with torch.no_grad():
        for position, layer in enumerate(features):
            flow = layer(flow)
            if position in (3, 8, 15, 22, 29):
                unit = flow / (flow.norm(dim=1, keepdim=True) + 1e-10)
                weight = heads[f"lin{depth}.model.1.weight"][0]
                total += float((weight * (unit[0] - unit[1]).square()).sum(dim=0).mean())
                depth += 1
    assert depth == 5
    assert metric(truth, rec) == pytest.approx(total, rel=1e-4)


@pytest.mark.parametrize("net", list(TRUNKS))
def test_absent_weights_give_no_value_and_a_remedy(net, hub):
    metric = Perceptual.find(net, None)
    assert metric.status == "weights-missing"
    assert metric(*check_pair(3, 32)) is None
    assert metric.reason((3, 32, 32)) == "weights-missing"
    for part in (FILES[net], "https://download.pytorch.org/models/", str(hub), "--lpips-weights"):
        assert part in metric.remedy
    assert "\n" not in metric.remedy
    assert not hub.parent.exists()  # looking creates nothing


def test_random_weights_under_the_right_name_are_refused(hub):
    hub.mkdir(parents=True)
    torch.save(random_state("squeeze"), hub / FILES["squeeze"])
    package_model("squeeze")  # the package itself takes them
    metric = Perceptual.find("squeeze", None)
    assert metric.status == "weights-mismatch"
    assert metric(*check_pair(3, 64)) is None
    for part in (FILES["squeeze"], "b8a52dc0", "https://download.pytorch.org/models/"):
        assert part in metric.remedy


class Planted:
    """A pickle that makes a folder when it is loaded without care."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("hash_accepted", [False, True])
def test_a_planted_pickle_is_never_run(hub, tmp_path, monkeypatch, hash_accepted):
    hub.mkdir(parents=True)
    path, trap = hub / FILES["squeeze"], tmp_path / "trap"
    torch.save({"features.0.weight": Planted(trap)}, path)
    if hash_accepted:
        accept(monkeypatch, "squeeze", path)
    assert Perceptual.find("squeeze", None).status == "weights-mismatch"
    assert not trap.exists()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: {k: v for k, v in state.items() if k != "features.3.squeeze.bias"},
        lambda state: state | {"features.0.weight": torch.zeros(64, 3, 5, 5)},
        lambda state: list(state.values()),
        lambda _state: torch.zeros(3),
    ],
    ids=["lacking", "other shape", "a list", "a tensor"],
)
def test_a_file_of_another_layout_is_refused(hub, monkeypatch, spoil):
    install(monkeypatch, "squeeze", hub / FILES["squeeze"], spoil(random_state("squeeze")))
    metric = Perceptual.find("squeeze", None)
    assert metric.status == "weights-mismatch"
    assert metric(*check_pair(3, 64)) is None


def test_truncated_and_unreadable_files_are_refused(hub, monkeypatch):
    path = install(monkeypatch, "squeeze", hub / FILES["squeeze"])
    path.write_bytes(path.read_bytes()[:100_000])
    accept(monkeypatch, "squeeze", path)
    assert Perceptual.find("squeeze", None).status == "weights-mismatch"
    path.write_bytes(b"")
    accept(monkeypatch, "squeeze", path)
    assert Perceptual.find("squeeze", None).status == "weights-mismatch"
    path.unlink()
    path.mkdir()
    assert Perceptual.find("squeeze", None).status == "weights-missing"


def test_other_heads_are_refused(hub, monkeypatch):
    install(monkeypatch, "squeeze", hub / FILES["squeeze"])
    changed = dataclasses.replace(perceptual.TRUNKS["squeeze"], heads_sha256="0" * 16)
    monkeypatch.setitem(perceptual.TRUNKS, "squeeze", changed)
    metric = Perceptual.find("squeeze", None)
    assert metric.status == "weights-mismatch"
    assert "linear heads" in metric.remedy


def test_torchs_older_file_format_is_read(squeeze, hub, monkeypatch):
    install(monkeypatch, "squeeze", hub / FILES["squeeze"], _use_new_zipfile_serialization=False)
    older = Perceptual.find("squeeze", None)
    assert older.status == "ok"
    assert older(*check_pair(3, 64)) == squeeze(*check_pair(3, 64))


def test_a_file_named_by_the_user_is_used(hub, tmp_path, monkeypatch):
    path = install(monkeypatch, "squeeze", tmp_path / "mine.bin")
    metric = Perceptual.find("squeeze", path)
    assert metric.status == "ok"
    assert metric(*check_pair(3, 64)) is not None
    assert not hub.exists()


def test_a_mistake_in_a_file_named_by_the_user_is_an_error(squeeze, tmp_path):
    """Even when the usual place holds good weights: what was asked for is not silently replaced."""
    assert squeeze.status == "ok"
    with pytest.raises(ConfigError, match=r"--lpips-weights: .*absent\.pth cannot be read"):
        Perceptual.find("squeeze", tmp_path / "absent.pth")
    with pytest.raises(ConfigError, match="cannot be read"):
        Perceptual.find("squeeze", tmp_path)
    (tmp_path / "wrong.pth").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"wrong\.pth is not torchvision's squeezenet1_1"):
        Perceptual.find("squeeze", tmp_path / "wrong.pth")


def test_off():
    metric = Perceptual.find("none", None)
    assert (metric.status, metric.name) == ("off", "lpips_none")
    assert metric(*check_pair(3, 32)) is None
    with pytest.raises(ConfigError, match="no use with --lpips none"):
        Perceptual.find("none", Path("weights.pth"))


def test_an_unknown_trunk_is_an_error():
    with pytest.raises(ConfigError, match="alex, vgg, squeeze or none"):
        Perceptual.find("resnet", None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("value", [-0.5, 1.5, 255.0, np.nan])
def test_other_ranges_are_refused_even_without_weights(value):
    truth, rec = check_pair(3, 32)
    rec[0, 0, 0] = value
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        Perceptual.find("alex", None)(truth, rec)


def test_images_that_are_neither_grey_nor_rgb_have_no_value(squeeze):
    truth, rec = np.random.default_rng(0).random((2, 4, 64, 64))
    assert squeeze(truth, rec) is None
    assert squeeze.reason((4, 64, 64)) == "neither-grey-nor-rgb"


def test_loading_is_silent_and_leaves_randomness_alone(hub, monkeypatch, capsys):
    install(monkeypatch, "squeeze", hub / FILES["squeeze"])
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metric = Perceptual.find("squeeze", None)
        metric(*check_pair(3, 64))
    assert torch.equal(before, torch.get_rng_state())
    assert capsys.readouterr().out == ""
