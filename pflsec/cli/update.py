"""pflsec attack --before --after: an update that no run of ours has made."""

from collections.abc import Mapping
from typing import Any

from pflsec.cli.console import number, print_json, print_table, say
from pflsec.config.attack import AttackConfig
from pflsec.config.update import UpdateConfig
from pflsec.core.errors import ConfigError

FILES = ("before", "after", "model", "out", "truth")
"""Options of an update from elsewhere beside the fields of UpdateConfig."""
NEEDED = ("before", "after", "model", "shape", "classes", "lr", "out")
OF_RUNS: dict[str, Any] = {"run": None, "rounds": None, "clients": None, "kind": "probe", "naive": False}
"""Options that only an attack on a run has, with their defaults."""


def describing(options: Mapping[str, Any]) -> list[str]:
    """Return the names of the options that describe an update from elsewhere."""
    return [name for name in options if name in FILES or name in UpdateConfig.model_fields]


def attack_update(attack_name: str, options: Mapping[str, Any], dry_run: bool, json: bool) -> None:
    """Attack an update and print what was found.

    options  of the update and of the attack. Raises ConfigError where some are missing, or choose among a run's captures
    """
    from pflsec import api

    _check(options)
    own = AttackConfig.model_fields.keys() - OF_RUNS | UpdateConfig.model_fields.keys()
    where = {k: options[k] for k in FILES if k in options}
    session = api.UpdateSession(attack_name, **where, options={k: v for k, v in options.items() if k in own})
    for doubt in session.doubts:
        say(f"warning: {doubt}.")
    if dry_run:
        if json:
            print_json({"attack": session.name, "doubts": session.doubts})
        return
    size = session.update.record
    say(f"{session.name} on {where['after']}: images {size.batch}, local steps {size.steps}")
    _print_found(session.name, session.run(), json)


def _check(options: Mapping[str, Any]) -> None:
    if missing := ", ".join(f"--{name}" for name in NEEDED if name not in options):
        given = ", ".join(f"--{name.replace('_', '-')}" for name in describing(options))
        raise ConfigError(f"{given} describe an update from elsewhere, which needs {missing} as well.")
    if chosen := [name for name, default in OF_RUNS.items() if options.get(name, default) != default]:
        flag = "a run" if chosen[0] == "run" else f"--{chosen[0]}"
        raise ConfigError(f"an update from elsewhere is attacked without {flag}.")


def _print_found(attack_name: str, found: Any, json: bool) -> None:
    labels = None if found.labels is None else found.labels.tolist()
    if json:
        facts = {"path": str(found.path), "objective": found.objective, "status": found.status, "labels": labels}
        print_json(facts | {"doubts": found.doubts, "scores": found.scores})
        return
    scores = found.scores or {}
    cells = [attack_name, found.status, f"{found.objective:.3g}", " ".join(map(str, labels or []))]
    cells += [number(scores.get(name)) for name in ("psnr_capped", "ssim")]
    print_table("", ["attack", "status", "objective", "labels", "PSNR dB", "SSIM"], [cells])
    say(f"results in {found.path}" + ("" if scores else "; nothing to score them with: see --truth"))
