"""A run folder as data. Nothing is trusted: damage, gaps and other versions become one sentence."""

import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from pflsec.core.errors import RunError
from pflsec.core.files import read_json
from pflsec.core.inputs import InputSpec

SCHEMA = 1
Kind = Literal["text", "integer", "number", "flag"]
SCORES: dict[str, Kind] = {
    "run": "text",
    "algo": "text",
    "family": "text",
    "defense": "text",
    "epsilon": "number",
    "attack": "text",
    "adversary": "text",
    "knowledge": "text",
    "labels": "text",
    "hidden": "text",
    "kind": "text",
    "round": "integer",
    "client": "integer",
    "victim": "integer",
    "dataset_index": "text",
    "batch": "integer",
    "steps": "integer",
    "iterations": "integer",
    "restarts": "integer",
    "seconds": "number",
    "objective": "number",
    "mse": "number",
    "psnr": "number",
    "psnr_capped": "number",
    "ssim": "number",
    "ssim_variant": "text",
    "lpips": "number",
    "lpips_status": "text",
    "clip_frac": "number",
    "label_true": "text",
    "label_found": "text",
    "label_correct": "number",
    "identified": "number",
    "psnr_blind": "number",
    "excess_psnr": "number",
    "attack_valid": "flag",
    "reason": "text",
    "status": "text",
}
IMAGES: dict[str, Kind] = {"capture": "text", "position": "integer", "ssim": "number"}
TOKENS: dict[str, Kind] = {
    "capture": "text",
    "position": "integer",
    "dataset_index": "integer",
    "matched": "flag",
    "words": "integer",
    "unknown": "integer",
    "found": "integer",
    "token_recall": "number",
    "token_precision": "number",
    "set_exact": "number",
    "multiset_exact": "number",
    "sequence_exact": "number",
    "rouge_l": "number",
    "in_place": "number",
    "identified": "number",
    "recall_blind": "number",
    "label_true": "integer",
    "label_found": "integer",
}
LATER = frozenset({"rouge_l", "in_place"})
"""Columns that results of earlier versions lack, and that are missing there."""
MIXED: dict[str, Kind] = {
    "capture": "text",
    "position": "integer",
    "dataset_index": "integer",
    "step": "integer",
    "weight": "number",
    "psnr_mixed": "number",
    "psnr_mixed_blind": "number",
    "part": "integer",
    "part_weight": "number",
    "psnr_part": "number",
    "psnr_part_blind": "number",
}
CLIENTS: dict[str, Kind] = {
    "round": "integer",
    "client": "integer",
    "train_samples": "integer",
    "test_samples": "integer",
    "last_trained_round": "integer",
    "accuracy_post_agg": "number",
    "accuracy_post_local": "number",
    "train_loss": "number",
    "uploaded": "flag",
}
METRICS = (
    "round",
    "train_loss",
    "personal_accuracy_mean",
    "personal_accuracy_weighted",
    "personal_accuracy_std",
    "personal_accuracy_worst10",
    "global_accuracy",
    "bytes_down",
    "bytes_up",
    "epsilon",
    "seconds",
)
HOLDERS = ("server", "clients")
"""Whose norms stand in metrics.jsonl."""
CAPTURE = re.compile(r"r(\d+)-c(\d+)-v(\d+)-([a-z]+)")
WORDS = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True)
class CaptureId:
    """What a capture's id says: r<round>-c<client>-v<victim>-<kind>."""

    text: str
    round: int
    client: int
    victim: int
    kind: str

    @staticmethod
    def parse(text: Any, path: Path) -> "CaptureId":
        """Return the id's parts. Raises RunError for anything else, so an id is always a safe file name."""
        found = CAPTURE.fullmatch(text) if isinstance(text, str) else None
        if not found:
            raise RunError(f"{path} names the capture '{text}'; an id looks like r000-c00-v0-probe.")
        t, client, victim, kind = found.groups()
        return CaptureId(found.group(), int(t), int(client), int(victim), kind)


