"""pflsec doctor."""

from dataclasses import asdict
from typing import Annotated

import typer

from pflsec.cli.console import out, print_json, print_table, say


def doctor(json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on stdout.")] = False) -> None:
    """Say what of this installation works, what is missing, and how to get it. Uses no network.

    Exit code 1: something without which pflsec does not work is broken.

    Examples:

      pflsec doctor

      pflsec doctor --json
    """
    from pflsec.doctor import examine

    findings = examine()
    broken = [f for f in findings if f.status == "broken"]
    if json:
        print_json([asdict(f) for f in findings])
    else:
        for part in dict.fromkeys(f.part for f in findings):
            print_table(f"\n{part}", ["", "", ""], [[f.name, f.status, f.detail] for f in findings if f.part == part])
        for finding in (f for f in findings if f.remedy):
            out.print(f"\n{finding.part}, {finding.name}: {finding.remedy}", markup=False)
        say(f"\n{len(broken)} broken" if broken else "\nall that is essential works")
    if broken:
        raise typer.Exit(1)
