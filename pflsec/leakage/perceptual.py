"""LPIPS, a learned perceptual distance, with verified weights only: nothing is downloaded, nothing is random.

Source  Zhang et al., CVPR 2018, arXiv 1801.03924; package `lpips` 0.1.4, version 0.1 of the linear heads.
The heads ship with that package. The trunk's ImageNet weights are torchvision's files, which the user puts in
place. torch.hub checks a file's hash only while it downloads, so any file under the right name would be
taken: here the hash is checked each time.
"""

import hashlib
import inspect
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import torch
from torch import Tensor, nn

from pflsec.core.errors import ConfigError, first_line
from pflsec.leakage.images import TOO_SMALL, Image, image_pair

Net = Literal["alex", "vgg", "squeeze", "none"]
Status = Literal["ok", "weights-missing", "weights-mismatch", "off"]

RESIZE = 64  # the side of the patches on which the heads were fitted
SOURCE = "https://download.pytorch.org/models/"


@dataclass(frozen=True)
class Trunk:
    """A backbone: torchvision's file, how its and its heads' SHA-256 begin, the smallest side it can take."""

    file: str
    sha256: str
    heads_sha256: str
    smallest: int


TRUNKS = {
    "alex": Trunk("alexnet-owt-7be5be79.pth", "7be5be79", "df73285e35b22355", 31),
    "vgg": Trunk("vgg16-397923af.pth", "397923af", "a78928a0af1e5f0f", 16),
    "squeeze": Trunk("squeezenet1_1-b8a52dc0.pth", "b8a52dc0", "4a5350f23600cb79", 17),
}


class Perceptual:
    """LPIPS of single images, or the reason why there is none.

    status  "ok", "weights-missing", "weights-mismatch" (the file is not torchvision's) or "off"
    name    the metric with its resize rule: "lpips_alex64" (64x64 if a side is smaller) or "lpips_alex" (native)
    remedy  one sentence that says which file to put where; empty when there is nothing to do
    """

    def __init__(self, net: Net, status: Status, remedy: str, model: nn.Module | None, native: bool):
        self.net, self.status, self.remedy, self.native = net, status, remedy, native
        self.name = f"lpips_{net}" if native or net == "none" else f"lpips_{net}{RESIZE}"
        self._model = model

    @classmethod
    def find(cls, net: Net, weights: Path | None = None, native: bool = False) -> "Perceptual":
        """Return LPIPS with this trunk, from `weights` or from torch.hub's folder for checkpoints.

        Absent or foreign weights in that folder give an object whose status says so and whose values are
        None. ConfigError if `net` is unknown, or if `weights` was named by the user and is missing or not
        torchvision's.
        """
        if net not in (*TRUNKS, "none"):
            raise ConfigError(f"--lpips {net} is not known; use alex, vgg, squeeze or none.")
        if net == "none":
            if weights is not None:
                raise ConfigError(f"--lpips-weights {weights} has no use with --lpips none; drop one.")
            return cls(net, "off", "LPIPS is off; --lpips alex, vgg or squeeze turns it on.", None, native)
        status, remedy, model = _open(net, weights or default_path(net))
        if weights is not None and status != "ok":
            raise ConfigError(f"--lpips-weights: {remedy}")
        return cls(net, status, remedy, model, native)

    def reason(self, shape: tuple[int, ...]) -> str:
        """Return "ok" if images of this shape [C, H, W] get a value, else why not (column lpips_status)."""
        if self.status != "ok":
            return self.status
        if shape[0] not in (1, 3):
            return "neither-grey-nor-rgb"
        return TOO_SMALL if self.native and min(shape[1:]) < TRUNKS[self.net].smallest else "ok"

    def __call__(self, truth: Image, rec: Image) -> float | None:
        """Return LPIPS of two images [C, H, W] in [0, 1]: 0 if equal, larger if less alike; or None.

        Grey images are repeated to 3 channels. Raises ValueError for other ranges and unequal shapes.
        """
        pair = image_pair(truth, rec)
        if self._model is None or self.reason(pair[0].shape) != "ok":
            return None
        with torch.inference_mode():
            a, b = (self._prepared(torch.from_numpy(image)) for image in pair)
            return float(self._model(a, b, normalize=True))  # normalize: from our [0, 1] to its [-1, 1]

    def _prepared(self, image: Tensor) -> Tensor:
        """Return float32 [1, 3, H, W] in [0, 1], resized to 64x64 if a side is smaller, unless native."""
        batch = image.float().expand(3, -1, -1)[None]
        if self.native or min(batch.shape[2:]) >= RESIZE:
            return batch
        return nn.functional.interpolate(batch, (RESIZE, RESIZE), mode="bilinear", align_corners=False)


def default_path(net: str) -> Path:
    """Return where torchvision itself would keep the trunk's file. Creates no folder."""
    return Path(torch.hub.get_dir()) / "checkpoints" / TRUNKS[net].file


def _shown(path: Path) -> str:
    """Return a path as it may stand in a report: the home folder's name is nobody's business."""
    home = Path.home()
    return str(Path("~") / path.relative_to(home)) if path.is_relative_to(home) else str(path)


def _open(net: str, path: Path) -> tuple[Status, str, nn.Module | None]:
    """Return status, remedy and network for a trunk's file. The file is parsed only if its hash is right."""
    trunk = TRUNKS[net]
    place = f"download {SOURCE}{trunk.file} to {_shown(default_path(net))}, or use --lpips-weights FILE."
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if not found.startswith(trunk.sha256):
                why = f"SHA-256 {found[:8]}..., expected {trunk.sha256}..."
                return "weights-mismatch", f"{path} is not torchvision's {trunk.file} ({why}): {place}", None
            file.seek(0)
            return "ok", "", _network(net, file)
    except OSError as error:
        return (
            "weights-missing",
            f"{_shown(Path(error.filename or path))} cannot be read ({error.strerror}): {place}",
            None,
        )
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = first_line(error)
        return "weights-mismatch", f"{path} cannot be used for LPIPS ({why}): {place}", None


def _network(net: str, file: BinaryIO) -> nn.Module:
    """Return lpips.LPIPS with the open file's trunk and the package's heads; ValueError if a part lacks."""
    import lpips

    # Left to itself the package fetches the trunk and loads heads unchecked; both are loaded below instead.
    # Its random start is drawn in a fork, so that measuring never shifts anyone's random numbers.
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        model = lpips.LPIPS(net=net, pnet_rand=True, pretrained=False, verbose=False)
    weights = torch.load(file, map_location="cpu", weights_only=True)
    known = _heads(net, Path(inspect.getfile(lpips.LPIPS)).parent / "weights" / "v0.1" / f"{net}.pth")
    for name in model.net.state_dict():  # "slice2.3.weight" is "features.3.weight" in torchvision's file
        source = f"features.{name.partition('.')[2]}"
        if source not in weights:
            raise ValueError(f"it has no {source}")
        known[f"net.{name}"] = weights[source]
    unused = model.load_state_dict(known, strict=False).unexpected_keys
    if unused:  # the installed lpips names its parts differently, so some would have stayed random
        raise ValueError(f"this version of lpips does not know {unused[0]}; install lpips 0.1.4")
    return model.eval().requires_grad_(False)


def _heads(net: str, path: Path) -> dict[str, Tensor]:
    """Return the linear heads that come with the package; ValueError if they are not those of lpips 0.1.4."""
    with path.open("rb") as file:
        if not hashlib.file_digest(file, "sha256").hexdigest().startswith(TRUNKS[net].heads_sha256):
            raise ValueError(f"the linear heads {path} are not those of lpips 0.1.4; reinstall that package")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
