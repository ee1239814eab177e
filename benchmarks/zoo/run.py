"""Trains with real libraries, plain and recorded: `make zoo` writes benchmarks/results/zoo.md.

Every script under ``scripts/`` runs three times: plain, recorded with default settings, plain again. Then the log is
diagnosed. Results are kept per script in ``build/zoo/results``; a rerun repeats only those whose script, recorder or
library changed, so an interrupted run goes on where it ended. What was found is judged by hand, in judgements.toml.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"
WORK = ROOT / "build" / "zoo"
PAGE = ROOT / "benchmarks" / "results" / "zoo.md"
#: Seconds for one run of one script; each takes at most 60 on an idle core.
PATIENCE = 300
BIN = Path(sys.executable).parent
LAUNCHERS: Mapping[str, Sequence[str]] = {
    "python": (sys.executable,),
    "torchrun 2": (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "accelerate 2": (
        *(sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no"),
    ),
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "WANDB_MODE": "disabled",
    "MPLBACKEND": "Agg",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
}


@dataclasses.dataclass(frozen=True)
class Training:
    """A script: what its docstring says about it."""

    path: Path
    about: str
    library: str
    launch: str

    @property
    def name(self) -> str:
        return self.path.stem

    @functools.cached_property
    def version(self) -> str | None:
        """Of its library; None where that is not installed."""
        try:
            return metadata.version(self.library)
        except metadata.PackageNotFoundError:
            return None

    @property
    def command(self) -> list[str]:
        return [*LAUNCHERS[self.launch], str(self.path)]

    def fingerprint(self) -> str:
        """Changes when the result may: sha256 over script, helpers, precdoctor, torch and the library's version."""
        digest = hashlib.sha256(f"{self.version} {metadata.version('torch')} {_recorder()}".encode())
        for path in _sources(self.path):
            digest.update(path.read_bytes())
        return digest.hexdigest()


@functools.cache
def _recorder() -> str:
    """sha256 over precdoctor's modules."""
    modules = sorted((ROOT / "precdoctor").rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules)).hexdigest()


def _sources(script: Path) -> list[Path]:
    """The script and the helpers beside it that it imports, directly or by way of others."""
    names = sorted(set(re.findall(r"^(?:import|from) (_\w+)\b", script.read_text(), re.MULTILINE)) - {"__future__"})
    return [script, *(path for name in names for path in _sources(SCRIPTS / f"{name}.py"))]


@dataclasses.dataclass(frozen=True)
class Ended:
    """One process that has ended; ``status`` is None when it ran out of time."""

    status: int | None
    out: str
    err: str
    seconds: float


def load(pattern: str = "") -> list[Training]:
    """The scripts with ``pattern`` in their name, sorted by name."""
    found = []
    for path in sorted(SCRIPTS.glob("[!_]*.py")):
        text = path.read_text()
        about, library = re.search(r'"""(.+)', text), re.search(r"^library: (\S+)$", text, re.MULTILINE)
        launch = re.search(r"^launch: (.+)$", text, re.MULTILINE)
        if about is None or library is None:
            sys.exit(f"{path.name}: its docstring needs a first line and a line `library: NAME`")
        if re.search(pattern, path.stem):
            found.append(Training(path, about[1].rstrip('."'), library[1], launch[1] if launch else "python"))
    return found


# -- running -----------------------------------------------------------------------------------------------------------


