"""pflsec attack --before --after: an update that no run of ours has made."""

from typing import Any

from pflsec.cli.console import number, print_json, print_table, say
from pflsec.core.errors import ConfigError


def attack_update(
    attack_name: str,
    described: dict[str, Any],
    options: dict[str, Any],
    selecting: list[str],
    dry_run: bool,
    json: bool,
) -> None:
    """Attack an update and print what was found.

    described  options of the update, those that were given
    options    those of the attack
    selecting  options that choose among the captures of a run, which are refused
    """
    from pflsec import api

    needed = ("before", "after", "model", "shape", "classes", "lr", "out")
    missing = ", ".join(f"--{name}" for name in needed if name not in described)
    if missing:
        given = ", ".join(f"--{name.replace('_', '-')}" for name in described)
        raise ConfigError(f"{given} describe an update from elsewhere, which needs {missing} as well.")
    if selecting:
        flag = "a run" if selecting[0] == "run" else f"--{selecting[0]}"
        raise ConfigError(f"an update from elsewhere is attacked without {flag}.")
    rest = {k: v for k, v in options.items() if k not in ("rounds", "clients", "kind")}
    where = {k: described.pop(k) for k in ("before", "after", "model", "out", "truth") if k in described}
    session = api.UpdateSession(attack_name, **where, options=described | rest)
    for doubt in session.doubts:
        say(f"warning: {doubt}.")
    if dry_run:
        if json:
            print_json({"attack": session.name, "doubts": session.doubts})
        return
    size = session.update.record
    say(f"{session.name} on {where['after']}: images {size.batch}, local steps {size.steps}")
    found = session.run()
    labels = None if found.labels is None else found.labels.tolist()
    if json:
        facts = {"path": str(found.path), "objective": found.objective, "status": found.status, "labels": labels}
        print_json(facts | {"doubts": found.doubts, "scores": found.scores})
        return
    scores = found.scores or {}
    cells = [session.name, found.status, f"{found.objective:.3g}", " ".join(map(str, labels or []))]
    cells += [number(scores.get(name)) for name in ("psnr_capped", "ssim")]
    print_table("", ["attack", "status", "objective", "labels", "PSNR dB", "SSIM"], [cells])
    say(f"results in {found.path}" + ("" if scores else "; nothing to score them with: see --truth"))
