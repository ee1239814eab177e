"""Maps findings to files and lines of the repository at hand, for the formats of code hosts.

A run may have been recorded in a container or on another machine, so its paths are matched with those of the checkout.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from precdoctor.diagnosis.claims.finding import Diagnosis, Finding, Source

#: Most files to visit if git cannot list them, and most seconds for git to list them.
MOST_FILES, PATIENCE = 20_000, 20
_NOT_SOURCE = frozenset({"node_modules", "site-packages", "__pycache__", "build", "dist"})
_SEPARATORS = re.compile(r"[/\\]+")


@dataclass(frozen=True)
class FileLine:
    """A path relative to the repository's root, with forward slashes, and a line number, from 1."""

    file: str
    line: int


def file_line(finding: Finding, diagnosis: Diagnosis) -> FileLine | None:
    """The source line that the finding names, else the training script; None if neither is in the repository."""
    home = _home(finding, diagnosis)
    for source in (finding.location.source, finding.evidence.get("detected_at")):
        if isinstance(source, Source):
            file = repository_file(source.file, home, source.line, source.code)
            if file is not None:
                return FileLine(file, max(1, source.line))
    return script(diagnosis)


def script(diagnosis: Diagnosis) -> FileLine | None:
    """The recorded training script; None if it is not in the repository."""
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
    """The working directory of the finding's run; empty if the log does not have it."""
    runs, name = _runs(diagnosis), finding.evidence.get("run")
    own = next((run for run in runs if run.get("path") == name), runs[0] if runs else {})
    return str(own.get("cwd") or "")


def subject_of(finding: Finding) -> str:
    """Module and kind of the finding's tensor: ``GPT#0.blocks.3.attn output``; empty for a finding on the whole run."""
    location = finding.location
    module = ".".join(part for part in (location.root, location.module) if part)
    return " ".join(part for part in (module, location.kind) if part)


def identity(finding: Finding, diagnosis: Diagnosis) -> str:
    """A fingerprint of the defect, equal from run to run: it depends on neither the step nor measured values."""
    import hashlib

    location = finding.location
    where: list[Any] = [finding.code, location.root, location.module, location.kind, finding.cause]
    place = file_line(finding, diagnosis)
    where.append(place.file if place is not None else None)
    return hashlib.sha256("\0".join(map(ascii, where)).encode()).hexdigest()[:32]


def repository_file(file: str, home: str, line: int | None = None, code: str | None = None) -> str | None:
    """A recorded path as a path relative to the root of the repository, with forward slashes.

    A path outside the repository is matched with the one file in it whose path has the longest common end, first among
    the files with ``code`` at ``line``. If that finds none, the file's whole path, of two parts or more, must be the
    common end. Without ``code``, any common end counts, but the name alone only if no other file has it. Outside a
    repository the result is relative to the current directory.

    Args:
        file: the recorded path, absolute or relative to ``home``.
        home: the working directory of the run.
        line: the recorded line number, from 1.
        code: the recorded text of that line.

    Returns:
        None if no file matches unambiguously.
    """
    if not file or file.startswith("<"):  # code without a file, such as <stdin>
        return None
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), None)
    path = Path(os.path.normpath(here / home / file))
    if root is None:
        return path.relative_to(here).as_posix() if path.is_relative_to(here) and path != here else None
    # os.path.isfile returns False for impossible names, for which Path.is_file raises.
    if path.is_relative_to(root) and os.path.isfile(path):  # noqa: PTH113
        return path.relative_to(root).as_posix()
    return _nearest(root, _SEPARATORS.split(str(path)), line, code)


def _nearest(root: Path, parts: Sequence[str], line: int | None, code: str | None) -> str | None:
    """The file of the repository whose path has the longest common end with ``parts``; None if that is ambiguous."""
    named = {name: _common(name.split("/"), parts) for name in tracked(root) if name.split("/")[-1] == parts[-1]}
    if code and line:
        same = {name: common for name, common in named.items() if _has_line(root / name, line, code)}
        if best := _longest(same):
            return best
    best = _longest(named)
    if best is None:
        return None
    whole = named[best] == best.count("/") + 1
    sure = len(named) == 1 and not code if named[best] == 1 else whole or not code
    return best if sure else None


def _longest(named: dict[str, int]) -> str | None:
    most = max(named.values(), default=0)
    found = [name for name, common in named.items() if common == most]
    return found[0] if len(found) == 1 else None


def _common(ours: Sequence[str], parts: Sequence[str]) -> int:
    """Number of equal parts at the end of two paths."""
    pairs = zip(reversed(ours), reversed(parts), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(parts)))


def _has_line(path: Path, line: int, code: str) -> bool:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return False
    return line <= len(lines) and lines[line - 1].strip() == code.strip()


@lru_cache(maxsize=2)
def tracked(root: Path) -> tuple[str, ...]:
    """The files that git tracks; if git fails or is not installed, the Python files below ``root``."""
    command = ["git", "-C", str(root), "-c", "core.fsmonitor=false", "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return tuple(_python_files(root))
    return tuple(os.fsdecode(name) for name in listed.split(b"\0") if name)


def _python_files(root: Path) -> Iterator[str]:
    count = 0
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _NOT_SOURCE and name[0] != "." and not Path(folder, name, "pyvenv.cfg").exists()
        )
        for name in files:
            count += 1
            if name.endswith(".py"):
                yield Path(folder, name).relative_to(root).as_posix()
        if count > MOST_FILES:
            return
