"""How often the gate is wrong: red on healthy repeats, green on regressions, and whether it names the right module.

    python -m benchmarks.gating.rates RUNS > benchmarks/results/gate.md

Records what is missing in RUNS first (about 240 runs of 20 steps), then judges with the public ``gate``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.gating.record import HEALTHY, record_all, wanted
from benchmarks.gating.training import RECIPES, REGRESSIONS
from benchmarks.intervals import wilson
from precdoctor.comparison.baseline import Baseline, learn_from
from precdoctor.comparison.gate import GateReport, gate
from precdoctor.comparison.pairing import Pairing
from precdoctor.comparison.regressions import REGRESSIONS as CHECKS
from precdoctor.comparison.summary import METRICS, Summary, metrics_of, summaries
from precdoctor.diagnosis.claims.finding import Severity
from precdoctor.diagnosis.engine import resolve_options, view_of
from precdoctor.diagnosis.survey.rows import Key
from precdoctor.runlog import Run, open_run

#: Repeats a baseline is learned from, with the first seed of each baseline that is tried.
BASELINES = ((1, (0,)), (3, (0,)), (5, (0, 5)))
SIMULATED = 200
#: Checks that speak of the loss scaler, which is no module.
SCALER = ("PD301", "PD302", "PD303", "PD304", "PD306", "PD307", "PD814")


class Runs:
    """The recorded runs by recipe and name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, recipe: str, name: str) -> Run:
        return open_run(self.directory / recipe / name)

    def note(self, recipe: str, name: str) -> dict[str, str]:
        return json.loads((self.directory / recipe / f"{name}.json").read_text())

    @cache  # noqa: B019 - one object for the whole program
    def rules(self, recipe: str, name: str) -> GateReport:
        """The rules alone: they do not depend on a baseline, so each run is judged by them once."""
        return gate([self.run(recipe, name)], ignore=["PD8"])

    def judged(self, recipe: str, name: str, baseline: Run | Baseline) -> tuple[GateReport, GateReport]:
        """The rules' part and the baseline's part of one gate run."""
        return self.rules(recipe, name), gate([self.run(recipe, name)], baseline, select=["PD8"])

    @cache  # noqa: B019
    def baseline(self, recipe: str, seeds: tuple[int, ...]) -> Baseline:
        return learn_from([self.run(recipe, f"healthy-{seed}") for seed in seeds])


def interval(hits: int, total: int) -> str:
    """A share with its 95 % interval (Wilson)."""
    if not total:
        return "–"
    low, high = wilson(hits, total)
    return f"{hits} of {total} ({hits / total:.1%}; {low:.1%} to {high:.1%})"


def healthy(runs: Runs) -> Iterator[str]:
    """Different seeds against learned baselines."""
    yield "| recipe | repeats in the baseline | red, of real runs of other seeds | what was red |"
    yield "|---|---|---|---|"
    total = {repeats: [0, 0] for repeats, _ in BASELINES}
    for recipe in RECIPES:
        for repeats, firsts in BASELINES:
            red, count, causes = 0, 0, set()
            for first in firsts:
                seeds = tuple(range(first, first + repeats))
                for seed in range(HEALTHY[recipe]):
                    if seed not in seeds:
                        reports = runs.judged(recipe, f"healthy-{seed}", runs.baseline(recipe, seeds))
                        count += 1
                        red += any(report.exit_code != 0 for report in reports)
                        causes |= _codes(reports)
            total[repeats][0] += red
            total[repeats][1] += count
            yield f"| {recipe} | {repeats} | {red} of {count} | {', '.join(sorted(causes)) or '–'} |"
    for repeats, (red, count) in total.items():
        yield f"| all | {repeats} | {interval(red, count)} | |"


def _codes(reports: Sequence[GateReport]) -> set[str]:
    return {c.check.split()[0] for report in reports for c in report.checks if c.fails}


def pinned_healthy(runs: Runs) -> Iterator[str]:
    """The same seed on other threads, another matrix library, or by other kernels."""
    told = {"variation": "on one or two threads, with oneDNN or without", "rewrite": "with fused norms or attention"}
    for kind, words in told.items():
        red = count = 0
        causes: set[str] = set()
        for recipe, name, seed in wanted():
            if name.startswith(kind):
                reports = runs.judged(recipe, f"{name}-{seed}", runs.baseline(recipe, (seed,)))
                count += 1
                red += any(report.exit_code != 0 for report in reports)
                causes |= _codes(reports)
        reasons = f": {', '.join(sorted(causes))}" if causes else ""
        yield f"- Same seed as the one baseline run, {words}: {interval(red, count)} red{reasons}."


# -- simulation -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Simulated:
    """A run that was never trained: only its figures."""

    dtype: str
    shape: tuple[int, ...]
    module_class: str
    figures: Mapping[str, float]
    badness: frozenset[str] = frozenset()
    first_bad_step: int | None = None
    start: None = None

    def __getattr__(self, name: str) -> float | None:
        return self.figures.get({"at_max_share": "saturated"}.get(name, name.removesuffix("_share")))


