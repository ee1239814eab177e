"""The table of a GPU run, from its results.

PYTHONPATH=. python3 -m benchmarks.gpu.report build/gpu/results.jsonl
"""

from __future__ import annotations

import collections
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.jsonlines import read

Line = Mapping[str, Any]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Markdown; a value of None is an empty cell."""
    cells = [[("" if cell is None else str(cell)).replace("|", "\\|") for cell in row] for row in rows]
    if not cells:
        return []
    lines = [list(header), ["---"] * len(header), *cells]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def number(value: Any, digits: int = 2) -> str | None:
    """Rounded; None stays."""
    return None if value is None else f"{value:.{digits}f}"


def summary(lines: Sequence[Line], chosen: Sequence[str]) -> list[str]:
    """A line per section: how its processes ended, and how long they took."""
    found = []
    for section in chosen:
        mine = [line for line in lines if line["section"] == section]
        outcomes = [line for line in mine if "task" in line]
        wall = "".join(f", {line['wall']:.0f} s" for line in mine if "wall" in line)
        counts = collections.Counter(o["result"] for o in outcomes)
        words = ", ".join(f"{count} {result}" for result, count in counts.items()) or "not run"
        bad = [o["task"] for o in outcomes if o["result"] in ("failed", "timeout")]
        found.append(f"{section:9}{words}{wall}{': ' + ', '.join(bad) if bad else ''}")
    return found


def markdown(lines: Sequence[Line]) -> str:
    """The whole page."""
    run = next((line for line in lines if line["section"] == "run"), {})
    facts = {k: v for line in lines if line["section"] == "env" for k, v in line.get("facts", {}).items()}
    title = [f"# GPU run, {run.get('date', '')}: {facts.get('device', run.get('device', ''))}", ""]
    if run.get("device") == "cpu":
        title += ["The CPU stood in the GPU's place: this shows that the command runs, and measures nothing.", ""]
    parts = [
        title,
        _sections(lines, run),
        _environment(facts),
        _checks(lines),
        _numbers(lines),
        _training(lines),
        _tests(lines),
    ]
    return "\n".join(line for part in [*parts, _failures(lines)] for line in part).rstrip() + "\n"


def _sections(lines: Sequence[Line], run: Line) -> list[str]:
    return ["```", *summary(lines, run.get("sections", [])), "```", ""]


def _environment(facts: Mapping[str, object]) -> list[str]:
    return ["## Machine", "", *table(("", ""), facts.items())] if facts else []


def _checks(lines: Sequence[Line]) -> list[str]:
    found = {line["check"]: line for line in lines if "check" in line}
    rows = []
    for outcome in (line for line in lines if line["section"] == "checks" and "task" in line):
        for name in outcome["task"].split(","):
            check = found.get(name, {})
            words = ", ".join(f"{key}: {value}" for key, value in check.get("facts", {}).items())
            result = check.get("result", outcome["result"])
            rows.append((f"`{name}`", result, outcome["seconds"], check.get("about"), words))
    header = ("check", "result", "s", "what has to hold", "seen")
    return ["## Checks", "", *table(header, rows)] if rows else []


def _numbers(lines: Sequence[Line]) -> list[str]:
    by_table: dict[str, list[Line]] = collections.defaultdict(list)
    for line in lines:
        if line["section"] == "numbers" and "table" in line:
            by_table[line["table"]].append(line)
    found = []
    if by_table["copy"]:
        found += [
            "## Bandwidth",
            "",
            "A copy reads and writes, statistics only read. `_stat`, one tensor a launch.",
            "",
        ]
        rates = [(_size(x["bytes"]), f"{x['rate'] / 1e9:.1f}") for x in by_table["copy"]]
        found += table(("copy of", "GB/s"), rates)
    cells = {(x["bytes"], x["dtype"], x["set"], x["content"]): x for x in by_table["stat"]}
    contents = list(dict.fromkeys(x["content"] for x in by_table["stat"]))
    rows = []
    for size, dtype, words in dict.fromkeys(key[:3] for key in cells):
        row = [cells.get((size, dtype, words, content)) for content in contents]
        shown = [f"{x['rate'] / 1e9:.1f} ({x['share']:.0%})" if x else None for x in row]
        rows.append((_size(size), dtype, words, *shown))
    found += table(("tensor", "dtype", "statistics", *(f"{c}, GB/s (of copy)" for c in contents)), rows)
    rows = [
        (x["what"], _us(x["device"]), _us(x["host"]), f"{x['bytes'] / x['device'] / 1e9:.1f}" if x["device"] else None)
        for x in by_table["launch"]
    ]
    found += ["## Launches", "", *table(("launch", "device, µs", "host, µs", "GB/s"), rows)] if rows else []
    metrics = list(dict.fromkeys(x["metric"] for x in by_table["ncu"]))
    by_launch: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for line in by_table["ncu"]:
        by_launch[line["launch"]][line["metric"]] = line["value"]
    profiles = [(launch, *map(values.get, metrics)) for launch, values in by_launch.items()]
    return found + (["## Profile", "", *table(("launch, 512 MiB of BF16", *metrics), profiles)] if profiles else [])


def _size(size: int) -> str:
    return f"{size / 2**20:g} MiB"


def _us(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e6:.1f}"


_COLUMNS = (
    "steps", "ms a step", "ratio", "launches", "graphs", "device, ms", "in our kernels, ms",
    "waits a step", "in waits, ms", "peak, MiB", "sampled", "N", "recorder says, ms: host", "wait", "device",
    "its overhead", "of the run",
)  # fmt: skip


def _training(lines: Sequence[Line]) -> list[str]:
    kinds: dict[tuple[str, str], dict[str, list[Line]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in lines:
        if line["section"] == "training" and "name" in line:
            kinds[line["shape"], line["mode"]][line["name"]].append(line)
    launches = {(x["shape"], x["mode"], x["name"]): x for x in lines if x["section"] == "launches"}
    found = ["## GPT-2 medium", ""] if kinds else []
    for (shape, mode), by_name in kinds.items():
        plain = launches.get((shape, mode, "off"), {})
        rows = [_row(name, blocks, launches.get((shape, mode, name)), plain) for name, blocks in by_name.items()]
        found += [f"### {shape}, {mode}", "", *table(_COLUMNS, rows)]
    if found:
        about = "Of recorded steps, launches and device time are those beyond a plain step's."
        found += [f"{about} Ratios are to the plain blocks before and behind; medians over the rounds in brackets.", ""]
    return found


def _row(name: str, blocks: Sequence[Line], profile: Line | None, plain: Line) -> tuple[object, ...]:
    """Medians over the rounds; what is counted, of the last one. ``profile``, ``plain``: of one step each."""
    last = blocks[-1]
    said = last.get("said", {})
    ms = number(statistics.median(b["ms"] for b in blocks))
    ratio = number(statistics.median(b["ratio"] for b in blocks), 3) if "ratio" in last else None
    is_plain = "said" not in last
    more, device, ours = (None if profile is None else profile[x] for x in ("launches", "device_ms", "our_device_ms"))
    if not is_plain and profile is not None and plain:
        more, device = profile["launches"] - plain["launches"], profile["device_ms"] - plain["device_ms"]
    waits = (number(last["waits"]), number(last["wait_ms"]), number(last["peak_mib"], 0))
    spoken = (said.get("recorder_ms"), said.get("wait_ms"), said.get("device_ms"))
    shares = [None if said.get(key) is None else f"{said[key]:.1%}" for key in ("overhead", "overhead_of_run")]
    label = name if is_plain else f"{name} ({len(blocks)})"
    return (
        label, ms, ratio, more, last.get("graphs"), number(device), number(ours), *waits,
        said.get("sampled"), said.get("period"), *spoken, *shares,
    )  # fmt: skip


def _tests(lines: Sequence[Line]) -> list[str]:
    rows = [
        (line["task"], line["result"], line["seconds"], line["tail"][-1].strip("= ") if line["tail"] else None)
        for line in lines
        if line["section"] == "tests" and "task" in line
    ]
    return ["## Tests", "", *table(("", "result", "s", "pytest"), rows)] if rows else []


def _failures(lines: Sequence[Line]) -> list[str]:
    bad = [line for line in lines if "task" in line and line["tail"] and line["result"] in ("failed", "timeout")]
    found = ["## What failed", ""] if bad else []
    for line in bad:
        found += [f"{line['section']}, {line['task']}: {line['result']}", "", "```", *line["tail"], "```", ""]
    errors = {e for line in lines for e in line.get("said", {}).get("errors", ())}
    return found + [f"- the recorder's own error: {error}" for error in sorted(errors)]


if __name__ == "__main__":
    print(markdown(read(Path(sys.argv[1]))), end="")
