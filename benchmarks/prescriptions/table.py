"""Does what is prescribed come true? `make prescriptions` writes docs/prescriptions.md.

For each script beside this one, and some of the fault corpus: record it, diagnose it, record it again with the
prescription applied, compare. Every step is the command a person would type; nothing is applied that
`diagnose --prescription` did not mark as applicable.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs" / "prescriptions.md"
#: Scripts of the fault corpus whose fault a setting mends; most take an edit.
CORPUS = ("nonfinite/gpt_chars", "nonfinite/denoising_autoencoder", "nonfinite/tabular_half")

HEAD = """\
# Prescriptions, predicted and measured

`make prescriptions` writes this page. It takes small training scripts, each with one fault, through the loop a person
would go through, and edits nothing:

    precdoctor record -o before -- python SCRIPT.py
    precdoctor diagnose before --prescription fix.toml
    precdoctor record -o after --apply fix.toml -- python SCRIPT.py
    precdoctor compare before after

`fix.toml` holds the predictions; they are computed by replaying the log of the run *before* with the change: loss
scalers update by update, flushed gradients and lost updates from exponent histograms, an overflowing op from its own
result in FP64. The run *after* is measured by the same reading of its log. A prediction came true when it is within
20 % of what was measured or, for shares and for steps among all steps, within half a percentage point. *Left* are the
errors and warnings that `diagnose` has about the run after.

| script | finding | applied | effect | before | predicted | measured | | left |
|---|---|---|---|---:|---:|---:|---|---|
"""

FOOT = """
What a replay cannot know: a changed run trains differently, so its later gradients are others; a module that overflowed
once may overflow in the wider format too if its inputs keep growing; and where one module is mended another may be the
next to fail, so steps gone wrong are predicted of the module, not of the run (the learning rate of `gpt_chars` is 2).
Gradients flushed to zero are not in
the log; their number is estimated from how the histogram runs into the format's limit, before and after alike.
"""


def precdoctor(folder: Path, *arguments: str) -> str:
    """Stdout of a command run in ``folder``, which has to succeed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "precdoctor", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"precdoctor {' '.join(arguments)}:\n{done.stderr}")
    return done.stdout


def loop(script: Path, runs: Path) -> list[dict[str, Any]]:
    """The effects of one script, as `compare` has them; empty when nothing could be applied."""
    before, after, fix = (str(runs / f"{script.stem}{end}") for end in ("-before", "-after", ".toml"))
    record = ("record", "--every", "1", "-o")
    run = functools.partial(precdoctor, script.parent)
    run(*record, before, "--", sys.executable, script.name)
    findings = json.loads(run("diagnose", before, "--output-format", "json", "--prescription", fix))["findings"]
    if "apply = true" not in Path(fix).read_text():
        print(f"{script.stem}: nothing to apply; {[f['code'] for f in findings]}", file=sys.stderr)
        return []
    run(*record, after, "--apply", fix, "--", sys.executable, script.name)
    applied = json.loads(run("compare", before, after, "--output-format", "json"))["compare"]["applied"]
    left = json.loads(run("diagnose", after, "--output-format", "json"))["findings"]
    codes = ", ".join(dict.fromkeys(f["code"] for f in left if f["severity"] != "info")) or "nothing"
    changes = "; ".join(_change(c) for c in applied["changes"])
    return [{**e, "changes": changes, "left": codes} for e in applied["effects"]]


def _change(change: dict[str, Any]) -> str:
    module = f" of `{change['module']}`" if "module" in change else ""
    return f"`{change['setting']}`{module} {_plain(change.get('from'))} → {_plain(change['to'])}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _value(effect: dict[str, Any], value: float | None) -> str:
    if value is None:
        return "-"
    if effect["measure"].endswith("_share"):
        return f"{100 * value:.3g} %"
    return f"{value:.0f} steps" if effect["measure"].endswith("_steps") else f"{value:.3g}"


def _row(script: Path, effect: dict[str, Any], *, first: bool) -> str:
    scope = " ".join(f"`{effect[key]}`" for key in ("module", "name") if effect.get(key))
    name = f"{effect['measure'].replace('_', ' ')}{' of ' + scope if scope else ''}"
    verdict = {True: "came true", False: "**missed**", None: "not measured"}[effect["came_true"]]
    values = [_value(effect, effect[key]) for key in ("from", "to", "measured")]
    about = [script.stem, effect["code"], effect["changes"]] if first else ["", "", ""]
    left = effect["left"] if first else ""
    return f"| {' | '.join([*about, name, *values, verdict, left])} |"


def _about(script: Path) -> str:
    """The first paragraph of its docstring, on one line."""
    return " ".join((ast.get_docstring(ast.parse(script.read_text())) or "").split("\n\n")[0].split())


def main() -> int:
    """Exit status 1 when a prediction was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one script, by name")
    parser.add_argument("--no-page", action="store_true", help="print only")
    given = parser.parse_args()
    scripts = [s for s in sorted(HERE.glob("*.py")) if s != Path(__file__).resolve()]
    scripts += [ROOT / "benchmarks" / "faults" / "scripts" / f"{name}.py" for name in CORPUS]
    lines, what, missed, total = [], [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for script in scripts:
            if given.only not in (None, script.stem):
                continue
            effects = loop(script, Path(folder))
            lines += [_row(script, e, first=i == 0) for i, e in enumerate(effects)]
            what.append(f"- `{script.relative_to(ROOT)}`: {_about(script)}")
            missed += sum(e["came_true"] is not True for e in effects)
            total += len(effects)
            print("\n".join(lines[-len(effects) :] if effects else []), flush=True)
    summary = f"{total - missed} of {total} predictions came true."
    machine = f"torch {metadata.version('torch')}, {platform.machine()}."
    page = HEAD + "\n".join(lines) + f"\n\n{summary}\n{FOOT}\n## The scripts\n\n" + "\n".join(what) + f"\n\n{machine}\n"
    if not (given.no_page or given.only):
        PAGE.write_text(page)
    print(summary)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
