"""Start-up of the commands that need no torch. Mark: under 0.7 s each."""

import subprocess
import sys

from benchmarks.common import interleaved, table

COMMANDS = ("--help", "list algorithms", "list attacks", "show fedrep", "show dlg")


def main() -> None:
    def call(words: str) -> None:
        subprocess.run([sys.executable, "-m", "pflsec.cli.app", *words.split()], check=True, capture_output=True)

    seconds = interleaved({words: lambda words=words: call(words) for words in COMMANDS}, repeats=5)
    rows = [[f"pflsec {words}", sorted(s)[len(s) // 2], max(s)] for words, s in seconds.items()]
    table("Start-up, seconds", ["command", "median", "max"], rows)


if __name__ == "__main__":
    main()
