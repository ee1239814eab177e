"""Checks the truth about quiet faults: the script is measured beside a twin that lacks the fault.

The twin of a precision fault is the script in FP64, that of any other the script with a few words replaced. What the
truth says is lost must be lost in the script, in every module that it names, and not in the twin. A healthy script must
learn as well as its twin.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.faults.truth import Truth, environment

Facts = dict[str, Any]
PATIENCE = 600
#: A healthy script may end this much above its twin, as a share of what the twin learns.
TOLERANCE = 0.1


def measure(truth: Truth, twin: bool) -> Facts:
    """What ``gauges.py`` says of a script or of its twin.

    Raises:
        RuntimeError: the script itself failed.
    """
    options = ["--probe", truth.probe] if truth.probe else []
    if twin:
        options += [x for pair in truth.mend for x in ("--mend", *pair)] if truth.mend else ["--fp64"]
    command = [sys.executable, "-m", "benchmarks.faults.gauges", str(truth.script), *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise RuntimeError(f"{truth.name} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def disagreements(truth: Truth) -> list[str]:
    """Where the measurements speak against the truth."""
    script, twin = measure(truth, False), measure(truth, True)
    ends = [statistics.fmean(f["loss"][-max(len(f["loss"]) // 5, 1) :]) for f in (script, twin)]
    if not truth.faulty:
        return _healthy(truth, twin["loss"][0], *ends)
    found = []
    for kind, facts, (low, high) in (("script", script, truth.script_range), ("twin", twin, truth.twin_range)):
        values = _values(truth, facts)
        outside = {n: v for n, v in values.items() if not low <= v <= high}
        if outside or not values:
            found.append(f"{truth.gauge} of the {kind} outside [{low:g}, {high:g}]: {outside or 'not measured'}")
    if truth.costs is not None and not ends[0] - ends[1] >= truth.costs:
        found.append(f"the loss ends at {ends[0]:.4g}, that of the twin at {ends[1]:.4g}")
    return found


def _healthy(truth: Truth, first: float, end: float, twin_end: float) -> list[str]:
    found = [] if math.isfinite(end) else [f"the loss ends at {end}"]
    if truth.swings:
        return found
    learnt = first - twin_end
    if learnt <= 0.1 * abs(first):
        found.append(f"the twin learns nothing: {first:.4g} -> {twin_end:.4g}")
    if not end - twin_end <= TOLERANCE * learnt:
        found.append(f"the loss ends at {end:.4g}, that of the twin at {twin_end:.4g}")
    return found


def _values(truth: Truth, facts: Facts) -> dict[str, float]:
    """The gauge in every module of the truth; where a module was not measured, it lost nothing."""
    scope, _, gauge = (truth.gauge or "").partition(".")
    if scope == "run":
        value = facts["run"].get(gauge)
        return {} if value is None else {gauge: value}
    measured: dict[str, float] = facts["modules"].get(gauge, {})
    patterns = truth.where or truth.modules
    found = {}
    for pattern in patterns:
        hits = {k: v for k, v in measured.items() if _matches(truth, pattern, k)}
        found |= hits or {pattern: 0.0}
    return found


def _matches(truth: Truth, pattern: str, key: str) -> bool:
    root, _, name = key.partition(":")
    return truth.root in (None, root) and fnmatchcase(name, pattern)
