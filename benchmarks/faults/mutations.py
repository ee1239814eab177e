"""Plants one small mistake in a healthy script and asks the diagnosis: python -m benchmarks.faults.mutations [--check]

``truth/mutations.toml`` lists the edits, and ``--set`` takes another table. Each is applied to a copy in a temporary
folder, the copy is recorded and diagnosed as ``score.py`` does it, and a table by kind of mistake is printed.

``--check`` instead runs original and mutant in plain torch (``mutation_harm.py``) and stores in the TOML what the
mistake costs (``harm``). A mutation that is `harmless` there is no fault: silence is right, a warning is an alarm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tomli

from benchmarks.faults.mutation_harm import measure, verdict
from benchmarks.faults.score import Result, precdoctor, verdicts
from benchmarks.faults.truth import HERE, SCRIPTS, Truth

SETS = ("mutations", "mutations2")
KINDS = ("cast", "constant", "order", "removal")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One edit of one script."""

    name: str
    #: Below ``scripts``, without its suffix.
    script: str
    #: Unique in the script.
    old: str
    new: str
    kind: str
    #: What it breaks, in a sentence.
    breaks: str
    #: Codes that name it rightly; another code of the same families is also right.
    codes: tuple[str, ...]
    #: By which the mutant's losses are multiplied before they are compared, where the edit rescales them.
    rescale: float = 1.0
    #: The verdict of ``--check``; it begins with ``harmless`` if nothing was lost.
    harm: str | None = None

    @property
    def harmful(self) -> bool:
        return not (self.harm or "").startswith("harmless")

    def text(self) -> str:
        """The script with the edit.

        Raises:
            ValueError: the old text is not exactly once in the script.
        """
        source = (SCRIPTS / f"{self.script}.py").read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} is in {self.script} {source.count(self.old)} times")
        return source.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True)
class Mutant(Truth):
    """The truth about a mutant, in the form that ``score.py`` takes."""

    path: Path = Path()

    @property
    def script(self) -> Path:
        return self.path


def table(which: str) -> Path:
    """The file of one of ``SETS``."""
    return HERE / "truth" / f"{which}.toml"


def load(which: str = SETS[0], only: str | None = None, kind: str | None = None) -> list[Mutation]:
    """The mutations of a table whose name contains ``only``."""
    found = []
    for name, facts in tomli.loads(table(which).read_text()).items():
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
        found.append(Mutation(name=name, **values))
    return [m for m in found if (only is None or only in m.name) and kind in (None, m.kind)]


def check(mutations: Sequence[Mutation], where: Path, jobs: int, scratch: Path) -> None:
    """Measure the mutations and store every verdict in the table ``where``."""
    scripts = list(dict.fromkeys(m.script for m in mutations))
    with ThreadPoolExecutor(jobs) as pool:
        originals = dict(zip(scripts, pool.map(lambda s: measure(SCRIPTS / f"{s}.py"), scripts), strict=True))
        for mutation, mutant in zip(mutations, pool.map(lambda m: measure(_write(m, scratch)), mutations), strict=True):
            said = verdict(originals[mutation.script], mutant, mutation.rescale)
            print(f"{mutation.name:32}{said}", flush=True)
            _store(where, mutation.name, said)


def _store(where: Path, name: str, harm: str) -> None:
    head, mark, rest = where.read_text().partition(f"[{name}]\n")
    own, bracket, others = re.match(r"(.*?)(\n\[|\Z)(.*)", rest, re.DOTALL).groups()  # type: ignore[union-attr]
    own = re.sub(r"^harm = .*\n?", "", own, flags=re.MULTILINE).rstrip("\n")
    where.write_text(f"{head}{mark}{own}\nharm = {json.dumps(harm)}\n{bracket}{others}")


def _write(mutation: Mutation, scratch: Path) -> Path:
    path = scratch / mutation.name / f"{Path(mutation.script).name}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(mutation.text())
    return path


# -- the diagnosis -----------------------------------------------------------------------------------------------------


def diagnose(mutation: Mutation, scratch: Path, runs: Path) -> Result:
    """Record and diagnose one mutant."""
    print(f"  {mutation.name}", file=sys.stderr, flush=True)
    code, *others = mutation.codes
    truth = Mutant(
        mutation.name, "quiet", mutation.script, code=code, also_code=tuple(others), path=_write(mutation, scratch)
    )
    return precdoctor(truth, (), runs)


def found(result: Result) -> bool:
    """Whether any finding at warning or above is of a right family."""
    return any(verdicts(dataclasses.replace(result, answers=(a,)))["family"] for a in result.answers)


def row(kind: str, pairs: Sequence[tuple[Mutation, Result]]) -> str:
    """One line of the table."""
    harmful = [r for m, r in pairs if m.harmful]
    harmless = [r for m, r in pairs if not m.harmful]
    counts = [
        len(pairs),
        len(harmful),
        sum(map(found, harmful)),
        sum(bool(verdicts(r)["family"]) for r in harmful),
        sum(not r.answers for r in harmful),
    ]
    alarms = f"{sum(bool(r.answers) for r in harmless)}/{len(harmless)}"
    return f"| {kind} | " + " | ".join(map(str, counts)) + f" | {alarms} |"


def main() -> int:
    """Score or check the chosen mutations; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=SETS, default=SETS[0], help="table of edits (default: %(default)s)")
    parser.add_argument("--only", metavar="NAME", help="mutations whose name contains NAME")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument(
        "--check", choices=("new", "all"), nargs="?", const="new", help="measure harm that is not stored, or all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time (default: 1)")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="leave mutants and recorded runs there")
    arguments = parser.parse_args()
    mutations = load(arguments.set, arguments.only, arguments.kind)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = (arguments.keep or Path(temporary)).resolve()
        if arguments.check:
            todo = [m for m in mutations if m.harm is None or arguments.check == "all"]
            check(todo, table(arguments.set), arguments.jobs, scratch)
            return 0
        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = list(pool.map(lambda m: diagnose(m, scratch, scratch / "runs"), mutations))
    pairs = list(zip(mutations, results, strict=True))
    print("| kind | mutations | harmful | found | right family | silent | alarms on harmless |\n" + "|---" * 7 + "|")
    for kind in (*KINDS, "all"):
        if some := [p for p in pairs if kind in (p[0].kind, "all")]:
            print(row(kind, some))
    print("\nfound: a finding at warning or above is of a right family; right family: the first one is.")
    print("\n| mutation | kind | harm | first finding | module | verdict |\n" + "|---" * 6 + "|")
    for mutation, result in pairs:
        first = result.answers[0] if result.answers else None
        code = first.code if first else "-"
        said = "found" if found(result) else "another fault" if first else "silent"
        if not mutation.harmful:
            said = "alarm" if first else "rightly silent"
        place = f"`{first.module}`" if first and first.module else "-"
        print(
            f"| `{mutation.name}` | {mutation.kind} | {mutation.harm or 'not checked'} | {code} | {place} "
            f"| {said}{f' ({result.broke})' if result.broke else ''} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
