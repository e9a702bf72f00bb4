"""What an attack's controls say, in words: the positive one must leak, the negative one says nothing about its victim."""

from collections.abc import Mapping
from typing import Any

MEANS = {
    "positive": "the positive control failed: with these settings the attack does not even rebuild an image that must leak ({}); "
    "low numbers here are no evidence of privacy",
    "negative": "the negative control failed: the attack rebuilds images from numbers that say nothing about them ({}); high "
    "numbers here are no evidence of a leak",
}


def state(meta: Mapping[str, Any]) -> str:
    """Return passed, "failed: positive" and the like, or not run (not applicable, not judged); `meta` is attack.json."""
    found = _verdicts(meta)
    if failed := [name for name, one in found.items() if one["verdict"] == "failed"]:
        return f"failed: {', '.join(failed)}"
    words = list(dict.fromkeys(one["verdict"] for one in found.values()))
    return words[0] if len(words) == 1 else ", ".join(f"{name} {one['verdict']}" for name, one in found.items())


def void(state: str) -> bool:
    """Return whether an attack in this state rebuilds from numbers that say nothing: what it finds is no evidence of a leak."""
    return state.startswith("failed") and "negative" in state


def sentence(meta: Mapping[str, Any]) -> str:
    """Return "controls: passed", or in words what failed or is missing, and why."""
    found = _verdicts(meta)
    if all(one["verdict"] == "passed" for one in found.values()):
        return "controls: passed"
    parts = []
    for name, one in found.items():
        why = one["reason"] or "no reason was recorded"
        if one["verdict"] == "failed":
            parts.append(MEANS[name].format(why))
        else:
            parts.append(f"{name} {one['verdict']}" + ("" if one["verdict"] == "passed" else f" ({why})"))
    same = len({(one["verdict"], one["reason"]) for one in found.values()}) == 1
    return f"controls: {parts[0].partition(' ')[2] if same and len(parts) > 1 else '; '.join(parts)}"


def _verdicts(meta: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return {control: its verdict and reason}; an attack of a version that had none has not run them."""
    given = meta.get("controls")
    found = given if isinstance(given, Mapping) else {}
    ones = {name: found.get(name) for name in MEANS}
    absent = {"verdict": "not run", "reason": "the attack is of a version without them" if not found else ""}
    return {
        name: {key: str(one.get(key) or "") for key in ("verdict", "reason")} if isinstance(one, Mapping) else absent
        for name, one in ones.items()
    }
