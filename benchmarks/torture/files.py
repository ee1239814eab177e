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

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.torture.targets import FACTS, STEPS, TENSORS, attempt, targets
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
        run = write_run(workspace / f"names-{number}", rows, STEPS, facts=facts, info={"command": [name], "cwd": name})
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


def bombs(workspace: Path, seed: int, count: int) -> str:
    """Logs that unfold: a command answers or refuses, within its memory."""
    made = list(itertools.islice(_bombs(workspace), count))
    worst, words = 0, []
    for name, run in made:
        command = [sys.executable, "-m", "precdoctor", "diagnose", str(run)]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        with child.stderr:
            error = child.stderr.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        taken = usage.ru_maxrss * 1024
        assert child.returncode in (0, 3), f"{name}: status {child.returncode}: {error[-500:]}"
        assert taken <= MEMORY, f"{name}: {taken / 1e9:.2f} GB"
        worst = max(worst, taken)
        words.append(f"{name} {taken / 1e6:.0f} MB, {usage.ru_utime:.0f} s, status {child.returncode}")
    del seed
    return f"{len(made)} bombs ({'; '.join(words)}); at most {worst / 1e6:.0f} MB"


def _bombs(workspace: Path) -> Iterator[tuple[str, Path]]:
    yield "20 000 equal rows", _repeated(workspace / "rows", 20_000, {})
    yield "lists of 512 zeros", _repeated(workspace / "lists", 20_000, {"exp_hist": [0] * 512, "exp_lo": -9})
    yield "names of 1 MiB", _repeated(workspace / "names", 3000, {"module": "x" * (1 << 20)})
    yield "5 000 000 equal rows", _repeated(workspace / "many", 5_000_000, {})


def _repeated(run: Path, rows: int, columns: dict[str, object]) -> Path:
    """A log whose tensors part holds one row very often."""
    write_run(run, [{"step": 0}], STEPS, facts=FACTS)
    path = run / "rank-00000/tensors-000001.parquet"
    one = pa.Table.from_batches([build_batch("tensors", columns_of("tensors", [{**TENSORS[0], **columns}]), 1)])
    some = min(rows, 1 << 10)
    block = one.take(pa.array([0] * some))
    options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False}
    with pq.ParquetWriter(path, one.schema, **options) as writer:
        for at in range(0, rows, some):
            writer.write_table(block.slice(0, min(some, rows - at)))
    manifest = run / "rank-00000/parts.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    line = {"name": path.name, "rows": rows, "first_step": 0, "last_step": 0, "blake2b": digest_of(path.read_bytes())}
    manifest.write_text("".join(json.dumps(line if old["name"] == path.name else old) + "\n" for old in lines))
    return run


def cores_off() -> None:
    """Processes that are killed leave no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