def start(command: Sequence[str], folder: Path, patience: float) -> Ended:
    """Runs a command in a fresh ``folder``; whatever is left of it after ``patience`` seconds is killed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {**os.environ, **ENVIRONMENT, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # large libraries take a minute to compile
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    begin = time.monotonic()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            status: int | None = child.wait(patience)
        except subprocess.TimeoutExpired:
            status = None
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        if status is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    seconds = time.monotonic() - begin
    return Ended(status, out.read_text(errors="replace"), err.read_text(errors="replace"), seconds)


def measure(training: Training, folder: Path, patience: float = PATIENCE) -> dict[str, Any]:
    """Everything the page has about one training; its runs and its log lie in ``folder`` afterwards."""
    if training.version is None:
        return {"about": training.about, "broken": f"{training.library} is not installed"}
    run = folder / "run"
    record = [sys.executable, "-m", "precdoctor", "record", "-o", str(run), "--", *training.command]
    first = start(training.command, folder / "plain", patience)
    if first.status != 0:
        return {"about": training.about, "broken": _last(first)}
    shutil.rmtree(run, ignore_errors=True)
    recorded = start(record, folder / "recorded", patience)
    second = start(training.command, folder / "again", patience)
    plain = [_lines(first.out), _lines(second.out)]
    result = {
        "about": training.about,
        "library": training.library,
        "version": training.version,
        "status": [first.status, recorded.status, second.status],
        "deterministic": plain[0] == plain[1],
        "equal": _lines(recorded.out) in plain,
        "digests": "rank 0 weights" in first.out,
        "seconds": [round(ended.seconds, 2) for ended in (first, recorded, second)],
        "stderr": {"plain": first.err[-1500:], "recorded": recorded.err[-1500:]},
        "notes": _notes(recorded.err),
    }
    return result | _diagnose(run, patience)


def _last(ended: Ended) -> str:
    """Why a script failed, in its own last words."""
    words = [line for line in ended.err.splitlines() if line.strip()]
    return f"fails by itself, status {_status(ended.status)}: {words[-1].strip() if words else 'no message'}"


def _lines(out: str) -> list[str]:
    """The lines of a stdout in an order that ranks do not race for."""
    return sorted(out.splitlines())


def _notes(err: str) -> list[str]:
    """What the recorder wrote, but for where the log lies."""
    said = [line.removeprefix("precdoctor: ") for line in err.splitlines() if line.startswith("precdoctor: ")]
    return [line for line in said if not line.startswith("recorded ")]


def _diagnose(run: Path, patience: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "precdoctor", "diagnose", "--output-format", "json", str(run)]
    ended = start(command, run.parent / "diagnosis", patience)
    try:
        diagnosis = json.loads(ended.out)
    except ValueError:
        return {"diagnose": ended.err[-1500:] or "no output", "findings": [], "run": None}
    findings = [
        {
            "code": f["code"],
            "severity": f["severity"],
            "place": _place(f["location"]),
            "title": f["title"],
            "message": f["message"],
            "confidence": f["confidence"],
        }
        for f in diagnosis["findings"]
    ]
    known = {key: diagnosis["run"].get(key) for key in ("steps", "sampled_steps", "ranks", "complete", "problems")}
    return {"diagnose": diagnosis["verdict"], "findings": findings, "run": known}


def _place(location: Mapping[str, Any]) -> str:
    """Where a finding points at, without what changes from run to run."""
    parts = [location.get("root"), location.get("module"), location.get("kind")]
    return " ".join(part for part in parts if part) or "the run"


# -- the page ----------------------------------------------------------------------------------------------------------

HEAD = """\
# Real libraries, plain and recorded

`make zoo` writes this page: it trains with each library three times (plain, recorded with default settings, plain
again) and diagnoses the log. *Output*: whether the recorded run printed the same as the plain one; the last lines of
every script are sha256 digests of its losses and of its final weights. *Status*: the same exit status. *Time*:
recorded over plain, start of Python and imports included, from one interleaved run; a note, not a measurement of
overhead.

