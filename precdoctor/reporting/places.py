"""Where a finding belongs in a repository: code hosts want a file and a line, a recorded run has a script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precdoctor.diagnosis.finding import Diagnosis, Finding, Source


@dataclass(frozen=True)
class FileLine:
    """A file below the repository, with forward slashes, and a line from 1."""

    file: str
    line: int


def file_line(finding: Finding, diagnosis: Diagnosis) -> FileLine | None:
    """The line of the user's code that the finding names; None for none, or one outside the current directory.

    CI calls from the root of the checkout, so what lies below it is the repository's.
    """
    home = str(diagnosis.run.get("cwd") or "")
    for source in (finding.location.source, finding.evidence.get("detected_at")):
        if isinstance(source, Source):
            file = _below_here(source.file, home)
            if file is not None:
                return FileLine(file, max(1, source.line))
    return None


def script(diagnosis: Diagnosis) -> FileLine | None:
    """The recorded training script, for formats that cannot do without a file."""
    for run in diagnosis.run.get("runs") or [diagnosis.run]:
        command = run.get("command") if isinstance(run, Mapping) else None
        for word in command if isinstance(command, (list, tuple)) else ():
            file = _below_here(str(word), str(run.get("cwd") or "")) if str(word).endswith(".py") else None
            if file is not None:
                return FileLine(file, 1)
    return None


def subject_of(finding: Finding) -> str:
    """``GPT#0.blocks.3.attn output``: what the finding is about where there are no lines; empty for a whole run."""
    location = finding.location
    module = ".".join(part for part in (location.root, location.module) if part)
    return " ".join(part for part in (module, location.kind) if part)


def identity(finding: Finding, diagnosis: Diagnosis) -> str:
    """Stays the same from run to run while the defect does: neither step nor numbers go in."""
    import hashlib

    location = finding.location
    where: list[Any] = [finding.code, location.root, location.module, location.kind, finding.cause]
    place = file_line(finding, diagnosis) or script(diagnosis)
    where.append(place.file if place is not None else None)
    return hashlib.sha256("\0".join(map(ascii, where)).encode()).hexdigest()[:32]


def _below_here(file: str, home: str) -> str | None:
    """``file``, recorded in the directory ``home``, relative to the current one; None if it lies elsewhere."""
    here = Path.cwd()
    path = Path(os.path.normpath(here / home / file))
    return path.relative_to(here).as_posix() if file and path.is_relative_to(here) and path != here else None
