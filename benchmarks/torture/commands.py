"""Section `commands`: whole commands on recorded logs whose values are odd in places, though every file is sound."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from precdoctor.cli import main
from precdoctor.runlog import open_run
from precdoctor.runlog.parts import DOMAINS, WORDS
from precdoctor.runlog.schema import KINDS, TABLES
from tests.support.hostile import NAMES
from tests.support.runs import write_run

#: What is asked of a log R, beside a sound one G.
_ASKED = (
    *(["diagnose", "R", "--output-format", shape] for shape in ("full", "json", "markdown")),
    ["show", "R"],
    ["show", "R", "--dtypes"],
    ["show", "R", "--scans"],
    ["report", "R", "-o", "out.html", "--force"],
    ["whatif", "R", "--format", "e4m3"],
    ["whatif", "R", "--plan"],
    ["whatif", "R", "--state", "bf16"],
    ["compare", "R", "G"],
    ["compare", "G", "R", "--output-format", "json"],
    ["gate", "R", "--baseline", "G"],
    ["log", "verify", "R"],
)
_INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**53 + 1, 2**62, -(2**63), 2**63 - 1)
_NUMBERS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    5e-324,
    1e-300,
    2.0**-149,
    65504.0,
    65536.0,
    3.4e38,
    1e300,
    math.inf,
    -math.inf,
    math.nan,
)
_TEXTS = ("", "float16", "bfloat16", "float8_e4m3fn", "int8", "Net#0", "exact", *KINDS, *NAMES)


def commands(workspace: Path, seed: int, count: int) -> str:
    """Every command answers or refuses; none ends in a defect of ours, and no rule fails."""
    logs = sorted(p for p in Path("tests/rules").glob("*/*/*/run") if (p / "run.json").is_file())
    rng = random.Random(seed)
    statuses: Counter[int] = Counter()
    for number in range(count):
        source = rng.choice(logs)
        altered = workspace / f"log-{number}"
        _altered(source, altered, rng)
        for asked in _ASKED:
            words = [
                {"R": str(altered), "G": str(source), "out.html": str(workspace / "out.html")}.get(w, w) for w in asked
            ]
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                statuses[main(words)] += 1
            said = f"{' '.join(asked)} of {altered}, made of {source}"
            assert "please report it" not in err.getvalue() + out.getvalue(), f"{said}: {err.getvalue()[-3000:]}"
            if words[-1] == "json":
                json.loads(out.getvalue() or "{}")
        shutil.rmtree(altered)
    ends = ", ".join(f"{n} with status {status}" for status, n in sorted(statuses.items()))
    return f"{count} altered logs, {len(_ASKED)} commands each: {ends}, no defect"


def _altered(source: Path, target: Path, rng: random.Random) -> None:
    """A copy of a log in which one to forty values, some columns and some rows are others."""
    run = open_run(source)
    tables = {name: [_plain(r, name) for b in run.batches(name) for r in b.to_pylist()] for name in TABLES}
    for _ in range(rng.choice((1, 2, 4, 10, 40))):
        name = rng.choice(list(TABLES))
        rows = tables[name]
        if not rows:
            continue
        kind = rng.randrange(8)
        if kind == 0:
            del rows[rng.randrange(len(rows)) :]
        elif kind == 1:
            rows.extend(dict(row) for row in rng.choices(rows, k=rng.choice((1, 5))))
        elif kind == 2:
            rng.shuffle(rows)
        else:
            field = rng.choice(list(TABLES[name]))
            chosen = rows if kind == 3 else rng.choices(rows, k=rng.choice((1, 2, 20)))
            value = _value(field, rng, WORDS.get(name, {}))
            for row in chosen:
                if field.name in row and field.name != "rank" and (value is not None or field.nullable):
                    row[field.name] = value
    facts = json.loads((source / "rank-00000/rank.json").read_text())
    info = json.loads((source / "run.json").read_text())
    write_run(target, **tables, facts=facts, info=info)


def _plain(row: dict[str, Any], table: str) -> dict[str, Any]:
    named = TABLES[table].names
    return {name: value for name, value in row.items() if name in named and name != "rank" and value is not None}


def _value(field: pa.Field, rng: random.Random, words: Mapping[str, Sequence[str]], column: str | None = None) -> Any:
    """A value of that column; out of its domain once in thirty, as the part is refused for it as a whole."""
    column = column or field.name
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    if field.nullable and rng.random() < 0.2:
        return None
    if pa.types.is_list(kind):
        inner = kind.value_field.with_nullable(False)
        return [_value(inner, rng, words, column) for _ in range(rng.choice((0, 1, 2, 30)))]
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    low, high = DOMAINS.get(column, (-math.inf, math.inf)) if rng.random() < 0.97 else (-math.inf, math.inf)
    if pa.types.is_integer(kind):
        signed = pa.types.is_signed_integer(kind)
        least, most = (
            (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1) if signed else (0, 2**kind.bit_width - 1)
        )
        return int(min(max(rng.choice(_INTEGERS), least, low), most, high))
    if pa.types.is_floating(kind):
        return rng.choice([x for x in _NUMBERS if low <= x <= high or (low == -math.inf and math.isnan(x))])
    if column in words and rng.random() < 0.97:
        return rng.choice(words[column])
    return rng.choice(_TEXTS)
