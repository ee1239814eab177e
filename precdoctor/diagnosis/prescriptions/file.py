"""The prescription file: TOML that a person reviews and ``record --apply`` reads back, checking every entry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from precdoctor.diagnosis.claims.words import plural
from precdoctor.diagnosis.prescriptions.effects import Effect
from precdoctor.diagnosis.prescriptions.measures import Scope, measure_named
from precdoctor.diagnosis.prescriptions.prescribed import Prescribed
from precdoctor.errors import UsageError
from precdoctor.runlog.changes import Change
from precdoctor.runlog.toml import read_toml, toml_key, toml_string, toml_value

SCHEMA_VERSION = 1
MAX_BYTES = 4 << 20
_KEYS = (
    *("code", "finding", "confidence", "title", "apply", "why_not", "memory_bytes", "snippets", "evidence"),
    *("rule_predicts", "change", "effect"),
)
_EFFECT_KEYS = ("measure", "root", "module", "kind", "name", "call", "from", "to", "steps")


# -- writing ----------------------------------------------------------------------------------------------------------


def dumps(prescriptions: Sequence[Prescribed], run: str) -> str:
    """Return the text of a prescription file; ``run`` is the path of the diagnosed run."""
    ready = sum(p.apply for p in prescriptions)
    head = [
        f"# {plural(len(prescriptions), 'prescription')}, {ready} to be applied. Take out what you do not want, then:",
        "#     precdoctor record --apply THIS-FILE -- python train.py",
        "#     precdoctor compare BEFORE AFTER",
        f"schema_version = {SCHEMA_VERSION}",
        f"run = {toml_string(run)}",
    ]
    return "\n".join([*head, *(line for p in prescriptions for line in _prescription(p))]) + "\n"


def _prescription(p: Prescribed) -> Iterator[str]:
    yield from ("", "[[prescription]]")
    for key in ("code", "finding", "confidence", "title", "apply", "why_not", "memory_bytes"):
        value = getattr(p, key)
        if value is not None and value != "":
            yield f"{key} = {_value(value)}"
    for key in ("evidence", "rule_predicts"):
        if getattr(p, key):
            entries = ", ".join(f"{toml_key(k)} = {_value(v)}" for k, v in getattr(p, key).items())
            yield f"{key} = {{ {entries} }}"
    if p.snippets:
        yield from ("", "  [prescription.snippets]  # the same as an edit of the script")
        yield from (f"  {toml_key(framework)} = {_text(text)}" for framework, text in p.snippets.items())
    for change in p.changes:
        yield from ("", "  [[prescription.change]]", *_entries(change.as_dict()))
    for effect in p.effects:
        yield from ("", f"  [[prescription.effect]]  # {effect.measure.doc}", *_entries(effect_as_dict(effect)))


def _entries(table: Mapping[str, Any]) -> Iterator[str]:
    return (f"  {key} = {_value(value)}" for key, value in table.items())


def effect_as_dict(effect: Effect) -> dict[str, Any]:
    """Return an effect as prescription files and run.json hold it; empty fields are left out."""
    place = {key: value for key, value in vars(effect.scope).items() if value}
    steps = {} if effect.steps is None else {"steps": effect.steps}
    return {"measure": effect.measure.name, **place, "from": effect.before, "to": effect.after, **steps}


def _value(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value) and float(f"{value:.6g}") == value:
        return f"{value:.6g}"
    return toml_value(value if isinstance(value, (int, float)) else str(value))


def _text(value: str) -> str:
    """Return a TOML string of several lines: a literal multi-line string if its characters allow that."""
    plain = all(c.isprintable() or c == "\n" for c in value) and "'''" not in value
    return f"'''\n{value}'''" if plain else toml_string(value)


# -- reading ----------------------------------------------------------------------------------------------------------


def load(file: Path) -> tuple[list[Prescribed], str]:
    """Read a prescription file; returns the prescriptions and the path of the diagnosed run.

    Raises:
        UsageError: the file cannot be read, or has an unknown or invalid entry; none is skipped silently.
    """
    try:
        document = read_toml(file, MAX_BYTES)
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read: {error.strerror}; write one with: precdoctor diagnose RUN --prescription {file}"
        ) from None
    except ValueError as error:  # malformed TOML and bad UTF-8 are both ValueError
        raise UsageError(f"{file} cannot be read as TOML: {error}") from None
    return parse(document, str(file)), str(document.get("run", ""))


def parse(document: Mapping[str, Any], origin: str) -> list[Prescribed]:
    """Return the prescriptions of a parsed file; ``origin`` is the file, for error messages.

    Raises:
        UsageError: an entry is unknown or invalid.
    """
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise UsageError(f"{origin}: schema_version is {version!r}, this precdoctor reads {SCHEMA_VERSION}")
    _refuse_unknown_keys(document, ("schema_version", "run", "prescription"), origin)
    listed = document.get("prescription", [])
    if not isinstance(listed, list):
        raise UsageError(f"{origin}: prescriptions are tables; write [[prescription]] above each")
    return [_parsed_prescription(raw, f"{origin}: prescription {i}") for i, raw in enumerate(listed, start=1)]


def _parsed_prescription(raw: Any, origin: str) -> Prescribed:
    if not isinstance(raw, Mapping):
        raise UsageError(f"{origin} is not a table")
    _refuse_unknown_keys(raw, _KEYS, origin)
    apply = raw.get("apply", False)
    if not isinstance(apply, bool):
        raise UsageError(f"{origin}: apply is true or false, got {apply!r}")
    changes = tuple(Change.of(c, origin) for c in _list(raw.get("change"), origin))
    if apply and not changes:
        raise UsageError(f"{origin}: apply is true, but there is no [[prescription.change]] to make")
    return Prescribed(
        code=str(raw.get("code", "")),
        finding=str(raw.get("finding", "")),
        confidence=_number(raw.get("confidence", 0.0), origin),
        title=str(raw.get("title", "")),
        apply=apply,
        why_not=str(raw.get("why_not", "")),
        changes=changes,
        effects=tuple(effect_of(e, origin) for e in _list(raw.get("effect"), origin)),
    )


def effect_of(raw: Any, origin: str) -> Effect:
    """Build an effect from a table: the inverse of :func:`effect_as_dict`.

    Raises:
        UsageError: an unknown key or measure, or a value that is no number.
    """
    if not isinstance(raw, Mapping):
        raise UsageError(f"{origin}: an effect is a table, got {raw!r}")
    _refuse_unknown_keys(raw, _EFFECT_KEYS, origin)
    steps = raw.get("steps")
    return Effect(
        measure=measure_named(raw.get("measure"), origin),
        scope=Scope(
            **{key: str(raw[key]) for key in ("root", "module", "kind", "name") if key in raw},
            call=int(_number(raw.get("call", 0), origin)),
        ),
        before=_number(raw.get("from"), origin),
        after=_number(raw.get("to"), origin),
        steps=None if steps is None else int(_number(steps, origin)),
    )


def chosen_changes(prescriptions: Iterable[Prescribed], origin: str) -> list[Change]:
    """Return the changes of all prescriptions with ``apply``, each once.

    Raises:
        UsageError: there are none, or two set the same thing to different values.
    """
    chosen: dict[tuple[str, str, str], Change] = {}
    for change in (c for p in prescriptions if p.apply for c in p.changes):
        key = (change.setting, change.root, change.module)
        other = chosen.setdefault(key, change)
        if other.to != change.to:
            raise UsageError(
                f"{origin} sets {change.setting} ({change.where}) to {other.to} and to {change.to}; take one out"
            )
    if not chosen:
        raise UsageError(f"{origin} holds nothing that can be applied without editing the script (no apply = true)")
    return list(chosen.values())


def statement(
    prescriptions: Iterable[Prescribed], file: str, diagnosed: str, *, redact: bool = False
) -> dict[str, Any]:
    """Return the entry ``applied`` of the changed run's run.json: the applied prescriptions and predicted effects.

    Args:
        prescriptions: of the file; only those with ``apply`` are listed.
        file: path of the prescription file.
        diagnosed: path of the diagnosed run.
        redact: leave out paths, and titles, which quote source lines and values.
    """
    applied = [
        {
            "code": p.code,
            **({} if redact else {"title": p.title}),
            "change": [c.as_dict() for c in p.changes],
            "effect": [effect_as_dict(e) for e in p.effects],
        }
        for p in prescriptions
        if p.apply
    ]
    paths = {} if redact else {"file": file, "diagnosed_run": diagnosed}
    return {"schema_version": SCHEMA_VERSION, **paths, "prescriptions": applied}


def _refuse_unknown_keys(table: Mapping[str, Any], keys: Sequence[str], origin: str) -> None:
    if (unknown := next((key for key in table if key not in keys), None)) is not None:
        raise UsageError(f"{origin}: unknown entry {unknown!r}; known: {', '.join(keys)}")


def _list(value: Any, origin: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise UsageError(f"{origin}: changes and effects are lists of tables, got {value!r}")
    return value


def _number(value: Any, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UsageError(f"{origin}: {value!r} is not a number")
    return float(value)
