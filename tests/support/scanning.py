"""Events of a deep scan, as the recorder writes them."""

from __future__ import annotations

import json
from typing import Any

from tests.support.training import ROOT, Training


def scanned(*facts: dict[str, Any], steps: tuple[int, ...] = (0, 1), **training: Any) -> Training:
    """A healthy run whose ``steps`` were scanned, each with these facts (see :func:`fact`)."""
    run = Training(**training)
    for step in steps:
        data = {"kind": "step", "outcome": "done", "ops": 120, "complete": True, "micro_steps": 1}
        run.events.append({"event": "scan", "step": step, "data": json.dumps(data)})
        run.events += [{**f, "event": "scan", "step": step, "data": json.dumps(f["data"])} for f in facts]
    return run


def with_scans(run: Training, *steps: int) -> Training:
    """The run with further scanned steps, which found nothing."""
    run.events += scanned(steps=steps).events
    return run


def fact(kind: str, op: str, *, module: str = "blocks.0.attn", dtype: str = "float16", line: int = 42, **data: Any):
    """One fact about an op of the GPT."""
    place = {"root": ROOT, "module": module, "op": f"aten.{op}", "file": "model.py", "line": line}
    results = [{"dtype": dtype, "shape": [4, 64], "numel": 256}]
    told = {"kind": kind, "phase": "forward", "micro_step": 0, "times": 1, "results": results, **data}
    return {**place, "code": f"y = {op.split('.', maxsplit=1)[0]}(x)", "data": told}


def used(op: str) -> dict[str, Any]:
    """Another op that a fact names."""
    return {"op": f"aten.{op}", "module": "blocks.0.attn", "file": "model.py", "line": 44, "code": "z = use(y)"}
