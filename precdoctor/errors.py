"""Everything precdoctor raises on purpose.

    PrecdoctorError            exit 2   a sentence for the user: what happened, which value, what to type next
    ├── UsageError             exit 2   a flag, an argument or a setting that cannot be taken
    ├── RunNotFoundError       exit 2   the named run directory does not exist or is not one
    ├── RunExistsError         exit 2   the output is already there and ``--force`` was not given
    ├── RunUnreadableError     exit 3   it is a run directory, but nothing in it can be trusted
    │   ├── CorruptRunError    exit 3   damaged parts, lying counts, hostile content
    │   ├── NewerSchemaError   exit 3   written by a newer precdoctor
    │   └── RunTooLargeError   exit 3   more rows, parts or processes than are read by default
    ├── NothingRecordedError   exit 3   the run holds no training step
    └── IncomparableRunsError  exit 3   two runs have nothing in common: another model, or other steps

Only :func:`precdoctor.cli.main` prints an error and turns it into an exit status. Any other exception that reaches it
is a defect of precdoctor and is shown as one.
"""

from __future__ import annotations

from collections.abc import Iterable

#: Exit status of a command that Ctrl-C ended, as shells report it.
INTERRUPTED = 130

#: Least similarity to a known name for a word to count as its misspelling; below it a suggestion is a guess.
_ALIKE = 0.75
#: Least length of a word that may stand for the only name that contains it.
_FRAGMENT = 4


class PrecdoctorError(Exception):
    """Base of every error meant for the user; the message is one clear sentence."""

    exit_code: int = 2


class UsageError(PrecdoctorError):
    """A flag, an argument or a setting that cannot be taken."""


class RunNotFoundError(PrecdoctorError):
    """The named run directory does not exist, or is not a run directory."""


class RunExistsError(PrecdoctorError):
    """The output directory or file is already there, and overwriting was not asked for."""


class RunUnreadableError(PrecdoctorError):
    """A run directory that cannot give a trustworthy verdict."""

    exit_code = 3


class CorruptRunError(RunUnreadableError):
    """A part of the log is damaged, or states something that cannot be true."""


class NewerSchemaError(RunUnreadableError):
    """The log was written by a newer precdoctor; its meaning may have changed."""


class RunTooLargeError(RunUnreadableError):
    """The log holds more than is read by default; ``precdoctor --any-size`` lifts the limit."""


class NothingRecordedError(RunUnreadableError):
    """The run directory is sound but holds no training step."""


class IncomparableRunsError(RunUnreadableError):
    """Two runs have no model or no steps in common, so neither can be compared with the other."""


def likely(word: str, known: Iterable[str]) -> str | None:
    """Return the name in ``known`` that ``word`` most likely misspells; None rather than a guess.

    Ignores letter case, and ``_`` for ``-``.
    """
    from difflib import SequenceMatcher  # imported only after a typo: `import precdoctor` must be fast

    names = list(known)
    wanted = _plain(word)
    if swapped := [n for n in names if sorted(_plain(n)) == sorted(wanted)]:  # `cvs` for `csv`
        return swapped[0]
    ratio, near = max(((SequenceMatcher(None, wanted, _plain(n)).ratio(), n) for n in names), default=(0.0, ""))
    if ratio >= _ALIKE:
        return near
    holding = [n for n in names if len(wanted) >= _FRAGMENT and wanted in _plain(n)]
    return holding[0] if len(holding) == 1 else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` to close a message; empty if no name is similar."""
    near = likely(word, known)
    return f"; did you mean {near!r}?" if near is not None else ""


def _plain(name: str) -> str:
    """Return a name in the form that is compared."""
    return name.strip().strip("-").lower().replace("_", "-")
