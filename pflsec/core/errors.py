"""Errors that a user can act on: each message names the thing, the rule, the place and the remedy."""

import difflib
from collections.abc import Iterable


class PflsecError(Exception):
    """An error whose message is written for the user; the command line prints it as one line, without a traceback."""

    exit_code = 2


class ConfigError(PflsecError):
    """An option, hyper-parameter or name is not acceptable."""


class UnfitError(ConfigError):
    """A method cannot, by its nature, be trained with the network that was asked for."""


class DataError(PflsecError):
    """A dataset or partition cannot be used as asked."""


class ModelError(PflsecError):
    """A network cannot be built, or cut into body and head, as asked."""


class WireError(PflsecError):
    """A message breaks the method's wire contract."""


class RunError(PflsecError):
    """A run folder, capture or result is missing, damaged, foreign or of another schema version."""


class KnowledgeError(PflsecError):
    """An attack asks for knowledge that the stated adversary does not have."""


class PrivacyError(PflsecError):
    """A method cannot be trained under the privacy defense that was asked for, or would go round it."""


class TrainingError(PflsecError):
    """Training cannot go on: a value is not finite, or a client raised an error."""

    exit_code = 1


class NotApplicable(Exception):
    """An attack says that it has nothing to work on here; the message is the reason, printed in the result's row."""


class Inconclusive(NotApplicable):
    """Whatever an attack made of this capture, nothing would follow from it; the message is the reason. Never privacy."""


class PflsecWarning(UserWarning):
    """Something that works but is probably not what the user wants."""


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, or its kind where it says nothing."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?" for the nearest of the known names, or a full stop if none is near."""
    near = difflib.get_close_matches(name.lower(), {k.lower(): k for k in known}, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "."


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the sentence for a name that is not one of the known ones, with the nearest and the whole list."""
    names = sorted(known)
    return f"{what} '{name}' is not known{did_you_mean(name, names)} Known: {', '.join(names) or 'none'}."
