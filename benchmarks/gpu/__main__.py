"""`make gpu`: what only a GPU can show, on a machine that is there for ten minutes.

    PYTHONPATH=. python3 -m benchmarks.gpu

Needs torch, the packages of pyproject.toml and, for the last section, pytest; nothing is installed and no network used.
Variables of the environment:

    SECTIONS    env,checks,numbers,training,tests   which to run, in this order
    CHECKS      names, separated by commas          which checks to run; all
    OUT         build/gpu                           results.jsonl, log.txt, ncu.csv, tests.xml, gpu-DATE.md
    DEVICE      cuda                                cpu: everything at a small size, to try the command itself
    LIMIT       570                                 seconds in all; what does not fit is skipped, and the table shows it

Results are appended as they come. The table is also written to benchmarks/results/ when a GPU was measured. The exit
status is 1 when a check or a measurement failed; tests that fail are in the table and do not count.
"""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import jsonlines, report
from benchmarks.gpu.runner import Runner, Task, module

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that a section may take; the tests have what is left.
SECTIONS = {"env": 40, "checks": 150, "numbers": 60, "training": 255, "tests": 600}
#: Checks that share the GPU; each has threads and a compiler of its own.
_WORKERS = max(1, min(8, (os.cpu_count() or 2) // 2))
_CHECK_SECONDS, _COMPILING_SECONDS = 45, 120
CHECKS = (
    "compiled-long", "compiled-short", "stat-bf16", "stat-fp32", "stat-e4m3", "stat-fp16", "stat-e5m2", "stat-fp64",
    "stat-many", "update-many", "without-triton", "channels-last", "vocabulary", "graph-capture", "device-thread",
    "fp8-backward", "scaled-mm", "neutral-bf16", "neutral-fp16", "loss-scale-collapse", "waits",
)  # fmt: skip
TRAININGS = {("8x1024", "eager"): 110, ("1x256", "eager"): 60, ("8x1024", "compiled"): 60, ("1x256", "compiled"): 45}
TESTS = ("tests/gpu", *(f"tests/unit/recording/test_triton_{what}.py" for what in ("aot", "batch", "kernel", "look")))


class Plan:
    """Which processes each section starts."""

    def __init__(self, device: str, out: Path) -> None:
        self._device, self._out = device, out
        self._common = ("--device", device, "--results", str(out / "results.jsonl"))

    def env(self) -> list[Task]:
        return [Task("environment", module("environment", *self._common), 45)]

    def checks(self) -> list[Task]:
        chosen = os.environ.get("CHECKS", "").split(",") if os.environ.get("CHECKS") else CHECKS
        long = ("compiled", "stat", "update")  # what compiles a dozen kernels or a whole model; they begin first
        return [
            Task(
                name,
                module("checks", name, *self._common),
                _COMPILING_SECONDS if name.startswith(long) else _CHECK_SECONDS,
            )
            for name in chosen
        ]

    def numbers(self) -> list[Task]:
        tasks = [Task(what, module("bandwidth", what, *self._common), 80) for what in ("tensors", "launches")]
        ncu = shutil.which("ncu") if self._device == "cuda" else None
        if ncu:
            look = [ncu, "--clock-control", "none", "--set", "full", "-k", "regex:_stat", "-c", "4", "--csv"]
            look += ["--log-file", str(self._out / "ncu.csv"), *module("bandwidth", "profile", *self._common)]
            tasks.append(Task("ncu", look, 45))
        return tasks

    def training(self) -> list[Task]:
        return [
            Task(f"{shape} {mode}", module("training", shape, mode, *self._common), seconds)
            for (shape, mode), seconds in TRAININGS.items()
            if self._device == "cuda" or (shape, mode) == ("1x256", "eager")
        ]

    def tests(self) -> list[Task]:
        there = [name for name in ("pytest", "xdist", "pytest_timeout") if importlib.util.find_spec(name)]
        command = [sys.executable, "-m", "pytest", *TESTS, "-v", "-p", "no:cacheprovider", "-W", "default"]
        command += ["-n", str(min(12, os.cpu_count() or 1))] if "xdist" in there else []
        command += ["--timeout", "60"] if "pytest_timeout" in there else []
        keep = (
            r"^(FAILED|ERROR) |^=+ .*\b(passed|failed|errors?|skipped|no tests ran)\b.* in ",
            r"\] +(FAILED|ERROR) ",
        )
        return [
            Task(name, [*command, "-m", marks, f"--junitxml={self._out / f'{name}.xml'}"], 600, keep)
            for name, marks in (("tests", "not slow"), ("slow-tests", "slow"))
        ]


def environment(scratch: str) -> dict[str, str]:
    """Of every process: the source tree, deterministic products, caches that later processes find."""
    own = dict(os.environ)
    for name in ("PRECDOCTOR_RUN", "PRECDOCTOR_OPTIONS", "OUT"):
        own.pop(name, None)
    caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    for name, folder in caches.items():
        own.setdefault(name, str(Path(scratch) / folder))
    own.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    own.setdefault("OMP_NUM_THREADS", "2")  # what runs at a time would have each a thread per CPU
    if os.environ.get("DEVICE") == "cpu":
        own["TRITON_INTERPRET"] = "1"
    paths = [str(ROOT), *filter(None, [own.get("PYTHONPATH")])]
    return {**own, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "TMPDIR": scratch}


def run(device: str, out: Path, chosen: list[str], seconds: float) -> bool:
    """Run the sections; the table is written again behind each. Whether checks and measurements went well."""
    out.mkdir(parents=True, exist_ok=True)
    results, began = out / "results.jsonl", time.monotonic()
    for name in ("results.jsonl", "log.txt", "ncu.csv", "tests.xml", "slow-tests.xml"):
        (out / name).unlink(missing_ok=True)
    date = time.strftime("%Y%m%d", time.gmtime())
    tables = [out / f"gpu-{date}.md", *([ROOT / "benchmarks/results" / f"gpu-{date}.md"] if device == "cuda" else [])]
    jsonlines.append(results, {"section": "run", "device": device, "sections": chosen, "date": date})
    with tempfile.TemporaryDirectory(prefix="precdoctor-gpu-") as scratch:
        runner, plan = Runner(results, out / "log.txt", began + seconds, environment(scratch)), Plan(device, out)
        try:
            for name in chosen:
                print(f"{name}: at {time.monotonic() - began:.0f} s", flush=True)
                workers = _WORKERS if name == "checks" else 1
                runner.section(name, getattr(plan, name)(), SECTIONS[name], workers)
                if name == "numbers":
                    _keep_profile(out / "ncu.csv", results)
                _write(tables, results)
        except KeyboardInterrupt:
            print("interrupted; what was measured so far is kept", flush=True)
        finally:
            runner.end_all()
            _write(tables, results)
    print("\n" + "\n".join(report.summary(jsonlines.read(results), chosen)))
    print(f"{time.monotonic() - began:.0f} s; the table is {tables[-1]}")
    return all(o["result"] in ("ok", "skipped") for o in runner.outcomes if o["section"] != "tests")


#: What of a kernel's profile goes into the table.
_PROFILE = (
    "Duration",
    "DRAM Throughput",
    "Registers Per Thread",
    "Achieved Occupancy",
    "Issue Slots Busy",
    "L2 Hit Rate",
)


def _keep_profile(file: Path, results: Path) -> None:
    """Add what ncu measured of each launch to the results."""
    if not file.exists():
        return
    lines = [line for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.startswith('"')]
    for row in csv.DictReader(lines):
        if row.get("Metric Name") in _PROFILE:
            value = f"{row.get('Metric Value', '')} {row.get('Metric Unit', '')}".strip()
            launch = f"{row.get('ID', '')}: {row.get('Kernel Name', '')}"
            found = {"launch": launch, "metric": row["Metric Name"], "value": value}
            jsonlines.append(results, {"section": "numbers", "table": "ncu", **found})


def _write(tables: list[Path], results: Path) -> None:
    text = report.markdown(jsonlines.read(results))
    for table in tables:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(text, encoding="utf-8")


def main() -> None:
    chosen = os.environ.get("SECTIONS", "").split(",") if os.environ.get("SECTIONS") else list(SECTIONS)
    unknown = next((name for name in chosen if name not in SECTIONS), None)
    if unknown is not None:
        raise SystemExit(f"SECTIONS takes {','.join(SECTIONS)}, got {unknown!r}")
    device = os.environ.get("DEVICE", "cuda")
    if device not in ("cuda", "cpu"):
        raise SystemExit(f"DEVICE takes cuda or cpu, got {device!r}")
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(f"{sys.executable} has no torch; name a Python that has it, as in: make gpu PYTHON=python3.12")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu").absolute()
    sys.exit(0 if run(device, out, chosen, float(os.environ.get("LIMIT", "570"))) else 1)


if __name__ == "__main__":
    main()
