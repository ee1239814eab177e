"""Do plans do what they predict? `make trials` writes benchmarks/results/trial.md.

For each script beside this one: record it, plan it, try the plan; the same with a target that only BF16 meets, and with
one operand changed by hand to a format that does not hold. Every step is the command a person would type.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "benchmarks" / "results" / "trial.md"
MODELS = ("gpt", "vit", "cnn", "lstm", "diffusion")
STEPS = 50
#: By plan: what is given to `whatif --plan`.
PLANS = {"narrowest": [], "BF16": ["--min-sqnr", "40"]}
VERDICTS = {"holds": "holds", "does-not-hold": "does not hold", "cannot-be-judged": "cannot be judged"}

HEAD = f"""\
# Plans, predicted and tried

Written by `make trials`: each script of [benchmarks/trials](../trials) goes through

    precdoctor record --every 1 -o run -- python SCRIPT.py
    precdoctor whatif run --plan -o plan.toml
    precdoctor trial plan.toml --steps {STEPS} -- python SCRIPT.py

*narrowest* is the plan as it comes; *BF16* is planned with `--min-sqnr 40`, which 8 bits do not reach; in *one
unscaled* the output gradient of one module is changed by hand to E4M3 without a scale. A cast did what was predicted
when, on the worst step of the run without the plan, the flushed and saturated shares lie in the interval of the
prediction or within 20 % or half a percentage point of it, and the SQNR is within 3 dB of the likely one. *dB off* is
by how much the SQNR was missed, over casts that lose anything; *flushed* is of the cast that flushes most. The loss gap
is the mean over the last half of the steps, with its 95 % interval, and what is allowed.

| model | plan | casts | as predicted | flushed: predicted | seen | dB off | most | gap | 95 % | allowed | verdict |
|---|---|---|---:|---:|---:|---:|---:|---:|---|---:|---|
"""


def precdoctor(folder: Path, *arguments: str, good: tuple[int, ...] = (0,)) -> str:
    """Stdout of a command run in ``folder``.

    Raises:
        SystemExit: it ended with another status than those.
    """
    command = [sys.executable, "-m", "precdoctor", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, check=False)
    if done.returncode not in good:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def planted(plan: str) -> str:
    """The plan with the output gradient of the first module that is not wide in E4M3 without a scale."""
    return re.sub(
        r'(\[modules\.grad_output\]\ntensor = .*\n)format = ".*"\nscaling = ".*"\n(?:scale_rule = ".*"\n)?',
        r'\1format = "E4M3FN"\nscaling = "none"\n',
        plan,
        count=1,
    )


def tried(folder: Path, model: str) -> dict[str, dict[str, Any]]:
    """The report of each trial of a model, by plan."""
    script = str(HERE / f"{model}.py")
    precdoctor(folder, "record", "--every", "1", "-o", "run", "--", sys.executable, script)
    for name, options in PLANS.items():
        precdoctor(folder, "whatif", "run", "--plan", *options, "-o", f"{name}.toml")
    (folder / "one unscaled.toml").write_text(planted((folder / "narrowest.toml").read_text()))
    reports = {}
    for name in (*PLANS, "one unscaled"):
        arguments = [f"{name}.toml", "--steps", str(STEPS), "-o", f"trial-{name}", "--output-format", "json"]
        command = ["--", sys.executable, script]
        reports[name] = json.loads(precdoctor(folder, "trial", *arguments, *command, good=(0, 1, 3)))
    return reports


def row(model: str, plan: str, report: dict[str, Any]) -> str:
    """One line of the table."""
    casts = report["casts"]
    judged = [c for c in casts if c["came_true"] is not None]
    most = max(judged, key=lambda c: (c["seen"]["flushed"], c["predicted"]["flushed"]))
    pairs = [(c["seen"]["sqnr_db"], c["predicted"]["sqnr_db"]) for c in judged]
    off = [abs(x - y) for x, y in pairs if isinstance(x, float) and isinstance(y, float)]  # else "Infinity": exact
    formats = sorted({f"{c['format']} {c['scaling']}" for c in casts})
    gap = report["loss_gap"]
    verdict = VERDICTS[report["verdict"]]
    cells = [
        model,
        plan,
        f"{len(casts)} ({', '.join(formats)})",
        f"{sum(c['came_true'] for c in judged)} of {len(judged)}",
        f"{100 * most['predicted']['flushed']:.3g} %",
        f"{100 * most['seen']['flushed']:.3g} %",
        f"{statistics.median(off):.2f}" if off else "–",
        f"{max(off):.2f}" if off else "–",
        f"{gap['mean']:+.2g}",
        f"{gap['low']:+.2g} to {gap['high']:+.2g}",
        f"{gap['allowed']:.2g}",
        ": ".join([verdict, *(report["failures"] or report["doubts"])[:1]]),
    ]
    return f"| {' | '.join(cells)} |\n"


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=MODELS, default=list(MODELS), help="print these; write nothing")
    asked = parser.parse_args().only
    rows = []
    for model in asked:
        with tempfile.TemporaryDirectory() as folder:
            rows += [row(model, plan, report) for plan, report in tried(Path(folder), model).items()]
    foot = f"\ntorch {metadata.version('torch')}, {platform.machine()}.\n"
    text = HEAD + "".join(rows) + foot
    if asked == list(MODELS):
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
