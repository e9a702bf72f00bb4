"""Pages that need no other file and no network: style, script and plotly stand inside, and nothing else may be loaded."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from pflsec.reports.charts import Chart


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("pflsec.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(name: str, content: Mapping[str, Any], charts: Sequence[Chart | None]) -> str:
    """Return the page that templates/<name> makes of `content`; plotly is in it once, where any of its charts needs it.

    Only the scripts that stand here may run (by their hashes), and nothing may be loaded from anywhere.
    """
    scripts = [*([_plotly()] if any(charts) else []), _environment().get_template("page.js").render()]
    sources = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    inside = "img-src data: blob:; style-src 'unsafe-inline'"
    policy = f"default-src 'none'; form-action 'none'; base-uri 'none'; {inside}; script-src {sources}"
    return _environment().get_template(name).render(policy=policy, scripts=scripts, **content)


@cache
def _plotly() -> str:
    """Return plotly's own script as it can stand in a page: with the line ends that a browser's parser leaves."""
    return get_plotlyjs().replace("\r\n", "\n").replace("\r", "\n")
