"""The commands that make a run, its attacks and its report again, every setting spelt out."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pflsec.core.files import plain
from pflsec.reports import controls
from pflsec.reports.load import AttackData, RunData

OWN_FLAGS = ("iterations", "restarts", "labels", "hidden")
LPIPS = re.compile(r"lpips_([a-z]+)")


def command(begin: str, *arguments: str) -> str:
    """Return a command line with quoted arguments."""
    return " ".join([begin, *map(shlex.quote, arguments)])


def commands(run: RunData) -> str:
    """Return the command lines that train and attack the run again, every setting spelt out."""
    defenses = [command("--defense", str(text)) for text in run.config.get("defense") or []]
    words = [*_options(run), *defenses, *_settings(run), command("--name", run.path.name)]
    lines = [_folded("pflsec train", words)]
    lines += [_attack_command(run, attack) for attack in run.attacks]
    return "\n".join([*lines, command("pflsec report", run.path.name)])


def undefended(run: RunData) -> str:
    """Return the command, on one line, that trains the run's method as it did, but without a defense."""
    words = [*_options(run, "dp_seed"), *_settings(run), command("--name", f"{run.path.name}-undefended")]
    return " ".join(["pflsec train", *words])


def _options(run: RunData, *without: str) -> list[str]:
    options = {k: v for k, v in run.config.items() if k not in ("settings", "defense", *without)}
    return [_flag(name, value) for name, value in options.items() if value not in (None, [])]


def _settings(run: RunData) -> list[str]:
    return _assignments(run.manifest["algorithm"]["settings"])


def _attack_command(run: RunData, attack: AttackData) -> str:
    meta, captures = attack.meta, attack.captures
    config, threat = meta["config"], meta["threat_model"]
    words = [command(f"--{name}", threat[name]) for name in ("adversary", "knowledge")]
    for flag, values in (
        ("--rounds", {c.round for c in captures}),
        ("--clients", {c.client for c in captures}),
    ):
        words += [f"{flag} {','.join(map(str, sorted(values)))}"] if values else []
    words += [command("--kind", kind) for kind in sorted({c.kind for c in captures})]
    words += [_flag(name, config[name]) for name in OWN_FLAGS if config.get(name) is not None]
    words += _assignments({k: v for k, v in config.items() if k not in OWN_FLAGS})
    if net := LPIPS.match(str((meta.get("lpips") or {}).get("name"))):
        words.append(f"--lpips {net[1]}")
    if meta.get("visible"):
        words.append(_flag("visible", meta["visible"]))
    if meta.get("naive"):
        words.append("--naive")
    if "switched off" in controls.sentence(meta):
        words.append("--no-controls")
    if meta.get("seed") is not None:
        words.append(f"--seed {meta['seed']}")
    return _folded(command("pflsec attack", attack.name, run.path.name), words)


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return command(flag, ",".join(map(str, value)) if isinstance(value, list) else str(plain(value)))


def _assignments(settings: Mapping[str, Any]) -> list[str]:
    """Return a method's or attack's own settings as --set NAME=VALUE."""
    said = {None: "none", True: "true", False: "false"}
    return [
        command("--set", f"{name}={said[value] if value is None or isinstance(value, bool) else value}")
        for name, value in settings.items()
    ]


def _folded(begin: str, words: Sequence[str], width: int = 100) -> str:
    """Return a command on lines of about `width` characters, continued with backslashes."""
    lines = [begin]
    for word in words:
        if len(lines[-1]) + len(word) < width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}")
    return " \\\n".join(lines)
