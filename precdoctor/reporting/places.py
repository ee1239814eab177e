"""Where a finding belongs in a repository: code hosts want a file and a line, a recorded run has a script."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, Source
from precdoctor.reporting.checkout import repository_file


@dataclass(frozen=True)
class FileLine:
    """A file below the repository, with forward slashes, and a line from 1."""

    file: str
    line: int


def file_line(finding: Finding, diagnosis: Diagnosis) -> FileLine | None:
    """The line of the user's code that the finding names; None for none, or one that is not in the repository."""
    home = _home(finding, diagnosis)
    for source in (finding.location.source, finding.evidence.get("detected_at")):
        if isinstance(source, Source):
            file = repository_file(source.file, home, source.line, source.code)
            if file is not None:
                return FileLine(file, max(1, source.line))
    return None


def script(diagnosis: Diagnosis) -> FileLine | None:
    """The recorded training script, for formats that cannot do without a file."""
    for run in _runs(diagnosis):
        command, home = run.get("command"), str(run.get("cwd") or "")
        words = [str(word) for word in command] if isinstance(command, (list, tuple)) else []
        for before, word in itertools.pairwise(["", *words]):
            name = word.replace(".", "/") + ".py" if before == "-m" else word
            file = repository_file(name, home) if name.endswith(".py") else None
            if file is not None:
                return FileLine(file, 1)
    return None


def _runs(diagnosis: Diagnosis) -> list[Mapping[str, Any]]:
    return [run for run in diagnosis.run.get("runs") or [diagnosis.run] if isinstance(run, Mapping)]


def _home(finding: Finding, diagnosis: Diagnosis) -> str:
    """The directory in which the finding's run was recorded; empty where the log does not hold it."""
    runs, name = _runs(diagnosis), finding.evidence.get("run")
    own = next((run for run in runs if run.get("path") == name), runs[0] if runs else {})
    return str(own.get("cwd") or "")


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