| training | library | output | status | steps | findings | time |
|---|---|---|---|---:|---|---:|
"""


def _row(name: str, result: Mapping[str, Any]) -> str:
    first, recorded, _ = result["status"]
    if not result["deterministic"]:
        output = "equal to one of two that differ" if result["equal"] else "differs between plain runs"
    elif not result["digests"]:
        output = "no digest"
    else:
        output = "equal" if result["equal"] else "**changed**"
    status = "equal" if first == recorded else f"**{_status(first)} → {_status(recorded)}**"
    codes: dict[str, int] = {}
    for finding in result["findings"]:
        codes[finding["code"]] = codes.get(finding["code"], 0) + 1
    found = ", ".join(f"{code}{f' ({n})' if n > 1 else ''}" for code, n in codes.items()) or "none"
    if result["run"] is None:
        found = "**no diagnosis**"
    steps = result["run"]["steps"] if result["run"] else "-"
    a, r, b = result["seconds"]
    cells = [
        f"`{name}`: {result['about']}{' (out of date)' if result.get('stale') else ''}",
        f"{result['library']} {result['version']}",
        *(output, status, str(steps), found, f"{2 * r / (a + b):.2f}"),
    ]
    return f"| {' | '.join(cells)} |"


def _status(status: int | None) -> str:
    return "time limit" if status is None else str(status)


def _judged(results: Mapping[str, Mapping[str, Any]], judgements: Sequence[Mapping[str, Any]]) -> list[str]:
    verdicts = {(j["script"], j["code"], j["place"]): j for j in judgements}
    lines = []
    for name, result in results.items():
        for f in result["findings"]:
            judgement = verdicts.get((name, f["code"], f["place"]))
            right = "**unjudged**" if judgement is None else "true" if judgement["true"] else "**false**"
            why = "" if judgement is None else judgement["why"]
            place = f"`{f['place']}`"
            cells = (f"`{name}`", f["code"], f["severity"], place, f["title"], right, why)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return list(dict.fromkeys(lines))


def page(results: Mapping[str, Mapping[str, Any]], table: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    broken = [f"- `{name}`: {r['broken']}" for name, r in results.items() if "broken" in r]
    results = {name: r for name, r in results.items() if "broken" not in r}
    judged = _judged(results, table.get("finding", []))
    values = list(results.values())
    counts = {
        "trainings": len(values),
        "equal output": sum(r["equal"] and r["digests"] for r in values),
        "equal exit status": sum(r["status"][0] == r["status"][1] for r in values),
        "without a finding": sum(not r["findings"] and r["run"] is not None for r in values),
        "findings judged false": sum("| **false** |" in line for line in judged),
        "findings unjudged": sum("| **unjudged** |" in line for line in judged),
    }
    parts = [HEAD + "\n".join(_row(name, result) for name, result in results.items())]
    parts.append(", ".join(f"{key}: {count}" for key, count in counts.items()) + ".")
    if judged:
        head = "| training | code | severity | place | title | judged | why |\n|---|---|---|---|---|---|---|\n"
        parts.append("## Findings\n\n" + head + "\n".join(judged))
    notes = [f"- `{name}`: {note}" for name, result in results.items() for note in _all_notes(result)]
    if notes:
        parts.append("## What the recorder wrote while it recorded\n\n" + "\n".join(notes))
    if lines := [f"- {library}: {why}" for library, why in sorted(table.get("absent", {}).items())] + broken:
        parts.append("## Not trained here\n\n" + "\n".join(lines))
    parts.append(f"torch {metadata.version('torch')}, Python {platform.python_version()}, {platform.machine()}.")
    return "\n\n".join(parts) + "\n"


def _all_notes(result: Mapping[str, Any]) -> list[str]:
    problems = [str(problem) for problem in (result["run"] or {}).get("problems") or ()]
    return list(dict.fromkeys([*result["notes"], *problems]))


def judgements() -> dict[str, Any]:
    """What somebody decided about findings, and why libraries are absent; see the head of the file."""
    return tomli.loads((HERE / "judgements.toml").read_text())


def _kept(training: Training) -> dict[str, Any] | None:
    path = WORK / "results" / f"{training.name}.json"
    if not path.is_file():
        return None
    result = json.loads(path.read_text())
    return {**result, "stale": result["fingerprint"] != training.fingerprint()}


def main() -> int:
    """Exit status 1 when recording changed an output or an exit status, or a finding is false or unjudged."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="REGEX", default="", help="scripts with this in their name")
    parser.add_argument("--again", action="store_true", help="repeat what is up to date as well")
    parser.add_argument(
        "--page", action="store_true", help="run nothing; write the page from the results that are there"
    )
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds for one run (default: %(default)s)")
    given = parser.parse_args()
    (WORK / "results").mkdir(parents=True, exist_ok=True)
    for training in [] if given.page else load(given.k):
        kept = _kept(training)
        if given.again or kept is None or kept["stale"] or "broken" in kept:
            measured = measure(training, WORK / "runs" / training.name, given.patience)
            result = {"fingerprint": training.fingerprint(), **measured}
            (WORK / "results" / f"{training.name}.json").write_text(json.dumps(result, indent=1))
            print(
                f"{training.name}: {result['broken']}" if "broken" in result else _row(training.name, result),
                flush=True,
            )
    results = {training.name: kept for training in load() if (kept := _kept(training)) is not None}
    text = page(results, judgements())
    PAGE.write_text(text)
    return int("**" in text)


if __name__ == "__main__":
    sys.exit(main())
