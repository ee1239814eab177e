"""Settings, by precedence: flag, ``PRECDOCTOR_<SECTION>_<KEY>`` in the environment, the nearest file, the default.

The file is ``precdoctor.toml`` or, if there is none in the same directory, ``pyproject.toml`` with a table
``[tool.precdoctor]``. Only the file in the nearest directory upward counts; files are never merged. The search ends at
the repository root or the home directory; outside of both, only the current directory counts. A file that another user
could have written is refused, because it may name a command to run and files to write. ``PRECDOCTOR_RUN`` and
``PRECDOCTOR_OPTIONS`` pass a recording on from process to process and are not settings.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from precdoctor.cli import values
from precdoctor.errors import UsageError, did_you_mean

_LEVEL = values.choice("error", "warning")
#: The keys of commands that write reports, and of those that also run rules.
_REPORTS: dict[str, values.Parser] = {"output-format": values.choice(*values.OUTPUT_FORMATS), "also": values.parse_list}
_RULES = {**_REPORTS, "select": values.parse_list, "ignore": values.parse_list, "fail-on": _LEVEL}
#: Every key that a file or the environment may set, by section, with its parser.
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
    "diagnose": _RULES,
    "gate": {
        "baseline": values.parse_paths,
        "aggregate": values.choice("median", "best", "worst"),
        "fail-if": values.parse_list,
        "allow": values.parse_path,
        **_RULES,
    },
    "compare": {**_REPORTS, "fail-on": _LEVEL},
}
_PREFIX = "PRECDOCTOR_"
_MAX_BYTES = 4 << 20
#: Keys that run a command, change the training or write files. They count only in a file that the user owns, not in one
#: of root.
_TRUSTED_KEYS = frozenset(("on-finding", "apply", "output", "also"))


class Settings:
    """The settings of environment and file, read and checked once; :meth:`get` combines them with a flag.

    Attributes:
        file: the settings file in use; None without one.
        rules: options of rules as in the file, ``{"PD201": {"option": value}}``; the diagnosis checks the names.
        notes: sentences for stderr: a file in use outside the current directory, and ignored keys.
        refused: sentences for stderr: refused files, and why.

    Raises:
        UsageError: the file cannot be read, a key is unknown, or a value is invalid.
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
        """The value of a setting: that of ``flag``, unless it is None or empty; else the setting's; None if not set."""
        if flag is None or flag in ((), []):
            return self._values.get((section, key))
        return values.read(SETTINGS[section][key], flag, f"--{key}")

    def chosen(self, section: str, flags: Mapping[str, Any]) -> dict[str, Any]:
        """The values of those keys of ``flags`` that are set, as keyword arguments: ``{"first_step": 100}``."""
        values_in_force = {key: self.get(section, key, flag) for key, flag in flags.items()}
        return {key.replace("-", "_"): value for key, value in values_in_force.items() if value is not None}

    def _nearest(self, here: Path) -> tuple[Path | None, Mapping[str, Any]]:
        """``(file, its table)`` of the nearest trusted settings file; ``(None, {})`` if none. Fills ``refused``."""
        for directory in _search_path(here):
            for file in (directory / "precdoctor.toml", directory / "pyproject.toml"):
                if not file.is_file():
                    continue
                why = _reason_for_distrust(file)
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
                if foreign and key in _TRUSTED_KEYS:
                    self.notes.append(f"{file}: {written} is not used, because the file is not yours; give --{key}")
                    continue
                self._values[section, key] = values.read(SETTINGS[section][key], value, f"{file}: {written}")
                if SETTINGS[section][key] is values.parse_path:  # relative to the directory of the file
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


def _search_path(here: Path) -> Iterator[Path]:
    """The directories to search, nearest first, up to the repository root or the home directory."""
    above = (here, *here.parents)
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() raises for users without one
    ends = [n for n, directory in enumerate(above) if directory == home or (directory / ".git").exists()]
    yield from above[: ends[0] + 1 if ends else 1]


def _reason_for_distrust(file: Path) -> str | None:
    """Why another user could have written a file; None if nobody but this user and root owns or may write it.

    Its directory, and that of a link's target, are checked likewise. Write permission of the group is a reason, unless
    it is the user's primary group: many systems give every user a group of their own, and a umask that permits it.
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
    """The table ``[tool.precdoctor]`` of a pyproject.toml; None if it has none."""
    tool = _load(project).get("tool", {})
    if not isinstance(tool, dict) or "precdoctor" not in tool:
        return None
    if not isinstance(tool["precdoctor"], dict):
        raise UsageError(f"{project}: precdoctor is a table; write [tool.precdoctor.record] above its keys")
    return tool["precdoctor"]


def _load(file: Path) -> dict[str, Any]:
    from precdoctor.runlog.toml import read_toml

    try:
        return read_toml(file, _MAX_BYTES)
    except (OSError, ValueError) as error:  # malformed TOML and bad UTF-8 are both ValueError
        raise UsageError(f"{file} cannot be read as TOML: {error}") from None
