"""The fenced blocks of a Markdown page, and the pflsec commands that a page names."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n+)?^```(?P<language>\w*)(?: title=\"(?P<title>[\w./-]+)\")?\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"`(pflsec [^`]+)`")
SHELL = ("bash", "console")


@dataclass(frozen=True)
class Block:
    """One fenced block. title: the file that it is the content of, or ""; reason: why it is not run, or ""."""

    language: str
    text: str
    title: str = ""
    reason: str = ""

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, those that end in a backslash joined with the next, without comments and prompts."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [line.strip().removeprefix("$ ") for line in joined.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def documents() -> list[Path]:
    """Return README.md and every page of the site that is written by hand."""
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    return [
        Block(found["language"], found["text"], found["title"] or "", found["reason"] or "")
        for found in FENCE.finditer(page)
    ]


def named(page: str) -> list[list[str]]:
    """Return every pflsec command that a page names, in its shell blocks or within a line, as words."""
    lines = [line for block in blocks(page) if block.language in SHELL for line in block.commands]
    lines += [found.replace("\n", " ") for found in INLINE.findall(re.sub(r"```.*?```", "", page, flags=re.DOTALL))]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("pflsec ")]
