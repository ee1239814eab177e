"""Checks the truth against an oracle that knows nothing of precdoctor.

    python -m benchmarks.faults.oracle [--set first|second|...|all|every] [--only NAME]

Each script is run under the tracer of ``tracer.py``. Phase, module, op, line and step must be what it found; the cause
must fit what went into the op and whether the same op in FP64 stays finite; a healthy script must do no harm at all.
Faults without a non-finite value are measured beside a twin without the fault (``twins.py``).
Prints one line per script and exits 1 when any disagrees.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.faults import twins
from benchmarks.faults.truth import SCRIPTS, SETS, Truth, base_name, environment, load

Facts = dict[str, Any]
PATIENCE = 300


def run(truth: Truth) -> Facts:
    """What the tracer says of a script.

    Raises:
        RuntimeError: the script itself failed.
    """
    command = [sys.executable, "-m", "benchmarks.faults.harm", str(truth.script)]
    done = subprocess.run(
        command,
        env=environment(),
        cwd=truth.script.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{truth.name} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def disagreements(truth: Truth, facts: Facts) -> list[str]:
    """What the tracer saw differently."""
    if not truth.faulty:
        return [] if facts["harm"] is None else [f"harm: {facts['harm']} at step {facts['seen_step']}"]
    if facts["harm"] is None:
        return ["no harm was done"]
    birth = facts["birth"] or {}
    if birth.get("phase") == "backward" and truth.phase in ("forward", "loss"):
        birth = facts["saved"] or birth  # it harmed no value in the forward pass, only gradients
    if truth.cause == "nonfinite-weights":
        return [] if facts["harm"] == "weights" else [f"harm: {facts['harm']}, not weights"]
    found = []
    if truth.phase == "data":
        step = facts["seen_step"]
    else:
        step = birth.get("step")
        found += _place(truth, birth, facts)
    if step != truth.step:
        found.append(f"step {step}, not {truth.step}")
    if truth.phase not in ("data", birth.get("phase")):
        found.append(f"phase {birth.get('phase')}, not {truth.phase}")
    if not CAUSES[truth.cause or ""](birth, facts):
        found.append(f"cause {truth.cause} does not fit {birth.get('op')} of {birth.get('operands')}")
    return found


def _place(truth: Truth, birth: Facts, facts: Facts) -> list[str]:
    found = []
    root, module = birth.get("root"), birth.get("module")
    if truth.phase == "optimizer":
        root, module = facts["parameter"] or (None, None)
    if (root or "").split("#")[0] != (truth.root or "") or (module or "") != truth.module:
        found.append(f"module {root}:{module}, not {truth.root}:{truth.module}")
    if birth.get("op") != truth.op:
        found.append(f"op {birth.get('op')}, not {truth.op}")
    if birth.get("forward_op") != truth.forward_op:
        found.append(f"forward op {birth.get('forward_op')}, not {truth.forward_op}")
    place = birth.get("place") or {"file": None, "line": 0}
    file = str(truth.source.relative_to(truth.script.parent)) if truth.source.is_relative_to(SCRIPTS) else None
    if place["file"] != file or place["line"] not in truth.lines():
        found.append(f"{place['file']}:{place['line']}, not {file}:{truth.lines()}")
    return found


# -- what each cause must look like ------------------------------------------------------------------------------------

_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "dot", "mv", "linear", "mkldnn_linear")
_DIVISIONS = (
    *("div", "reciprocal", "rsqrt", "pow", "addcdiv", "mean", "std", "var", "nll_loss_forward"),
    "weight_norm_interface",
)


def _low(birth: Facts, i: int = 0) -> float:
    value = birth["operands"][i]["low"]
    return math.nan if value is None else float(value)


def _high(birth: Facts, i: int = 0) -> float:
    value = birth["operands"][i]["high"]
    return math.nan if value is None else float(value)


def _op(birth: Facts, *names: str) -> bool:
    return base_name(birth["op"]) in names


def _forward_op(birth: Facts, *names: str) -> bool:
    return birth["phase"] == "backward" and base_name(birth["forward_op"] or "") in names


def _range(birth: Facts) -> bool:
    """The format was too narrow: inputs finite, and so is the result in FP64."""
    return bool(birth["finite_in_fp64"]) and not any(o["nan"] or o["inf"] for o in birth["operands"])


def _zero_divisor(birth: Facts) -> bool:
    if _op(birth, "weight_norm_interface"):
        return bool(birth["operands"][0]["zeros"])  # the direction, whose length divides
    empty = any(math.prod(o["shape"]) == 0 for o in birth["operands"]) or not birth["operands"]
    return empty or bool(birth["operands"][-1]["zeros"]) or _op(birth, "var", "std", "mean", "nll_loss_forward")


def _exp_arguments_too_large(birth: Facts) -> bool:
    limit = math.log(_LARGEST[birth["operands"][0]["dtype"]])
    return _op(birth, "exp", "expm1", "sinh", "cosh", "exp2") and max(_high(birth), -_low(birth)) > limit


def _infinities(birth: Facts) -> bool:
    return any(o["inf"] > 0 for o in birth["operands"])


CAUSES: dict[str, Callable[[Facts, Facts], bool]] = {
    "log-of-nonpositive": lambda b, _: (
        (_op(b, "log", "log2", "log10", "log1p") and _low(b) <= 0) or (_op(b, "xlogy") and _low(b, 1) <= 0)
    ),
    "sqrt-of-negative": lambda b, _: _op(b, "sqrt", "rsqrt", "pow") and _low(b) < 0,
    "division-by-zero": lambda b, _: _op(b, *_DIVISIONS) and _zero_divisor(b) and not b["finite_in_fp64"],
    "zero-times-inf": lambda b, _: (
        _op(b, "mul", *_PRODUCTS) and b["result"]["nan"] > 0 and sum(o["zeros"] for o in b["operands"]) > 0
    ),
    "inf-minus-inf": lambda b, _: _op(b, "sub", "add", "sum", "cumsum") and _infinities(b) and b["result"]["nan"] > 0,
    "exp-overflow": lambda b, _: _exp_arguments_too_large(b),
    "matmul-overflow": lambda b, _: _op(b, *_PRODUCTS) and _range(b),
    "reduction-overflow": lambda b, _: _op(b, "sum", "mean", "cumsum", "logsumexp", "linalg_vector_norm") and _range(b),
    "square-overflow": lambda b, _: _op(b, "mul", "pow", "mse_loss", "square") and _range(b),
    "cast-overflow": lambda b, _: _op(b, "to_copy", "copy") and _range(b),
    "softmax-fully-masked": lambda b, _: _op(b, "softmax", "log_softmax") and b["masked_row"],
    "domain-error": lambda b, _: (
        _op(b, "acos", "asin", "atanh", "acosh", "pow", "logit", "erfinv", "lgamma") and not b["finite_in_fp64"]
    ),
    "sqrt-gradient-at-zero": lambda b, _: _forward_op(b, "sqrt", "std", "pow") and not b["finite_in_fp64"],
    "norm-gradient-at-zero": lambda b, _: (
        _forward_op(b, "sqrt", "linalg_vector_norm", "hypot", "pow") and not b["finite_in_fp64"]
    ),
    "where-gradient-trap": lambda b, _: b["phase"] == "backward" and b["result"]["nan"] > 0,
    "domain-edge-gradient": lambda b, _: b["phase"] == "backward" and not b["finite_in_fp64"],
    "nonfinite-input-batch": lambda b, f: (
        f["harm"] in ("loss", "gradient") and (b.get("phase") == "data" or b["deliberate"])
    ),
    "extreme-input-batch": lambda b, _: bool(b["finite_in_fp64"]) and max(o["amax"] for o in b["operands"]) > 1e15,
    "nonfinite-weights": lambda _, f: f["harm"] == "weights",
    "optimizer-division-by-zero": lambda b, _: b["phase"] == "optimizer" and _op(b, *_DIVISIONS) and _zero_divisor(b),
    "optimizer-overflow": lambda b, _: b["phase"] == "optimizer" and _range(b),
    "loss-scale-overflow": lambda b, _: (
        b["phase"] in ("backward", "loss") and b["result"]["dtype"] == "float16" and bool(b["finite_in_fp64"])
    ),
    "other": lambda b, _: bool(b),
}


def main() -> int:
    """Check the chosen scripts; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", "--half", choices=("all", "every", *SETS), default="all", dest="set_name")
    parser.add_argument("--only", metavar="NAME", help="scripts whose name contains NAME")
    arguments = parser.parse_args()
    wrong = 0
    for truth in load(arguments.set_name, arguments.only):
        found = twins.disagreements(truth) if truth.quiet else disagreements(truth, run(truth))
        wrong += bool(found)
        print(f"{'WRONG' if found else 'ok':6}{truth.name:44}{'; '.join(found)[:600]}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
