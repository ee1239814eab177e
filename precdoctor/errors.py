"""Everything precdoctor raises on purpose.

    PrecdoctorError            exit 2   a sentence for the user: what happened, which value, what to type next
    ├── UsageError             exit 2   a flag, an argument or a setting that cannot be taken
    ├── RunNotFoundError       exit 2   the named run directory does not exist or is not one
    ├── RunExistsError         exit 2   the output is already there and ``--force`` was not given
    ├── RunUnreadableError     exit 3   it is a run directory, but nothing in it can be trusted
    │   ├── CorruptRunError    exit 3   damaged parts, lying counts, hostile content
    │   └── NewerSchemaError   exit 3   written by a newer precdoctor
    ├── NothingRecordedError   exit 3   the run holds no training step
    └── IncomparableRunsError  exit 3   two runs have nothing in common: another model, or other steps

Only :func:`precdoctor.cli.main` prints an error and turns it into an exit status. Any other exception that reaches it
is a defect of precdoctor and is shown as one.
"""

from __future__ import annotations


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
    """A run directory from which no trustworthy verdict can be had."""

    exit_code = 3


class CorruptRunError(RunUnreadableError):
    """A part of the log is damaged, or states something that cannot be true."""


class NewerSchemaError(RunUnreadableError):
    """The log was written by a newer precdoctor; its meaning may have changed."""


class NothingRecordedError(RunUnreadableError):
    """The run directory is sound but holds no training step."""


class IncomparableRunsError(RunUnreadableError):
    """Two runs have no model or no steps in common, so that nothing can be said of one against the other."""
