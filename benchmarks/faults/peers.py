"""The same scripts under what people use today: ``torch.autograd.detect_anomaly`` and ``DebugUnderflowOverflow``.

    python -m benchmarks.faults.peers anomaly|underflow SCRIPT       prints one JSON object on the last line of stdout

``anomaly`` turns anomaly mode on for the whole script and takes the op and the last line of the script in its forward
traceback. ``underflow`` puts transformers' class on the first root module and takes the last module of its report.
Neither names what it does not know, and the object says null there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

Answer = dict[str, Any]
_NOTHING: Answer = {"alarm": False, "op": None, "file": None, "line": None, "module": None}
_NODE = re.compile(r"Function '(\w+?)(?:Backward\d*)?' returned nan values")
_FRAME = re.compile(r'File "(.+?)", line (\d+)')


def anomaly(script: Path) -> Answer:
    """Run under anomaly mode; an alarm is the error it raises."""
    told: list[str] = []
    warnings.showwarning = lambda message, *_, **__: told.append(str(message))
    torch.autograd.set_detect_anomaly(True)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except RuntimeError as error:
        hit = _NODE.search(str(error))
        if hit is None:
            raise
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", hit.group(1)).lower()
        frames = [f for text in told for f in _FRAME.findall(text) if f[0].startswith(str(script.parent))]
        file, line = frames[-1] if frames else (None, None)
        where = None if file is None else os.path.relpath(file, script.parent)
        return {**_NOTHING, "alarm": True, "op": name, "file": where, "line": line and int(line)}
    return _NOTHING


def underflow(script: Path) -> Answer:
    """Run with DebugUnderflowOverflow on the first root that has parameters."""
    from transformers.debug_utils import DebugUnderflowOverflow

    attached: list[Any] = []

    def attach(module: nn.Module, inputs: Any) -> None:  # noqa: ARG001
        if not attached and any(True for _ in module.parameters()):
            attached.append(None)  # its own construction calls no module, but be sure
            attached[0] = DebugUnderflowOverflow(module)  # type: ignore[no-untyped-call]

    register_module_forward_pre_hook(attach)
    report = io.StringIO()
    try:
        with contextlib.redirect_stdout(report):
            runpy.run_path(str(script), run_name="__main__")
    except ValueError as error:
        if "inf/nan detected" not in str(error):
            raise
        heads = re.findall(r"^ {2,}(\S*) (\w+)$", report.getvalue(), re.MULTILINE)
        return {**_NOTHING, "alarm": True, "module": heads[-1][0] if heads else None, "tail": report.getvalue()[-400:]}
    return _NOTHING


def main() -> None:
    """Run one script under one peer."""
    kind, path = sys.argv[1], Path(sys.argv[2]).resolve()
    sys.argv, sys.path[0] = [str(path)], str(path.parent)
    try:
        answer = (anomaly if kind == "anomaly" else underflow)(path)
    except Exception as error:  # noqa: BLE001 -- the peer broke the script: that is a result, too
        answer = {**_NOTHING, "broke": f"{type(error).__name__}: {error}"[:200]}
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
