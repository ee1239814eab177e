"""Writes the skeleton of a rule: ``python -m tests.support.new_rule PD513 my-new-rule`` (``make new-rule``).

The files are those of PD511, which docs/add-a-rule.md shows, under another code and name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SAMPLES = ROOT / "tests" / "rules" / "PD511"
#: The files that docs/add-a-rule.md shows, by the titles of their blocks there.
TEMPLATES = {
    "rule": ROOT / "precdoctor" / "diagnosis" / "families" / "updates" / "decayed_learning_rate.py",
    "samples": _SAMPLES / "samples.py",
    "firing": _SAMPLES / "firing" / "schedule-per-batch" / "train.py",
    "expected": _SAMPLES / "firing" / "schedule-per-batch" / "expected.json",
    "healthy": _SAMPLES / "healthy" / "schedule-as-long-as-the-run" / "train.py",
}
FAMILIES = dict(
    zip("1234567", ("nonfinite", "underflow", "loss_scaling", "fp8", "updates", "growth", "configuration"), strict=True)
)


def write(code: str, name: str, root: Path = ROOT) -> list[Path]:
    """Write the files of a new rule, and return their paths.

    Raises:
        SystemExit: the code or the name is not one, or the rule is there already.
    """
    if not re.fullmatch(r"PD[1-7]\d\d", code):
        raise SystemExit(f"a code is PD and three digits, the first from 1 to 7; got {code!r}")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name):
        raise SystemExit(f"a name is two or more words in lower case with hyphens; got {name!r}")
    family = root / "precdoctor" / "diagnosis" / "families" / FAMILIES[code[2]]
    samples = root / "tests" / "rules" / code
    rule = family / f"{name.replace('-', '_')}.py"
    for path in (rule, samples):
        if path.exists():
            raise SystemExit(f"{path.relative_to(root)} exists already")

    def text(title: str) -> str:
        return TEMPLATES[title].read_text().replace("PD511", code).replace("decayed-learning-rate", name)

    files = {
        rule: text("rule"),
        samples / "samples.py": text("samples"),
        samples / "firing" / f"{name}-fires" / "train.py": text("firing"),
        samples / "firing" / f"{name}-fires" / "expected.json": text("expected"),
        samples / "healthy" / f"{name}-healthy" / "train.py": text("healthy"),
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return list(files)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: make new-rule CODE=PD513 NAME=my-new-rule")
    for made in write(sys.argv[1].upper(), sys.argv[2]):
        print(made.relative_to(ROOT))
