"""Is a finding as often right as it says? Stated confidence on the fault corpus: python -m benchmarks.reliability RUNS

RUNS holds logs of corpus scripts, one directory each, as ``benchmarks.faults.score --keep RUNS`` leaves them. Every log
is diagnosed; a finding at warning or above is right when its code is one that the script's truth names, and its module
too where the truth names one. In a healthy script every such finding is wrong. Prints the tables of
``benchmarks/results/reliability.md``.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.score import Answer, Result, verdicts
from benchmarks.faults.truth import SETS, Truth, load
from benchmarks.intervals import wilson
from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.claims.finding import Finding, Severity
from precdoctor.runlog import open_run

HEAD = """# Stated confidence

Written by `make reliability`. What a finding says of itself (`confidence`) against how often it is right on the fault
corpus: code and module as its truth has them, and the code's family. Shares with Wilson's 95 % interval; *too sure* and
*too modest*: the mean stated confidence lies outside of it. All sets have been seen while the rules were worked on
(`benchmarks/faults/README.md`): shares on new faults will be lower.
"""
#: Ends of the bins of stated confidence; the last one is closed.
EDGES = (0.0, 0.65, 0.75, 0.85, 0.93, 1.0)
#: Of the sets that were scored before anybody had read them: first findings, and how many had the right code. They were
#: made with the rules of that day; the counts are those of ``benchmarks/results/faults.md``.
BLIND = {
    "second": (25, 21),
    "third": (15, 13),
    "fourth": (14, 13),
    "fifth": (17, 14),
    "sixth": (17, 17),
    "seventh": (17, 16),
    "quiet": (29, 25),
    "quiet2": (10, 10),
    "quiet3": (10, 8),
    "quiet4": (7, 5),
    "quiet5": (13, 12),
    "quiet6": (10, 9),
    "quiet7": (5, 5),
    "silent": (27, 24),
    "silent2": (11, 8),
    "silent3": (15, 15),
}
#: Findings of one rule from which on its confidence may be called wrong.
ENOUGH = 5


@dataclass(frozen=True)
class Claim:
    """A finding and what became of it.

    Attributes:
        rank: its place in the diagnosis, from 0, among those at warning or above.
        right: code and module; ``family``: the code's family alone.
    """

    truth: Truth
    rank: int
    code: str
    confidence: float
    right: bool
    family: bool


def claims(truth: Truth, run: Path) -> list[Claim]:
    """What a diagnosis claims about one script, most important first."""
    found = [f for f in diagnose(open_run(run)).findings if f.severity is not Severity.INFO]
    return [judged(truth, rank, f) for rank, f in enumerate(found)]


def judged(truth: Truth, rank: int, finding: Finding) -> Claim:
    """One finding against the truth."""
    place = finding.location
    answer = Answer(finding.code, place.phase, place.root, place.module, place.op, None, None, finding.cause)
    said = verdicts(Result(truth, (answer,), 0.0)) if truth.faulty else {"code": False, "family": False}
    right = said["code"] is True and said.get("module@1") is not False
    return Claim(truth, rank, finding.code, finding.confidence, right, said["family"] is True)


# -- tables ------------------------------------------------------------------------------------------------------------


def share(claims_: Sequence[Claim], is_right: Callable[[Claim], bool]) -> str:
    """``18/20 (70 % to 97 %)``."""
    hits = sum(map(is_right, claims_))
    low, high = wilson(hits, len(claims_))
    return f"{hits}/{len(claims_)} ({low:.0%} to {high:.0%})"


def verdict(claims_: Sequence[Claim]) -> str:
    """Whether the mean of what was stated lies in the interval of what was right."""
    if len(claims_) < ENOUGH:
        return "too few"
    stated = sum(c.confidence for c in claims_) / len(claims_)
    low, high = wilson(sum(c.right for c in claims_), len(claims_))
    return "too sure" if stated > high else "too modest" if stated < low else "in the interval"


def row(name: str, claims_: Sequence[Claim]) -> str:
    stated = sum(c.confidence for c in claims_) / len(claims_)
    cells = (name, f"{stated:.2f}", share(claims_, lambda c: c.right), share(claims_, lambda c: c.family))
    return f"| {' | '.join(cells)} | {verdict(claims_)} |"


def table(head: str, groups: Iterable[tuple[str, Sequence[Claim]]]) -> str:
    head = f"| {head} | mean stated | code and module right | family right | stated against right |"
    return "\n".join([head, "|---" * 5 + "|", *(row(name, group) for name, group in groups if group)])


def by_confidence(claims_: Sequence[Claim]) -> Iterator[tuple[str, list[Claim]]]:
    """Bins of what was stated."""
    for low, high in itertools.pairwise(EDGES):
        closed = high == EDGES[-1]
        inside = [c for c in claims_ if low <= c.confidence < high or (closed and c.confidence == high)]
        yield f"{low:.2f} to {high:.2f}", inside


def by_rule(claims_: Sequence[Claim]) -> Iterator[tuple[str, list[Claim]]]:
    """The rules that spoke."""
    for code in sorted({c.code for c in claims_}):
        yield code, [c for c in claims_ if c.code == code]


def report(found: Sequence[Claim], silent: Sequence[Truth]) -> Iterator[str]:
    """The page below its head; ``silent``: faulty scripts of which nothing was said."""
    first = [c for c in found if c.rank == 0]
    yield f"## The first finding\n\n{table('stated', by_confidence(first))}"
    yield f"## The first finding, by rule\n\n{table('rule', by_rule(first))}"
    later = [c for c in found if c.rank]
    yield (
        "## Later findings\n\nA script has one fault on its label. A later finding of another code may be true of the\n"
        f"run all the same, so these shares are lower bounds.\n\n{table('stated', by_confidence(later))}"
    )
    missed = [c for c in first if not c.right]
    wrong = [f"- `{c.truth.name}`: {c.code} at {c.confidence:.2f}; {_expected(c.truth)}" for c in missed]
    yield "## Wrong first findings\n\n" + "\n".join(wrong or ["None."])
    quiet = [f"- `{t.name}`: {_expected(t)}" for t in silent]
    yield "## Faults of which nothing was said\n\nThey have no confidence to be held against.\n\n" + "\n".join(
        quiet or ["None."]
    )


def blind(found: Sequence[Claim]) -> str:
    """What the first sight of the sets says of the confidence stated there now."""
    heard = [c for c in found if c.rank == 0 and c.truth.set_name in BLIND]
    total, right = (sum(counts) for counts in zip(*BLIND.values(), strict=True))
    low, high = wilson(right, total)
    stated = sum(c.confidence for c in heard) / len(heard) if heard else 0.0
    return (
        "## At first sight\n\nBefore anybody had read them,\n"
        + ",\n".join(f"`{name}` had {hits} right codes among {n} first findings" for name, (n, hits) in BLIND.items())
        + f"\n(`benchmarks/results/faults.md`): {right}/{total}, {low:.0%} to {high:.0%}. What their first findings"
        f"\nstate now is {stated:.2f} in the mean. The difference is what a new fault has to expect."
    )


def _expected(truth: Truth) -> str:
    if not truth.faulty:
        return "healthy"
    where = ", ".join(f"`{m or 'root'}`" for m in truth.modules or ((truth.module,) if truth.module else ()))
    return f"truth {'/'.join(sorted(truth.codes))}" + (f" at {where}" if where else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="directory of the logs that `score --keep` left")
    runs: Path = parser.parse_args().runs
    truths = [t for t in load("every") if (runs / t.name.replace("/", "-")).is_dir()]
    if not truths:
        print(f"{runs} holds no log of a corpus script; `python -m benchmarks.faults.score --set every --keep {runs}` "
              "records them", file=sys.stderr)  # fmt: skip
        return 2
    found: list[Claim] = []
    silent: list[Truth] = []
    for truth in truths:
        print(f"  {truth.name}", file=sys.stderr, flush=True)
        said = claims(truth, runs / truth.name.replace("/", "-"))
        found += said
        silent += [truth] * (truth.faulty and not said)
    print(HEAD)
    print("| set | faulty | healthy | of them with a finding at warning or above |\n|---|---|---|---|")
    for name in SETS:
        mine = [t for t in truths if t.set_name == name]
        spoken = {c.truth.name for c in found}
        sets = [t for t in mine if t.faulty], [t for t in mine if not t.faulty]
        alarms = " + ".join(str(sum(t.name in spoken for t in s)) for s in sets)
        print(f"| {name} | {len(sets[0])} | {len(sets[1])} | {alarms} |")
    print("\n" + "\n\n".join((blind(found), *report(found, silent))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