@dataclass(frozen=True, eq=False)
class AttackData:
    """One attack's folder: attack.json, scores.csv with a row for each victim batch, images.csv and tokens.csv with one for each
    image or text, mixed.csv with one for each image in whose place a mixed one was trained on."""

    meta: Mapping[str, Any]
    scores: pd.DataFrame
    images: pd.DataFrame
    folder: Path
    tokens: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(TOKENS)))
    mixed: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(MIXED)))

    @property
    def id(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def name(self) -> str:
        """The attack's registered name."""
        return str(self.meta["attack"])

    @property
    def captures(self) -> list[CaptureId]:
        """The attacked captures, in the attack's order."""
        return [CaptureId.parse(text, self.folder / "attack.json") for text in self.meta["captures"]]

    def row(self, capture: CaptureId) -> pd.Series | None:
        """Return the capture's row of the scores, or None while it has none."""
        table = self.scores
        same = (table["round"] == capture.round) & (table["client"] == capture.client)
        found = table[same & (table["victim"] == capture.victim) & (table["kind"] == capture.kind)]
        return None if found.empty else found.iloc[0]


@dataclass(frozen=True, eq=False)
class RunData:
    """A run folder. `name` is the folder's: what `pflsec attack` and `pflsec report` take."""

    path: Path
    name: str
    manifest: Mapping[str, Any]
    metrics: pd.DataFrame
    clients: pd.DataFrame
    attacks: Sequence[AttackData]

    @property
    def config(self) -> Mapping[str, Any]:
        """All options of the training, by name."""
        return self.manifest["config"]

    @property
    def key(self) -> str:
        """The registered name of the method."""
        return str(self.manifest["algorithm"]["key"])

    @property
    def defense(self) -> str:
        """The defenses in their order, joined by +, or none."""
        return "+".join(map(str, self.config.get("defense") or [])) or "none"

    @property
    def sends(self) -> bool:
        """Whether clients send anything at all."""
        return any(row["direction"] == "up" for row in self.manifest["wire"])

    @property
    def holds_texts(self) -> bool:
        """Whether the data are texts: what leaks is then counted in words."""
        return self.input.vocabulary is not None

    @property
    def input(self) -> InputSpec:
        """Shape of the images, and their way between pixels and network; or length and vocabulary of texts."""
        return InputSpec.from_dict(self.manifest["data"]["input"])

    def word(self, token: int) -> str:
        """Return the word with this number, or the number where there is none."""
        words = self.manifest["data"].get("words") or []
        return str(words[token]) if 0 <= token < len(words) else f"#{token}"

    def class_name(self, label: str) -> str:
        """Return the name of the class with this number, or the text as it is where there is none."""
        names = self.manifest["data"].get("class_names") or []
        return str(names[int(label)]) if label.isdecimal() and int(label) < len(names) else label


def load_run(path: Path) -> RunData:
    """Return a run folder's content. Rounds and attacks may be missing: the run may be young, or have failed.

    A torn last line of metrics.jsonl or clients.csv is what a killed process leaves, and is skipped. Raises
    RunError for a folder that is no run, another schema version, and everything else that is damaged.
    """
    path = Path(os.path.abspath(path))  # a run keeps the name of the link by which it was called
    manifest = _manifest(path)
    folders = sorted(p for p in (path / "attacks").glob("*") if p.is_dir())
    begun = [p for p in folders if (p / "attack.json").exists() or (p / "scores.csv").exists()]
    return RunData(
        path=path,
        name=path.name,
        manifest=manifest,
        metrics=_metrics(path / "metrics.jsonl"),
        clients=_table(path / "clients.csv", CLIENTS, torn_end=True),
        attacks=[_attack(p) for p in begun],
    )


def load_runs(paths: Sequence[Path]) -> list[RunData]:
    """Return several runs, each once; folders of the same name are told apart by the folders above them."""
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    runs = [load_run(path) for path in once.values()]
    return [replace(run, name=_shortest(run.path, [other.path for other in runs])) for run in runs]


def _shortest(path: Path, paths: Sequence[Path]) -> str:
    """Return as many of a path's last parts as no other path has."""
    for depth in range(1, len(path.parts)):
        if sum(other.parts[-depth:] == path.parts[-depth:] for other in paths) == 1:
            return "/".join(path.parts[-depth:])
    return str(path)


def _manifest(path: Path) -> dict[str, Any]:
    file = path / "run.json"
    manifest = _document(file, f"run '{path.name}'", "Train it again")
    kinds = {"state": str, "algorithm": dict, "config": dict, "data": dict, "model": dict, "captures": dict}
    _need(manifest, kinds | {"versions": dict, "wire": list}, file)
    _need(manifest["algorithm"], {"key": str, "family": str, "title": str, "settings": dict}, file)
    _need(manifest["data"], {"name": str, "input": dict}, file)
    InputSpec.from_dict(manifest["data"]["input"])
    for row in manifest["wire"]:
        _need(row, {"direction": str, "item": str, "kind": str}, file)
    return manifest


def _attack(folder: Path) -> AttackData:
    file = folder / "attack.json"
    meta = _document(file, f"attack '{folder.name}'", "Run the attack again")
    _need(meta, {"attack": str, "config": dict, "threat_model": dict, "captures": list, "state": str}, file)
    _need(meta["threat_model"], {"adversary": str, "knowledge": str}, file)
    scores, images, tokens, mixed = (
        _table(folder / f"{name}.csv", kinds)
        for name, kinds in (("scores", SCORES), ("images", IMAGES), ("tokens", TOKENS), ("mixed", MIXED))
    )
    return AttackData(meta, scores, images, folder, tokens, mixed)


def _document(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """Return a JSON file that must hold an object of our schema version."""
    found = read_json(path, what)
    version = found.get("schema") if isinstance(found, dict) else None
    if version != SCHEMA:
        raise RunError(
            f"{what} has schema version {version}; this version of pflsec reads {SCHEMA} ({path}). "
            f"{remedy}, or use the version that wrote it."
        )
    return found


def _need(found: Any, kinds: Mapping[str, type], path: Path) -> None:
    """Raise RunError unless every named field is there with its type."""
    for name, kind in kinds.items():
        value = found.get(name) if isinstance(found, dict) else None
        if not isinstance(value, kind):
            raise RunError(f"{path} is damaged: '{name}' should be {kind.__name__}, and is {type(value).__name__}.")


def _metrics(path: Path) -> pd.DataFrame:
    """Return the rounds, one row each; a round that was played again after a resume counts once."""
    lines = _text(path).splitlines() if path.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("round"), int):
            rows.append(row)
        elif number < len(lines):
            raise RunError(f"{path} is damaged: line {number} is not a round's JSON object.")
    for row in rows:
        _check_norms(row.get("norms"), row["round"], path)
    table = pd.DataFrame(rows).reindex(
        columns=list(dict.fromkeys([*METRICS, "norms", *(k for row in rows for k in row)]))
    )
    for name in METRICS:
        try:
            table[name] = pd.to_numeric(table[name]).astype("int64" if name == "round" else "float64")
        except (TypeError, ValueError) as error:
            raise RunError(f"{path} is damaged: '{name}' is not a number in every round ({error}).") from error
    return table.drop_duplicates("round", keep="last").sort_values("round", ignore_index=True)


def _check_norms(norms: Any, t: int, path: Path) -> None:
    """Raise RunError unless these are {holder: {part: a number, or None where it was not finite}}, or nothing."""
    parts = [norms.get(holder, {}) for holder in HOLDERS] if isinstance(norms, dict) else []
    known = norms is None or (parts and set(norms) <= set(HOLDERS) and all(isinstance(part, dict) for part in parts))
    values = [value for part in parts if isinstance(part, dict) for value in part.values()]
    if not known or not all(value is None or isinstance(value, (int, float)) for value in values):
        raise RunError(f"{path} is damaged: 'norms' of round {t} are not numbers by holder and part.")


def _table(path: Path, kinds: Mapping[str, Kind], torn_end: bool = False) -> pd.DataFrame:
    """Return a CSV file with at least these columns, each in its type (LATER ones filled in); no rows when it is not there.

    torn_end  the file grows line by line, so its last line may be incomplete
    """
    text = _text(path) if path.exists() else ",".join(kinds) + "\n"
    if not text.endswith("\n") and not torn_end:
        raise RunError(f"{path} is truncated: it ends in the middle of a line.")
    try:
        header, *rows = csv.reader(text[: text.rfind("\n") + 1].splitlines(keepends=True), strict=True)
    except (csv.Error, ValueError) as error:
        raise RunError(f"{path} is damaged: it is no CSV table ({error}).") from error
    absent = [name for name in kinds if name not in header]
    if missing := [name for name in absent if name not in LATER]:
        raise RunError(f"{path} is damaged: it lacks the columns {', '.join(missing)}.")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise RunError(f"{path} is damaged: row {number} has {len(row)} cells, the header {len(header)}.")
    cells = {name: [row[i] for row in rows] for i, name in enumerate(header)}
    cells |= {name: [""] * len(rows) for name in absent}
    return pd.DataFrame({name: _column(values, name, kinds.get(name, "text"), path) for name, values in cells.items()})


def _column(cells: list[str], name: str, kind: Kind, path: Path) -> pd.Series:
    """Return a column in its type; an empty cell is missing, except in text."""
    if kind == "text":
        return pd.Series(cells, dtype=object)
    values: list[float | None] = []
    for number, cell in enumerate(cells, start=2):
        try:
            values.append(None if cell == "" else WORDS[cell] if cell in WORDS else float(cell))
        except ValueError:
            raise RunError(f"{path} is damaged: row {number} has '{cell}' as {name}, which is no {kind}.") from None
    column = pd.Series(values, dtype="float64")
    try:
        return column.astype("Int64") if kind == "integer" else column.astype("boolean") if kind == "flag" else column
    except (TypeError, ValueError) as error:
        raise RunError(f"{path} is damaged: a value of {name} is no {kind} ({error}).") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: it is damaged, or not ours ({error}).") from error
