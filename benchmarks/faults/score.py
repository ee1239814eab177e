"""Scores diagnoses against the truth: python -m benchmarks.faults.score [--set first] [--only NAME] [--tools all] ...

Every script is recorded with `precdoctor record` in a process of its own, the log is diagnosed with
`diagnose --output-format json`, and the first finding at warning or above (for module@3: any of the first three) is
compared with ``truth/*.toml``. Prints one Markdown table and, below it, what was missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.faults.truth import QUIET_SETS, SETS, Truth, base_name, environment, load

PATIENCE = 300
QUESTIONS = ("found", "family", "code", "phase", "module@1", "module@3", "op", "line", "cause")
QUIET_QUESTIONS = ("found", "family", "code", "module@1", "module@3")
PEERS = {"anomaly": "torch.autograd.detect_anomaly", "underflow": "transformers DebugUnderflowOverflow"}
#: What a peer speaks of at all; the table leaves the rest open.
SPEAKS = {
    "precdoctor": frozenset(QUESTIONS),
    PEERS["anomaly"]: frozenset({"found", "op", "line"}),
    PEERS["underflow"]: frozenset({"found", "module@1"}),
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """One place a tool points at. None: it does not say."""

    code: str | None = None
    phase: str | None = None
    root: str | None = None
    module: str | None = None
    op: str | None = None
    file: str | None = None
    line: int | None = None
    cause: str | None = None
    #: Whether the tool names modules at all; None as a module then means "outside any".
    knows_modules: bool = True


@dataclasses.dataclass(frozen=True)
class Result:
    """What a tool said about one script, best first; ``broke`` when it said nothing because something failed."""

    truth: Truth
    answers: tuple[Answer, ...]
    seconds: float
    broke: str | None = None


# -- right or wrong ----------------------------------------------------------------------------------------------------


def _module_right(truth: Truth, answer: Answer) -> bool:
    if truth.quiet:
        named = answer.knows_modules and any(fnmatchcase(answer.module or "", p) for p in truth.modules)
        return named and (answer.root is None or truth.root is None or answer.root.split("#")[0] == truth.root)
    if not answer.knows_modules or (answer.module or "") != truth.module:
        return False
    if truth.root is None or truth.phase == "data":
        return not answer.module
    return answer.root is None or answer.root.split("#")[0] == truth.root


def _line_right(truth: Truth, answer: Answer) -> bool:
    if answer.file is None or answer.line is None:
        return False
    same = Path(answer.file).parts[-1] == truth.source.name
    return same and answer.line in truth.lines()


def verdicts(result: Result) -> dict[str, bool | None]:
    """Every question about a faulty script: right, wrong, or None where there is no truth (the op of a bad batch)."""
    truth = result.truth
    first = result.answers[0] if result.answers else Answer(knows_modules=False)
    if truth.quiet:
        return _quiet_verdicts(result, first)
    code = truth.code or ""
    return {
        "found": bool(result.answers),
        "family": (first.code or "")[:3] == code[:3],
        "code": first.code == code,
        "phase": first.phase == truth.phase,
        "module@1": _module_right(truth, first),
        "module@3": any(_module_right(truth, a) for a in result.answers[:3]),
        "op": None if truth.op is None else base_name(first.op or "") in truth.ops,
        "line": None if truth.text is None else _line_right(truth, first),
        "cause": first.cause in truth.causes,
    }


def _quiet_verdicts(result: Result, first: Answer) -> dict[str, bool | None]:
    """A fault without a NaN has no op and no line, and sometimes no module (a scaler that thrashes)."""
    truth = result.truth
    unasked: dict[str, bool | None] = dict.fromkeys(QUESTIONS)
    return unasked | {
        "found": bool(result.answers),
        "family": (first.code or "")[:3] in {c[:3] for c in truth.codes},
        "code": first.code in truth.codes,
        "module@1": _module_right(truth, first) if truth.modules else None,
        "module@3": any(_module_right(truth, a) for a in result.answers[:3]) if truth.modules else None,
    }


# -- the tools ---------------------------------------------------------------------------------------------------------


def _run(command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def precdoctor(truth: Truth, options: Sequence[str], runs: Path) -> Result:
    """Record and diagnose one script."""
    directory = runs / truth.name.replace("/", "-")
    began = time.perf_counter()
    main = [sys.executable, "-m", "precdoctor"]
    try:
        record = _run(
            [*main, "record", "-o", str(directory), *options, "--", sys.executable, truth.script.name],
            truth.script.parent,
        )
        seconds = time.perf_counter() - began
        told = _run([*main, "diagnose", str(directory), "--output-format", "json"], truth.script.parent)
    except subprocess.TimeoutExpired as error:
        return Result(truth, (), time.perf_counter() - began, f"timed out: {shlex.join(error.cmd)[-80:]}")
    if told.returncode != 0 and not told.stdout.startswith("{"):
        return Result(truth, (), seconds, (told.stderr or record.stderr).strip()[-300:])
    findings = json.loads(told.stdout)["findings"]
    answers = tuple(_answer(f) for f in findings if f["severity"] in ("error", "warning"))
    broke = None if record.returncode in (0, 66) else f"the training ended with status {record.returncode}"
    return Result(truth, answers, seconds, broke)


def _answer(finding: dict[str, Any]) -> Answer:
    place = finding["location"]
    source = place.get("source") or {}
    return Answer(
        finding["code"],
        place.get("phase"),
        place.get("root"),
        place.get("module"),
        place.get("op"),
        source.get("file"),
        source.get("line"),
        finding.get("cause"),
    )


def peer(kind: str, truth: Truth) -> Result:
    """One script under one of ``PEERS``."""
    began = time.perf_counter()
    try:
        done = _run([sys.executable, "-m", "benchmarks.faults.peers", kind, str(truth.script)], truth.script.parent)
    except subprocess.TimeoutExpired:
        return Result(truth, (), PATIENCE, "timed out")
    seconds = time.perf_counter() - began
    if done.returncode:
        return Result(truth, (), seconds, done.stderr.strip()[-300:])
    said = json.loads(done.stdout.splitlines()[-1])
    if not said["alarm"]:
        return Result(truth, (), seconds, said.get("broke"))
    answer = Answer(
        "PD1", None, None, said["module"], said["op"], said["file"], said["line"], None, kind == "underflow"
    )
    return Result(truth, (answer,), seconds, said.get("broke"))


# -- the table ---------------------------------------------------------------------------------------------------------


def row(tool: str, set_name: str, results: Iterable[Result], questions: Sequence[str] = QUESTIONS) -> str:
    """One line of the table: of the scripts where a question has an answer, how many were answered rightly."""
    results = list(results)
    faulty = [verdicts(r) for r in results if r.truth.faulty]
    healthy = [r for r in results if not r.truth.faulty]
    cells = [tool, set_name, str(len(faulty))]
    for question in questions:
        asked = [v[question] for v in faulty if v[question] is not None and question in SPEAKS[tool]]
        cells.append(f"{sum(map(bool, asked))}/{len(asked)}" if asked else "-")
    cells.append(f"{sum(bool(r.answers) for r in healthy)}/{len(healthy)}")
    cells.append(f"{statistics.median(r.seconds for r in results):.1f}")
    return "| " + " | ".join(cells) + " |"


def table(rows: Iterable[str], questions: Sequence[str] = QUESTIONS) -> str:
    """The Markdown table."""
    heads = ["tool", "set", "faults", *questions, "false alarms", "median s"]
    return "\n".join(["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *rows])


def misses(tool: str, results: Iterable[Result]) -> list[str]:
    """One line for every script that was not answered in full, as far as the tool speaks of it."""
    lines = []
    for r in results:
        if not r.truth.faulty:
            if r.answers or r.broke:
                said = ", ".join(f"{a.code} {a.root or ''}:{a.module}" for a in r.answers[:3])
                lines.append(f"- `{r.truth.name}` (healthy): {said or r.broke}")
            continue
        wrong = [q for q, v in verdicts(r).items() if v is False and q in SPEAKS[tool]]
        if wrong or r.broke:
            a = r.answers[0] if r.answers else None
            told = (a.code, a.phase, a.root, a.module, a.op, a.file, a.line, a.cause) if a else ("nothing",)
            said = " ".join(str(x) for x in told if x is not None)
            lines.append(f"- `{r.truth.name}`: {', '.join(wrong)} (said: {said}){' -- ' + r.broke if r.broke else ''}")
    return lines


def _score(tool: Callable[[Truth], Result], truths: Sequence[Truth], jobs: int) -> list[Result]:
    def one(truth: Truth) -> Result:
        print(f"  {truth.name}", file=sys.stderr, flush=True)
        return tool(truth)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, truths))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", "--half", choices=("all", "every", *SETS), default="all", dest="set_name")
    parser.add_argument("--only", metavar="NAME", help="scripts whose name contains NAME")
    parser.add_argument("--jobs", type=int, default=1, help="scripts at a time (default 1: run times mean something)")
    parser.add_argument("--record-options", default="", metavar="OPTIONS", help="passed on, as in '--every 1'")
    parser.add_argument("--tools", default="precdoctor", help="a list of precdoctor, anomaly, underflow; or all")
    parser.add_argument("--keep", metavar="DIR", type=Path, help="leave the recorded runs there")
    return parser.parse_args()


def main() -> int:
    """Score the chosen scripts; see the module's text."""
    arguments = _arguments()
    truths = load(arguments.set_name, arguments.only)
    if not truths:
        print("no script matches", file=sys.stderr)
        return 2
    options = shlex.split(arguments.record_options)
    sets = list(dict.fromkeys(t.set_name for t in truths))
    with tempfile.TemporaryDirectory() as scratch:
        runs = arguments.keep or Path(scratch)
        tools: dict[str, Callable[[Truth], Result]] = {"precdoctor": lambda t: precdoctor(t, options, runs)}
        tools |= {kind: functools.partial(peer, kind) for kind in PEERS}
        wanted = list(tools) if arguments.tools == "all" else arguments.tools.split(",")
        if unknown := [t for t in wanted if t not in tools]:
            print(f"no tool is called {unknown[0]!r}; there are {', '.join(tools)}", file=sys.stderr)
            return 2
        results = {PEERS.get(name, name): _score(tools[name], truths, arguments.jobs) for name in wanted}
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("precdoctor", "torch", "transformers"))
    print(f"{versions}, Python {platform.python_version()}; record options: {shlex.join(options) or 'none'}\n")
    for title, some, questions in (
        ("", [s for s in sets if s not in QUIET_SETS], QUESTIONS),
        ("## Faults that make no NaN\n\n", [s for s in sets if s in QUIET_SETS], QUIET_QUESTIONS),
    ):
        if some:
            rows = [
                row(name, s, [r for r in rs if r.truth.set_name == s], questions)
                for name, rs in results.items()
                for s in some
            ]
            print(f"{title}{table(rows, questions)}\n")
    for name, rs in results.items():
        print(f"### What {name} missed\n\n" + "\n".join(misses(name, rs) or ["nothing"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
