"""The shapes of run.json, rank.json and end.json, and the check of a document against its shape as it is read.

Unknown keys are ignored, and keys that are not marked as required may be absent or null. A value of a type that
precdoctor does not write makes the document damaged. Code that reads a checked document need not check types again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

#: Integers stay below this magnitude; Python's JSON parser accepts any size.
_MAX_INT: Final = 1 << 64
#: Deepest nesting of ``free`` values (settings of an optimizer, flags).
_MAX_DEPTH: Final = 8
#: Most characters of a string; an argument of a command has at most 128 KiB.
_MAX_TEXT: Final = 1 << 20
_SPELLED: Final = frozenset(("NaN", "Infinity", "-Infinity"))


@dataclass(frozen=True)
class Each:
    """The shape of a list, or with ``keyed`` of an object, whose values all have one shape."""

    shape: Shape
    keyed: bool = False
    #: Most entries; None: any number.
    longest: int | None = None
    #: Whether entries of a list may be null.
    nulls: bool = False


#: ``text``, ``flag``, ``integer``, ``number`` (or "NaN" ...), ``free`` (anything shallow), a list, or an object by key.
#: A ``!`` after a key marks it as required.
Shape: TypeAlias = "str | Each | Mapping[str, Shape]"

_MODULE: Final[Shape] = {"name!": "text", "class": "text"}
_PARAMETER: Final[Shape] = {
    "name!": "text",
    "module": "text",
    "shape": Each("integer", longest=64),
    "dtype": "text",
    "requires_grad": "flag",
    "tied": Each("text"),
    "placement": "integer",
    "group": Each("integer", longest=2),
    "evaluating": "flag",
}
_ROOT: Final[Shape] = {
    "name!": "text",
    "class": "text",
    "modules": Each(_MODULE),
    "parameters": Each(_PARAMETER),
    "reduction": Each("free", keyed=True),
}
_OPTIMIZER: Final[Shape] = {
    **dict.fromkeys(("name!", "class", "package", "intended_update"), "text"),
    "steps_before": "integer",
    "groups": Each(Each("free", keyed=True)),
}
_SCALER: Final[Shape] = {
    "class": "text",
    "enabled": "flag",
    **dict.fromkeys(("init_scale", "growth_factor", "backoff_factor", "growth_interval"), "number"),
}
_PRODUCT: Final[Shape] = {
    "root": "text",
    "module": "text",
    "backward": "flag",
    "operands": Each("text", nulls=True),
    "dtypes": Each("text"),
    "fast_accum": "flag",
    "terms": "integer",
}
_LAYOUT: Final[Shape] = {
    "failed": "text",
    "ranks": "integer",
    "restart": "integer",
    "dimensions": Each({"name!": "text", "size!": "integer", "rank!": "integer"}, longest=16),
    "stages": Each("integer", longest=64),
    "stage_count": "integer",
    "placements": Each(
        {
            "by": "text",
            "replicated": Each("text", longest=16),
            "sharded": Each("text", longest=16),
            "first!": "integer",
            "replicas!": "integer",
        },
        longest=256,
    ),
}
RANK: Final[Shape] = {
    "schema_version": "integer",
    "pid": "integer",
    "layout": _LAYOUT,
    "roots": Each(_ROOT),
    "optimizers": Each(_OPTIMIZER),
    "scalers": Each(_SCALER),
    "autocast": Each("text"),
    "fp8_products": Each(_PRODUCT),
    "flags": Each("free", keyed=True),
    "versions": Each("text", keyed=True),
    "device": {"type": "text", "name": "text", "memory": "integer", "count": "integer", "capability": "free"},
}
RUN: Final[Shape] = {
    "command": Each("text"),
    "cwd": "text",
    "options": Each("free", keyed=True),
    "tool": {"name": "text", "version": "text"},
    "exit_status": "integer",
    "bit_neutral": "flag",
    "place": Each("free", keyed=True),
}
END: Final[Shape] = {
    "reason": "text",
    "message": "text",
    "exception": {"type!": "text", "message": "text", "file": "text", "line": "integer"},
}


def check(value: object, shape: Shape, place: str = "") -> None:
    """Check a document, or a part of one, against its shape; None (null) always passes.

    ``place`` is the path of the value, for the message: ``roots[2].name``.

    Raises:
        ValueError: the value has another shape; the message names the place.
    """
    if value is None:
        return
    if isinstance(shape, str):
        if not _PLAIN[shape](value):
            raise ValueError(f"{place or 'it'} is {_words(value)}, not {_WORDS[shape]}")
    elif isinstance(shape, Each):
        _check_each(value, shape, place)
    elif not isinstance(value, dict):
        raise ValueError(f"{place or 'it'} is {_words(value)}, not an object")  # noqa: TRY004 - of a value, not ours
    else:
        for key, inner in shape.items():
            name = key.rstrip("!")
            entry = value.get(name)
            if entry is None and name == key:
                continue
            if not _is_plainly(entry, inner):  # the path is built only if a closer check is needed
                where = f"{place}.{name}".lstrip(".")
                if entry is None:
                    raise ValueError(f"{where} is missing")
                check(entry, inner, where)


def _check_each(value: object, shape: Each, place: str) -> None:
    if not isinstance(value, dict if shape.keyed else list):
        wanted = "an object" if shape.keyed else "a list"
        raise ValueError(f"{place} is {_words(value)}, not {wanted}")  # noqa: TRY004 - the same
    assert isinstance(value, (dict, list))
    if shape.longest is not None and len(value) > shape.longest:
        raise ValueError(f"{place} has {len(value)} entries")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not _is_plainly(inner, shape.shape):
                check(inner, shape.shape, f"{place}.{key[:80]}")
    else:
        for number, inner in enumerate(value):
            if inner is None and not shape.nulls:
                raise ValueError(f"{place}[{number}] is null")
            if not _is_plainly(inner, shape.shape):
                check(inner, shape.shape, f"{place}[{number}]")


def _is_plainly(value: object, shape: Shape) -> bool:
    """Return whether ``shape`` is a word (``text``, ``flag`` ...) and the value has it."""
    return isinstance(shape, str) and _PLAIN[shape](value)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return _is_integer(value) or (isinstance(value, str) and value in _SPELLED)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INT


def _is_free(value: object, depth: int = 0) -> bool:
    if isinstance(value, (list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return depth < _MAX_DEPTH and all(_is_free(v, depth + 1) for v in inner)
    return value is None or isinstance(value, (str, bool)) or _is_number(value)


_PLAIN: Final = {
    "text": lambda value: isinstance(value, str) and len(value) <= _MAX_TEXT,
    "flag": lambda value: isinstance(value, bool),
    "integer": _is_integer,
    "number": _is_number,
    "free": _is_free,
}
_WORDS: Final = {
    "text": "a string of at most 2^20 characters",
    "flag": "true or false",
    "integer": "an integer of 64 bits",
    "number": "a number",
    "free": "a value that precdoctor writes",
}


def _words(value: object) -> str:
    """The name of a value's type in JSON's terms, with an article."""
    kinds = {str: "a string", bool: "true or false", int: "an integer", float: "a number", list: "a list"}
    return kinds.get(type(value), "an object")
