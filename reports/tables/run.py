"""One run in full: what crosses its wire, and everything that defines it."""

from typing import Any

import pandas as pd

from pflsec.reports.load import RunData
from pflsec.reports.tables.rows import as_text


def wire_table(run: RunData) -> pd.DataFrame:
    """Return what crosses the wire, down then up, and what stays private, an item or part a row.

    Under differential privacy `guarantee` says of every item of the uplink whether the guarantee covers it.
    """
    columns = ["direction", "item", "kind", "optional", "shape", "tensors", "numbers"]
    table = pd.DataFrame([dict(row) for row in run.manifest["wire"]]).reindex(columns=columns)
    privacy = run.manifest.get("dp") or {}
    if privacy.get("enabled"):
        covered = privacy.get("coverage") or {}
        up = table["direction"] == "up"
        table["guarantee"] = [covered.get(item) if sent else None for item, sent in zip(table["item"], up, strict=True)]
    table.insert(0, "run", run.name)
    return table


def configuration_table(run: RunData) -> pd.DataFrame:
    """Return everything that defines the run: section, name, and value as text."""
    manifest = run.manifest
    data, model = manifest["data"], manifest["model"]
    about = ("state", "reason", "started", "finished", "seed", "device", "threads", "git")
    sections: dict[str, dict[str, Any]] = {
        "run": {name: manifest.get(name) for name in about},
        "options": {k: v for k, v in run.config.items() if k != "settings"},
        "method": manifest["algorithm"]["settings"],
        "data": {
            "name": data["name"],
            "source": data.get("source"),
            **data["input"],
            "partition": data.get("partition"),
        },
        "model": {name: model.get(name) for name in ("name", "split", "parameters")}
        | {"bn_buffers": model.get("bn_buffers", "n/a")},
        "captures": manifest["captures"],
        "privacy": manifest.get("dp") or {},
        "versions": manifest["versions"],
    }
    rows = [
        {"run": run.name, "section": section, "name": name, "value": as_text(value)}
        for section, values in sections.items()
        for name, value in values.items()
    ]
    return pd.DataFrame(rows, columns=["run", "section", "name", "value"])
