"""A sweep's file that is done in seconds, and ways to change it."""

from pathlib import Path

SMALL = """\
name = "small"
[train]
algo = ["fedavg", "fedrep"]
model = "mlp"
partition = "iid"
clients = 4
rounds = 2
capture_rounds = "last"
capture_clients = "0"
victims = 1
[[attack]]
name = "ig"
iterations = 2
lpips = "none"
controls = false
"""


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the small sweep with some words changed; return its file."""
    text = SMALL
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / "s.toml"
    path.write_text(text, encoding="utf8")
    return path
