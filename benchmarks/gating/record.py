"""Records the runs that :mod:`benchmarks.gating.rates` judges; what is there already is kept.

Run directories are ``RUNS/<recipe>/<kind>-<seed>``: ``healthy-7`` from seed 7, ``variation2-7`` the same on another
number of threads or another matrix library, ``rewrite0-7`` with the first healthy rewrite of its code,
``regression3-7`` with the fourth regression put in.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import precdoctor
from benchmarks.gating.training import RECIPES, REGRESSIONS, REWRITES, healthy_variation, train

#: Seeds of healthy runs, of healthy variations, and of runs with a regression, per recipe.
HEALTHY = {"fp32": 48, "bf16": 24, "fp16": 24}
VARIED, REWRITTEN, REGRESSED = 4, 3, 6
VARIATIONS = (1, 2, 3)


def wanted() -> list[tuple[str, str, int]]:
    """Every run as (recipe, kind, seed)."""
    runs: list[tuple[str, str, int]] = []
    for seed in range(max(HEALTHY.values())):
        for recipe in RECIPES:
            runs += [(recipe, "healthy", seed)] if seed < HEALTHY[recipe] else []
            runs += [
                (recipe, f"regression{n}", seed)
                for n, r in enumerate(REGRESSIONS)
                if seed < REGRESSED and recipe in r.recipes
            ]
            runs += [(recipe, f"variation{n}", seed) for n in VARIATIONS if seed < VARIED]
            runs += [(recipe, f"rewrite{n}", seed) for n in range(len(REWRITES)) if seed < REWRITTEN]
    return runs


def record(directory: Path, recipe: str, kind: str, seed: int) -> None:
    """One run, unless its directory is complete."""
    run = directory / recipe / f"{kind}-{seed}"
    note = directory / recipe / f"{kind}-{seed}.json"
    if note.exists():
        return
    regression = REGRESSIONS[int(kind[10:])] if kind.startswith("regression") else None
    regression = REWRITES[int(kind[7:])] if kind.startswith("rewrite") else regression
    variation = int(kind[9:]) if kind.startswith("variation") else 0
    with healthy_variation(variation) as told, precdoctor.record(run, force=True, every=1, on_nonfinite="observe"):
        _, changed = train(recipe, seed, regression)
    note.write_text(json.dumps({"changed": changed, "variation": told}))


def record_all(directory: Path) -> None:
    """Everything that is missing."""
    torch.set_num_threads(1)
    for number, run in enumerate(runs := wanted()):
        record(directory, *run)
        print(f"\rrecorded {number + 1} of {len(runs)} runs", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)


if __name__ == "__main__":
    record_all(Path(sys.argv[1]))
