"""pflsec attack."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pflsec.cli.console import number, print_json, print_table, progress, say
from pflsec.core.errors import ConfigError


def attack(
    attacks: Annotated[str, typer.Argument(metavar="ATTACKS", help="Names with commas between, or all.")],
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run's name or folder; nothing: the newest.")
    ] = None,
    runs_dir: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    rounds: Annotated[str | None, typer.Option(help="Captured rounds to attack, e.g. 0,9. [default: all]")] = None,
    clients: Annotated[str | None, typer.Option(help="Captured clients to attack. [default: all]")] = None,
    kind: Annotated[str, typer.Option(help="Kind of capture: probe or update.")] = "probe",
    iterations: Annotated[int | None, typer.Option(help="Iterations. [default: the attack's]")] = None,
    restarts: Annotated[int | None, typer.Option(help="Attempts from new starts. [default: the attack's]")] = None,
    adversary: Annotated[
        str, typer.Option(help="server, eavesdropper, client, server-secagg or malicious-server.")
    ] = "server",
    knowledge: Annotated[str, typer.Option(help="wire, oracle, or wire+FLAG,FLAG.")] = "wire",
    labels: Annotated[str | None, typer.Option(help="restore, optimise or known. [default: the attack's]")] = None,
    hidden: Annotated[
        str | None,
        typer.Option(help="Private items: auto, guess, joint, cotangent, log or oracle. [default: the attack's]"),
    ] = None,
    naive: Annotated[
        bool, typer.Option("--naive", help="The attacker does not know of the run's defenses. [default: it adapts]")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE of the attack's own settings; repeatable.")
    ] = None,
    lpips: Annotated[str, typer.Option(help="alex, vgg, squeeze or none.")] = "alex",
    lpips_weights: Annotated[Path | None, typer.Option(help="File with the trunk's weights.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attacker's draws.")] = 0,
    executor: Annotated[str, typer.Option(help="auto, serial or processes: victims at once.")] = "auto",
    workers: Annotated[int | None, typer.Option(help="Worker processes. [default: one per core]")] = None,
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, say what would be attacked, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON on stdout.")] = False,
) -> None:
    """Attack what a run's captures show, and score what is rebuilt.

    Examples:

      pflsec attack dlg

      pflsec attack dlg,ig my-run --restarts 2

      pflsec attack ig my-run --knowledge oracle --rounds 0
    """
    from pflsec import api
    from pflsec.config.attack import AttackConfig, attack_names, make_attack
    from pflsec.config.train import parse_assignments, split_assignments
    from pflsec.core.config import build
    from pflsec.runtime.folder import RunFolder

    options = {
        "rounds": _numbers(rounds, "--rounds"),
        "clients": _numbers(clients, "--clients"),
        "lpips_weights": None if lpips_weights is None else str(lpips_weights),
        "settings": parse_assignments(split_assignments(settings or [])),
        **{
            "kind": kind,
            "iterations": iterations,
            "restarts": restarts,
            "adversary": adversary,
            "knowledge": knowledge,
        },
        **{"labels": labels, "hidden": hidden, "lpips": lpips, "seed": seed, "executor": executor, "workers": workers},
        "device": device,
        "naive": naive,
    }
    config = build(AttackConfig, options, "attack")
    names = attack_names(attacks)
    ready = [(name, make_attack(name, config)) for name in names]
    session = api.AttackSession(RunFolder.open(run, runs_dir), config)
    say(f"{', '.join(names)} on run {session.folder.path.name}: {len(session.captures)} victims each")
    if session.perceptual.status not in ("ok", "off"):
        say(f"note: LPIPS is not available ({session.perceptual.status}). {session.perceptual.remedy}")
    if dry_run:
        if json:
            print_json({"attacks": names, "captures": session.captures})
        return
    scores = []
    with progress(len(names) * len(session.captures), "victim") as bar:
        for name, made in ready:
            scores.append(session.run(name, made, lambda *seen: bar.advance(_note(*seen))))
    if json:
        print_json([{"path": str(s.path), "scores": _records(s)} for s in scores])
        return
    _print_summary(scores)
    say(f"results in {session.folder.attacks}; make the page with: pflsec report {session.folder.path.name}")


def _numbers(text: str | None, flag: str) -> list[int] | None:
    from pflsec.config.train import whole

    if text is None:
        return None
    numbers = []
    for word in text.split(","):
        if (found := whole(word.strip())) is None:
            raise ConfigError(f"{flag} has '{word}', which is no number >= 0; use numbers, such as 0,9.")
        numbers.append(found)
    return numbers


def _note(name: str, done: int, total: int, row: Any) -> str:
    psnr = row.get("psnr_capped")
    return f"{name}: {row['status']}" + ("" if psnr is None else f", PSNR {psnr:.1f} dB")


def _records(scores: Any) -> list[dict[str, Any]]:
    from pandas import isna

    table = scores.table
    return [{k: None if isna(v) else v for k, v in row.items()} for row in table.to_dict("records")]


def _print_summary(scores: Any) -> None:
    rows = []
    for one in scores:
        table = one.table
        for (attack_name, status), group in table.groupby(["attack", "status"]):
            median = {c: group[c].median() for c in ("psnr_capped", "ssim", "excess_psnr")}
            rows.append([
                attack_name, status, f"{len(group)} of {len(table)}", number(float(median["psnr_capped"])),
                number(float(group["psnr_capped"].max())), number(float(median["ssim"])),
                number(float(median["excess_psnr"])), number(float(group["identified"].mean())),
                "; ".join(sorted({str(r) for r in group["reason"].dropna() if str(r)}))[:80],
            ])  # fmt: skip
    columns = ["attack", "status", "victims", "PSNR dB", "best", "SSIM", "above blind dB", "identified", "reason"]
    print_table("Medians over victims (best: the highest PSNR; identified: share)", columns, rows)
