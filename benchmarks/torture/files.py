"""Sections about files: processes that are killed, damaged files, hostile names, files that unfold."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.torture.targets import EVENTS, FACTS, STEPS, TENSORS, attempt, targets
from precdoctor.diagnosis.engine import diagnose
from precdoctor.reporting.outputs import WRITERS, Report
from precdoctor.runlog import open_run, seal
from precdoctor.runlog.layout import create_rank_directory, create_run
from precdoctor.runlog.sealing import digest_of
from precdoctor.runlog.verify import verify
from precdoctor.runlog.writer import RankWriter, build_batch
from tests.support.hostile import NAMES
from tests.support.runs import columns_of, write_run

#: What any command may take in memory, in bytes.
MEMORY = 1_500_000_000


def kills(workspace: Path, seed: int, count: int) -> str:
    """SIGKILL writers at random moments; every row that was appended before is read, with its value."""
    rng = random.Random(seed)
    rows = lost = 0
    for number in range(count):
        run = workspace / f"kill-{number}"
        create_run(run, {"command": ["python"]})
        directory = create_rank_directory(run, 0)
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            _append_until_killed(directory, tell, rng.choice((1 << 12, 1 << 16, 8 << 20)))
        os.close(tell)
        os.read(told, 8)  # the first row is there
        time.sleep(rng.random() ** 2 * 0.2)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(told, "rb") as pipe:
            acknowledged = 1 + len(pipe.read()) // 8
        assert verify(run).ok, f"kill {number} of seed {seed}: {verify(run).problems}"
        for _ in range(2):  # as it was left, and sealed
            found = open_run(run).tensors(["step", "amax"])
            assert found["step"].tolist() == list(range(len(found))), f"kill {number} of seed {seed}: rows are missing"
            assert found["amax"].tolist() == [n / 3 for n in range(len(found))], f"kill {number} of seed {seed}"
            lost += max(0, acknowledged - len(found))
            seal(run)
        rows += len(found)
    assert not lost
    return f"{count} writers killed, {rows:,} rows read back, {lost} lost, none altered"


def _append_until_killed(directory: Path, tell: int, rotate: int) -> None:
    try:
        writer = RankWriter(directory, rotate_bytes=rotate)
        for step in range(10**9):
            writer.append("tensors", columns_of("tensors", [{"step": step, "amax": step / 3}]), 1)
            writer.append("steps", columns_of("steps", [{"step": step}]), 1)
            os.write(tell, step.to_bytes(8, "little"))
    finally:
        os._exit(1)


def mutations(workspace: Path, seed: int, count: int) -> str:
    """Damage logs and files at random; each reader answers or refuses in one sentence."""
    rng = random.Random(seed)
    readers = targets(workspace)
    outcomes: Counter[str] = Counter()
    for number in range(count):
        reader = readers[number % len(readers)]
        content = mutated(rng.choice(reader.seeds), rng)
        try:
            outcomes["answered" if attempt(reader, content) else "refused"] += 1
        except Exception as error:
            kept = workspace / f"finding-{number}"
            kept.write_bytes(content)
            raise AssertionError(f"mutation {number} of seed {seed} ({reader.name}), kept as {kept}") from error
    answers = ", ".join(f"{n} {word}" for word, n in sorted(outcomes.items()))
    return f"{count} mutations of {len(readers)} kinds of files: {answers}, 0 crashes"


_TOKENS = (b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b'""', b"true", b"9" * 400, b"[" * 3000, b'"\\u0000"', b"=")


def mutated(content: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, bytes, integers, cuts, copies, tokens of text formats."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 8, 64, 512))
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + size] = rng.randbytes(size)
        elif kind == 2:
            data[at : at + 8] = rng.choice((0, 1, -1, 2**31 - 1, -(2**31), 2**62)).to_bytes(8, "little", signed=True)
        elif kind == 3:
            del data[at : at + size]
        elif kind == 4:
            data[at:at] = data[at : at + size] * rng.choice((1, 2, 50))
        elif kind == 5:
            data[at : at + rng.choice((0, 1, 4))] = rng.choice(_TOKENS)
        else:
            del data[at:]
    return bytes(data)


#: What no report of that kind may hold, whatever the names in the log are.
_FORBIDDEN = {
    **dict.fromkeys(("full", "concise", "github", "markdown", "html"), ("\x1b]", "\x1b[31m", "\x9b", "\x07", "\u202e")),
    "html": ("<script>alert", "<img src=x", "\x1b", "\x07"),
}


def names(workspace: Path, seed: int, count: int) -> str:
    """Every text of a log is hostile; every reporter prints it harmlessly, and what is JSON or XML parses."""
    rng = random.Random(seed)
    chosen = rng.sample(NAMES, min(count, len(NAMES)))
    outputs = 0
    for number, name in enumerate(chosen):
        texts = {"root": name, "module": name, "module_class": name, "name": name}
        rows = [{**row, **texts} for row in TENSORS]
        facts = {**FACTS, "roots": [{"name": name, "class": name, "modules": [{"name": name, "class": name}]}]}
        spoken = {"file": name, "code": name, "op": name, "root": name, "module": name, "line": 3}
        said = json.dumps(
            {"what": name, "message": name, "reason": name, "rows": 3, "where": {"file": name, "code": name}}
        )
        events = [{**event, **spoken, "data": said} for event in EVENTS]
        info = {"command": [name], "cwd": name}
        run = write_run(workspace / f"names-{number}", rows, STEPS, events, facts=facts, info=info)
        diagnosis = diagnose(run)
        for kind, write in WRITERS.items():
            out = io.StringIO()
            write(Report(diagnosis, 0, None), out)
            text = out.getvalue()
            if kind in ("json", "sarif", "gitlab"):
                json.loads(text)
            elif kind == "junit":
                ET.fromstring(text)
            for bad in _FORBIDDEN.get(kind, ()):
                assert bad not in text, f"{kind} prints {bad!r} of {name!r}"
            outputs += 1
    return f"{len(chosen)} hostile names, {outputs} reports, nothing injected"


#: What is tried on a bomb R, beside a sound log G.
_COMMANDS: dict[str, list[str]] = {
    "diagnose": ["diagnose", "R"],
    "show": ["show", "R"],
    "report": ["report", "R", "-o", "out.html", "--force"],
    "whatif": ["whatif", "R", "--format", "e4m3"],
    "compare": ["compare", "R", "R"],
    "gate": ["gate", "R", "--baseline", "G"],
    "export": ["export", "R", "--to", "csv", "-o", "tables", "--force"],
    "log verify": ["log", "verify", "R"],
}


def bombs(workspace: Path, seed: int, count: int) -> str:
    """Logs that unfold: every command answers or refuses, within its memory."""
    del seed
    good = write_run(workspace / "good", TENSORS, STEPS, EVENTS, facts=FACTS)
    tried = ((bomb, command) for bomb in _bombs(workspace) for command in _COMMANDS)
    by_bomb, by_command = Counter[str](), Counter[str]()
    for (name, run), command in itertools.islice(tried, count):
        arguments = [{"R": str(run), "G": str(good)}.get(word, word) for word in _COMMANDS[command]]
        status, taken, error = _run(arguments, workspace)
        assert status in (0, 1, 3), f"{command} of {name}: status {status}: {error[-500:]}"
        assert "Traceback" not in error, f"{command} of {name}: {error[-500:]}"
        assert taken <= MEMORY, f"{command} of {name}: {taken / 1e9:.2f} GB"
        by_bomb[name] = max(by_bomb[name], round(taken / 1e6))
        by_command[command] = max(by_command[command], round(taken / 1e6))
    most = "; by ".join(", ".join(f"{name} {taken}" for name, taken in c.items()) for c in (by_command, by_bomb))
    return f"{count} commands on {len(by_bomb)} bombs; MB at most: {most}"


def _run(arguments: list[str], directory: Path) -> tuple[int, int, str]:
    """Exit status, most bytes of memory, and what was written to stderr."""
    limited = ["/bin/sh", "-c", f'ulimit -d {4 * MEMORY >> 10}; exec "$@"', "sh"]  # others work on this machine
    child = subprocess.Popen(
        [*limited, sys.executable, "-m", "precdoctor", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    with child.stderr:
        error = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_maxrss * 1024, error


_WIDE = {
    **{name: [0] * 512 for name in ("exp_hist", "rel_hist", "block16_hist", "block32_hist", "block128_hist")},
    **{name: [0.0] * 512 for name in ("head_max", "head_entropy")},
    "exp_lo": -9,
    "rel_lo": -9,
    "shape": [1] * 512,
}


def _bombs(workspace: Path) -> Iterator[tuple[str, Path]]:
    likely = {"numel": 63, "exp_hist": [1, 0, 40, 22], "amin_nonzero": 0.003, "amax": 0.03, "nan": 0}
    rows = [{**row, **likely} for row in TENSORS]  # whatif holds each row against itself
    tensor, warning = rows[0], {"event": "warning", "step": 0}

    def log(name: str) -> Path:
        return write_run(workspace / name, rows, STEPS, EVENTS, facts=FACTS)

    bomb = '{"what": [' + ",".join(['{"":0}'] * 140_000) + "]}"
    yield "events of 140 000 objects", put_part(log("objects"), "events", [{**warning, "data": bomb}], 400)
    yield "20 000 equal rows", put_part(log("rows"), "tensors", [tensor], 20_000)
    yield "lists of 512 zeros", put_part(log("lists"), "tensors", [{**tensor, **_WIDE}], 60_000)
    yield "names of 8 KiB", put_part(log("names"), "tensors", [{**tensor, "module": "x" * (1 << 13)}], 20_000)
    yield "250 000 tensors", put_part(log("tensors"), "tensors", [tensor], 250_000, module=_numbers(250_000))
    yield "100 000 tensors", put_part(log("fewer"), "tensors", [tensor], 100_000, module=_numbers(100_000))
    yield "events of 900 kB", put_part(log("texts"), "events", [{**warning, "data": "x" * 900_000}], 600)
    yield "300 000 events", put_part(log("events"), "events", [{**warning, "data": '{"what": "x"}'}], 300_000)
    yield "350 000 steps", put_part(log("steps"), "steps", STEPS[:1], 350_000, step=pa.array(range(350_000)))
    yield "1000 rates a step", put_part(log("rates"), "steps", [{**STEPS[0], "lrs": [0.1] * 1000}], 10_000)
    run = log("document")
    (run / "rank-00000/rank.json").write_text('{"x": [' + ",".join(['{"":0}'] * 8_000_000) + "]}")
    yield "rank.json of 8 000 000 objects", run
    run = log("documents")
    for rank in range(1, 40):
        modules = [{"name": f"{rank}.{n}", "class": "L"} for n in range(20_000)]
        (run / f"rank-{rank:05d}").mkdir()
        (run / f"rank-{rank:05d}/rank.json").write_text(json.dumps({"roots": [{"name": "Net#0", "modules": modules}]}))
    yield "40 models of 20 000 modules", run
    yield "2 000 000 equal rows", put_part(log("many"), "tensors", [tensor], 2_000_000)


def _numbers(count: int) -> pa.Array:
    return pa.array([f"{n:07d}" for n in range(count)])


def put_part(run: Path, table: str, row: list[dict[str, Any]], rows: int, **columns: pa.Array) -> Path:
    """Exchange the first part of a table by one that holds one row very often, but for the given columns; the run."""
    (run / f"rank-00000/{table}-000001.arrows.open").unlink(missing_ok=True)
    path = run / f"rank-00000/{table}-000001.parquet"
    one = pa.Table.from_batches([build_batch(table, columns_of(table, row), 1)])
    some = min(rows, 1 << 16 if len(str(row)) < 1000 else 1 << 9 if len(str(row)) < 100_000 else 1 << 5)
    block = one.take(pa.array([0] * some))
    options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False}
    with pq.ParquetWriter(path, one.schema, **options) as writer:
        for at in range(0, rows, some):
            piece = block.slice(0, min(some, rows - at))
            for name, values in columns.items():
                place = piece.schema.get_field_index(name)
                piece = piece.set_column(place, piece.schema.field(place), values.slice(at, piece.num_rows))
            writer.write_table(piece)
    manifest = run / "rank-00000/parts.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines()] if manifest.exists() else []
    steps = (
        pc.min_max(columns["step"]).as_py()
        if "step" in columns
        else dict.fromkeys(("min", "max"), row[0].get("step", 0))
    )
    line = {"name": path.name, "rows": rows, "first_step": steps["min"], "last_step": steps["max"]}
    line["blake2b"] = digest_of(path.read_bytes())
    manifest.write_text("".join(json.dumps(e) + "\n" for e in [*(e for e in lines if e["name"] != path.name), line]))
    return run


def cores_off() -> None:
    """Processes that are killed leave no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
