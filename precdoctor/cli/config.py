"""Settings: flag, then ``PRECDOCTOR_<SECTION>_<KEY>`` in the environment, then the nearest file, then the default.

The file is ``precdoctor.toml`` or, in the same directory and after it, the ``[tool.precdoctor]`` table of
``pyproject.toml``; the nearest directory upward that has one wins whole. The search ends at the repository root or the
home directory, and outside of both it stays in the current directory. A file that another user could have written is
not used: it may name a command to run and files to write. ``PRECDOCTOR_RUN`` and ``PRECDOCTOR_OPTIONS`` carry a
recording from process to process and are not settings.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from precdoctor.cli import values
from precdoctor.errors import UsageError, did_you_mean

#: Every key a file or the environment may set, by section, with what reads it.
SETTINGS: dict[str, dict[str, values.Parser]] = {
    "record": {
        "output": values.parse_path,
        "every": values.parse_every,
        "budget": values.parse_percentage,
        "ranks": values.parse_ranks,
        "steps": values.parse_steps,
        "include": values.parse_list,
        "exclude": values.parse_list,
        "first-step": values.parse_count,
        "on-nonfinite": values.choice("examine", "stop", "skip", "observe"),
        "autopsy": values.parse_switch,
        "arm-next": values.parse_count,
        "deep-scan": values.parse_scans,
        "ops": values.parse_step_list,
        "compiled": values.choice("boundary", "instrument"),
        "scene-memory": values.parse_size,
        "max-disk": values.parse_size,
        "apply": values.parse_path,
        "halt-on": values.parse_list,
        "on-finding": values.parse_text,
        "reference": values.parse_path,
        "inference": values.parse_switch,
        "redact-names": values.parse_switch,
        "shared": values.parse_switch,
        "strict": values.parse_switch,
    },
    "shadow": {
        "output": values.parse_path,
        "at": values.parse_step_list,
        "every": values.parse_period,
        "steps": values.parse_steps,
        "reference": values.choice("fp32", "fp64"),
        "redact-names": values.parse_switch,
        "output-format": values.choice("full", "concise", "json", "markdown"),
    },
    "diagnose": {
        "output-format": values.choice(*values.OUTPUT_FORMATS),
        "also": values.parse_list,
        "select": values.parse_list,
        "ignore": values.parse_list,
        "fail-on": values.choice("error", "warning"),
    },
    "gate": {
        "baseline": values.parse_paths,
        "aggregate": values.choice("median", "best", "worst"),
        "fail-if": values.parse_list,
        "allow": values.parse_path,
        "output-format": values.choice(*values.OUTPUT_FORMATS),
        "also": values.parse_list,
        "select": values.parse_list,
        "ignore": values.parse_list,
        "fail-on": values.choice("error", "warning"),
    },
    "compare": {
        "output-format": values.choice(*values.OUTPUT_FORMATS),
        "also": values.parse_list,
        "fail-on": values.choice("error", "warning"),
    },
}
_PREFIX = "PRECDOCTOR_"
_MAX_BYTES = 4 << 20
#: Keys that run a command, change the training or write files: they are taken only from files of the user's own, not
#: from those of root.
_ACTS = frozenset(("on-finding", "apply", "output", "also"))


class Settings:
    """What the environment and the file say, read once and checked whole; flags are added by :meth:`get`.

    Attributes:
        file: the settings file in force; None without one.
        rules: options of rules as the file has them, ``{"PD201": {"option": value}}``; the diagnosis checks the names.
        notes: sentences for stderr: a file in force outside the current directory, and keys that are not used.
        refused: sentences for stderr: files that are not used, and why.

    Raises:
        UsageError: the file cannot be read, a key is not known, a value cannot be taken.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, start: Path | None = None) -> None:
        here = (Path.cwd() if start is None else start).absolute()
        self.notes: list[str] = []
        self.refused: list[str] = []
        file, table = self._nearest(here)
        self._values: dict[tuple[str, str], Any] = {}
        self.rules: dict[str, dict[str, Any]] = {}
        self.file = file
        if file is not None:
            if file.parent != here:
                self.notes.append(f"settings from {file}")
            self._take_file(file, table)
        self._take_environment(os.environ if environ is None else environ)

    def get(self, section: str, key: str, flag: Any = None) -> Any:
        """The value in force, or None; ``flag`` is what the command line said, None or empty for nothing."""
        if flag is None or flag in ((), []):
            return self._values.get((section, key))
        return values.read(SETTINGS[section][key], flag, f"--{key}")

    def chosen(self, section: str, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of ``flags`` that somebody set, ready to be passed on: ``{"first_step": 100}``."""
        found = {key: self.get(section, key, flag) for key, flag in flags.items()}
        return {key.replace("-", "_"): value for key, value in found.items() if value is not None}

    def _nearest(self, here: Path) -> tuple[Path | None, Mapping[str, Any]]:
        """The file in force and its table."""
        for directory in _searched(here):
            for file in (directory / "precdoctor.toml", directory / "pyproject.toml"):
                if not file.is_file():
                    continue
                why = _why_not_trusted(file)
                if why is None:
                    table = _load(file) if file.name == "precdoctor.toml" else _table(file)
                    if table is not None:
                        return file, table
                elif file.name == "precdoctor.toml" or _mentions_us(file):
                    self.refused.append(f"{file} is not used: {why}")
        return None, {}

    def _take_file(self, file: Path, table: Mapping[str, Any]) -> None:
        sections = [*SETTINGS, "rules"]
        foreign = file.stat().st_uid != os.geteuid()
        for section, entries in table.items():
            if section not in sections:
                raise UsageError(f"{file}: no section {section!r}{did_you_mean(section, sections)}")
            if not isinstance(entries, dict):
                raise UsageError(f"{file}: {section!r} is a section; write [{_title(file, section)}] above its keys")
            if section == "rules":
                self._take_rules(file, entries)
                continue
            for written, value in entries.items():
                key = written.replace("_", "-")
                if key not in SETTINGS[section]:
                    near = did_you_mean(key, SETTINGS[section])
                    raise UsageError(f"{file}: no key {written!r} in [{_title(file, section)}]{near}")
                if foreign and key in _ACTS:
                    self.notes.append(f"{file}: {written} is not used, because the file is not yours; give --{key}")
                    continue
                self._values[section, key] = values.read(SETTINGS[section][key], value, f"{file}: {written}")
                if SETTINGS[section][key] is values.parse_path:  # paths in a file are meant from where the file lies
                    self._values[section, key] = file.parent / self._values[section, key]
                elif key == "baseline":
                    self._values[section, key] = tuple(file.parent / path for path in self._values[section, key])

    def _take_rules(self, file: Path, entries: Mapping[str, Any]) -> None:
        for code, options in entries.items():
            if not isinstance(options, dict):
                raise UsageError(f"{file}: options of a rule stand in a table; write [{_title(file, f'rules.{code}')}]")
            self.rules[code] = {key.replace("-", "_"): value for key, value in options.items()}

    def _take_environment(self, environ: Mapping[str, str]) -> None:
        for section, keys in SETTINGS.items():
            prefix = f"{_PREFIX}{section.upper()}_"
            for name in sorted(n for n in environ if n.startswith(prefix)):
                key = name.removeprefix(prefix).lower().replace("_", "-")
                if key not in keys:
                    known = [prefix + k.upper().replace("-", "_") for k in keys]
                    raise UsageError(f"environment: no setting {name!r}{did_you_mean(name, known)}")
                self._values[section, key] = values.read(keys[key], environ[name], name)


def _title(file: Path, section: str) -> str:
    return section if file.name == "precdoctor.toml" else f"tool.precdoctor.{section}"


def _searched(here: Path) -> Iterator[Path]:
    """The directories whose files count, nearest first: up to the repository root or the home directory."""
    above = (here, *here.parents)
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises for users without one
    ends = [n for n, directory in enumerate(above) if directory == home or (directory / ".git").exists()]
    yield from above[: ends[0] + 1 if ends else 1]


def _why_not_trusted(file: Path) -> str | None:
    """Why somebody else may have written a file; None for one of the user's or of root's in a directory of theirs.

    A directory or file that its group can write to counts unless it is the user's own primary group: many systems give
    every user one, and a umask to match.
    """
    user = os.geteuid()
    for path, what in (
        (file, "it"),
        (file.parent, "its directory"),
        (file.resolve().parent, "the directory it leads to"),
    ):
        try:
            status = path.stat()
        except OSError as error:
            return f"{what} cannot be examined ({error.strerror})"
        if status.st_uid not in (user, 0):
            return f"{what} belongs to another user (uid {status.st_uid}); chown it or give the settings as flags"
        if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid not in (os.getegid(), 0)):
            return f"others can write to {what}; chmod go-w, or give the settings as flags"
    return None


def _mentions_us(file: Path) -> bool:
    try:
        return "tool.precdoctor" in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def _table(project: Path) -> Mapping[str, Any] | None:
    """``[tool.precdoctor]`` of a pyproject.toml; None without one."""
    tool = _load(project).get("tool", {})
    if not isinstance(tool, dict) or "precdoctor" not in tool:
        return None
    if not isinstance(tool["precdoctor"], dict):
        raise UsageError(f"{project}: precdoctor is a table; write [tool.precdoctor.record] above its keys")
    table: Mapping[str, Any] = tool["precdoctor"]
    return table


def _load(file: Path) -> dict[str, Any]:
    from precdoctor.runlog.toml import read_toml

    try:
        return read_toml(file, _MAX_BYTES)
    except (OSError, ValueError) as error:  # malformed TOML and bad UTF-8 are both ValueError
        raise UsageError(f"{file} cannot be read as TOML: {error}") from None