def simulated(runs: Runs) -> Iterator[str]:
    """Figures drawn from the recorded runs' mean and covariance, so that tensors move together as they do."""
    red = count = 0
    random = np.random.default_rng(0)
    settings = resolve_options({}, CHECKS)
    for recipe in RECIPES:
        tables = [_table(runs, recipe, seed) for seed in range(HEALTHY[recipe])]
        names = [(key, name) for key in tables[0] for name in metrics_of(tables[0][key], key[2])]
        names = [n for n in names if all(n[0] in t and n[1] in metrics_of(t[n[0]], n[0][2]) for t in tables)]
        figures = np.array([[metrics_of(t[key], key[2])[name] for key, name in names] for t in tables])
        center, residuals = figures.mean(0), figures - figures.mean(0)
        baseline = runs.baseline(recipe, tuple(range(5)))
        for _ in range(SIMULATED):
            drawn = center + random.normal(size=len(tables)) @ residuals / math.sqrt(len(tables) - 1)
            found = _simulated(tables[0], dict(zip(names, drawn.tolist(), strict=True)))
            pairing = Pairing(baseline.steps, baseline.sampled, found, baseline)
            lines = [x for c in CHECKS for x in c.compare(c, pairing, settings[c.code]) if c.code in _STATISTICAL]
            count += 1
            red += any(not x.passed and x.severity is Severity.ERROR for x in lines)
    yield f"- Simulated repeats against the baselines of five runs: {interval(red, count)} red."


_STATISTICAL = ("PD801", "PD802", "PD803", "PD806", "PD811", "PD812")


def _table(runs: Runs, recipe: str, seed: int) -> dict[Key, Summary]:
    view = view_of(runs.run(recipe, f"healthy-{seed}"))
    return summaries(view, list(view.sampled_steps))


def _simulated(table: Mapping[Key, Summary], figures: Mapping[tuple[Key, str], float]) -> dict[Key, Summary]:
    found = {}
    for key, summary in table.items():
        own = {m.name: figures[key, m.name] for m in METRICS if (key, m.name) in figures}
        if own:
            found[key] = Simulated(summary.dtype, summary.shape, summary.module_class, own)
    return found  # type: ignore[return-value]


# -- regressions ------------------------------------------------------------------------------------------------------


def caught(reports: Sequence[GateReport], changed: str) -> tuple[bool, bool, bool]:
    """Whether the gate is red; whether it names the changed module first, and among the first three."""
    red = any(report.exit_code == 1 for report in reports)
    if not changed:
        named = bool(_codes(reports) & set(SCALER))
        return red, named, named
    suspects = reports[-1].suspects
    return red, suspects[:1] == (changed,), changed in suspects[:3]


def regressions(runs: Runs) -> Iterator[str]:
    """Each regression in each recipe and seed, pinned to a baseline run's seed and against other seeds."""
    yield "| regression | recipe | pinned: caught | first named | in the top 3 | other seeds: caught | in the top 3 |"
    yield "|---|---|---|---|---|---|---|"
    totals = np.zeros(6, dtype=int)
    for number, regression in enumerate(REGRESSIONS):
        for recipe in regression.recipes:
            names = [f"{kind}-{seed}" for r, kind, seed in wanted() if (r, kind) == (recipe, f"regression{number}")]
            counts = np.zeros(6, dtype=int)
            for name in names:
                changed = runs.note(recipe, name)["changed"]
                seed = int(name.rpartition("-")[2])
                pinned = caught(runs.judged(recipe, name, runs.baseline(recipe, (seed,))), changed)
                other = caught(runs.judged(recipe, name, runs.baseline(recipe, tuple(range(10, 15)))), changed)
                counts += np.array([1, *pinned, other[0], other[2]])
            totals += counts
            yield f"| {regression.name} | {recipe} | {_shares(counts)} |"
    yield f"| all | | {_shares(totals)} |"
    yield ""
    total, red, first, top, *_ = (int(n) for n in totals)
    yield f"Pinned: caught {interval(red, total)}; named first {interval(first, total)}; top 3 {interval(top, total)}."


def _shares(counts: Sequence[int]) -> str:
    total, *hits = (int(n) for n in counts)
    return " | ".join(f"{n}/{total}" for n in hits)


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "precdoctor-runs/gating")
    record_all(directory)
    runs = Runs(directory)
    print("# Is red right?\n")
    print("Written by `make gating`: a two-layer transformer of 105 002 parameters, 20 steps, recorded on a CPU with")
    print("`--every 1`; intervals are Wilson's, 95 %.\n")
    print("## Healthy repeats\n")
    for part in (healthy, pinned_healthy, simulated):
        print("\n".join(part(runs)), "\n")
    print("## Injected regressions\n")
    print("\n".join(regressions(runs)))
    print(_MISSED)


#: What the table means, kept beside it; true of the runs it was written from.
_MISSED = """
What is missed, and why: an eps of 1e-5 next to a variance of 5 changes a norm by 1e-6, as computing that norm
by another kernel does; eight-bit mantissas hide much of a BF16 accumulation of 64 to 256 terms in a BF16 output, and
a BF16 softmax in an FP16 one. Against runs of other seeds only the loss scale is found: what moves a tensor by less
than seeds do cannot be seen there, so pin the seed. The limits of PD813 were set on these runs (in round numbers, so
that the rewrites pass); pinned healthy runs are 54, so their false-red rate is bounded by a few percent only."""


if __name__ == "__main__":
    main()
