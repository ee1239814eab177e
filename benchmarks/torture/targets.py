"""Readers of what others may have written, each given one damaged file: an answer or one of our errors, never else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from precdoctor.cli.config import Settings
from precdoctor.comparison.baseline_file import read_baseline
from precdoctor.diagnosis.engine import diagnose
from precdoctor.diagnosis.prescriptions.file import load
from precdoctor.errors import PrecdoctorError
from precdoctor.runlog import open_run
from precdoctor.runlog.sealing import digest_of
from precdoctor.runlog.verify import verify
from tests.support.runs import write_run

TENSORS = [
    {
        "step": step,
        "module": module,
        "module_class": "Linear",
        "kind": kind,
        "name": name,
        "numel": 64,
        "shape": [8, 8],
        "amax": 2.0 * step + 1.0,
        "amin_nonzero": 2.0**-9,
        "sum": 3.0,
        "sum_sq": 9.0,
        "order": 3,
        "exp_lo": -9,
        "exp_hist": [1, 0, 40, 23],
        "nan": int(step == 3),
        "first_bad_order": 4,
        "scale": 1024.0,
    }
    for step in range(4)
    for module in ("a", "b.0")
    for kind, name in (("output", ""), ("weight_grad", "weight"), ("weight", "weight"), ("update", "weight"))
]
STEPS = [
    {"step": n, "loss": 1.0 / (n + 1), "lr": 0.1, "lrs": [0.1], "loss_scale": 1024.0, "grad_norm": 1.0}
    for n in range(4)
]
EVENTS = [
    {
        "step": n,
        "event": kind,
        "data": json.dumps({"change": "backoff", "from": 2.0, "to": 1.0, "rows": 3, "what": kind}),
    }
    for n, kind in enumerate(("scaler", "nonfinite", "warning", "drop", "incident"))
]
FACTS = {
    "schema_version": 1,
    "pid": 7,
    "roots": [
        {
            "name": "Net#0",
            "class": "Net",
            "modules": [
                {"name": "", "class": "Net"},
                {"name": "a", "class": "Linear"},
                {"name": "b.0", "class": "Linear"},
            ],
            "parameters": [
                {"name": "a.weight", "module": "a", "shape": [8, 8], "dtype": "float32", "tied": ["b.0.weight"]}
            ],
            "reduction": {"dtype": "float32"},
        }
    ],
    "optimizers": [
        {"name": "SGD#0", "class": "SGD", "intended_update": "exact", "groups": [{"lr": 0.1, "parameters": 2}]}
    ],
    "scalers": [{"class": "GradScaler", "enabled": True, "init_scale": 65536.0, "growth_interval": 2000}],
    "autocast": ["cuda:float16"],
    "flags": {"matmul_precision": "highest"},
    "versions": {"torch": "2.13.0"},
    "device": {"type": "cuda", "name": "gpu", "memory": 1, "count": 1, "capability": [9, 0]},
}
SETTINGS = b"""[record]\nevery = 16\nexclude = ["teacher.*"]\nmax-disk = "2GB"\nbudget = "1%"\nsteps = "0:10"\n[gate]\n\
fail-on = "warning"\nbaseline = "numerics.toml"\nfail-if = ["headroom:*:2"]\n[rules.PD101]\nconfidence = 0.9\n"""


@dataclass(frozen=True)
class Target:
    """A reader: the file it is given, by its place in the workspace, good contents of it, and what is asked of it."""

    name: str
    file: Path
    seeds: tuple[bytes, ...]
    ask: Callable[[bytes], None]


def targets(workspace: Path) -> list[Target]:
    """Make the logs and files that are damaged later, below an empty directory."""
    sealed = write_run(workspace / "sealed", TENSORS, STEPS, EVENTS, facts=FACTS)
    killed = write_run(workspace / "killed", TENSORS, STEPS, EVENTS, facts=FACTS, end=False, batch_rows=8)
    (sealed / "attach.jsonl").write_text('{"pid": 1, "executable": "python", "event": "torch", "message": null}\n')
    files = workspace / "files"
    files.mkdir()
    found = list(_of_documents(sealed))
    for table in ("tensors", "steps", "events"):
        found.append(_of_part(sealed / f"rank-00000/{table}-000001.parquet", table))
        found.append(_of_stream(killed / f"rank-00000/{table}-000001.arrows.open", table))
    return [*found, *_of_settings(sealed, files)]


def attempt(target: Target, content: bytes) -> bool:
    """Whether the reader answered; False for one of our errors in one sentence. The file is as before afterwards.

    Raises:
        Exception: whatever else it ends with is a finding.
    """
    before = target.file.read_bytes() if target.file.exists() else None
    try:
        target.ask(content)
    except PrecdoctorError as error:
        if not str(error) or "\n" in str(error):
            raise AssertionError(f"not one sentence: {error!r}") from error
        return False
    finally:
        if before is not None:
            target.file.write_bytes(before)
    return True


def _of_documents(run: Path) -> Iterator[Target]:
    names = ("run.json", "rank-00000/rank.json", "rank-00000/end.json", "rank-00000/parts.jsonl", "attach.jsonl")
    for name in names:
        file = run / name

        def ask(content: bytes, file: Path = file) -> None:
            file.write_bytes(content)
            with contextlib.suppress(PrecdoctorError):
                verify(run)
            opened = open_run(run)
            opened.attach_lines()
            diagnosis = diagnose(opened)
            if any("in precdoctor; please report it" in (outcome.reason or "") for outcome in diagnosis.rules):
                raise AssertionError("a rule failed")

        yield Target(name, file, (file.read_bytes(),), ask)


def _of_part(file: Path, table: str) -> Target:
    """With a checksum that agrees: whoever writes a part can write its line."""
    lines = [json.loads(line) for line in (file.parent / "parts.jsonl").read_text().splitlines()]

    def ask(content: bytes) -> None:
        file.write_bytes(content)
        manifest = file.parent / "parts.jsonl"
        good = manifest.read_bytes()
        made = [{**line, "blake2b": digest_of(content)} if line["name"] == file.name else line for line in lines]
        manifest.write_text("".join(json.dumps(line) + "\n" for line in made))
        try:
            verify(file.parents[1])
            for batch in open_run(file.parents[1]).batches(table):
                batch.to_pylist()
        finally:
            manifest.write_bytes(good)

    return Target(f"{table}.parquet", file, (file.read_bytes(),), ask)


def _of_stream(file: Path, table: str) -> Target:
    def ask(content: bytes) -> None:
        file.write_bytes(with_digests(content))
        verify(file.parents[1])
        for batch in open_run(file.parents[1]).batches(table):
            batch.to_pylist()

    return Target(f"{table}.arrows", file, (file.read_bytes(),), ask)


def with_digests(content: bytes) -> bytes:
    """A stream with the checksums that its frames should have, as far as frames can be made out."""
    made, at = bytearray(content), 0
    total = hashlib.blake2b(digest_size=16)
    while at + 8 <= len(made):
        (length,) = struct.unpack_from("<i", made, at + 4)
        follows = made.find(b"\xff\xff\xff\xff", at + 8 + max(length, 0))
        end = len(made) if follows < 0 else follows
        mark = made.find(b"blake2b=", at, end)
        if mark >= 0 and mark + 40 <= end:
            made[mark + 8 : mark + 40] = b"0" * 32
            total.update(made[at:end])
            made[mark + 8 : mark + 40] = total.hexdigest().encode()
        else:
            total.update(made[at:end])
        at = end
    return bytes(made)


def _of_settings(run: Path, files: Path) -> Iterator[Target]:
    from precdoctor.comparison.baseline import learn_from
    from precdoctor.comparison.baseline_file import text_of
    from precdoctor.diagnosis.engine import view_of
    from precdoctor.diagnosis.prescriptions.file import dumps
    from precdoctor.diagnosis.prescriptions.prescribed import prescribe

    def reading(file: Path, read: Callable[[Path], object]) -> Callable[[bytes], None]:
        def ask(content: bytes) -> None:
            file.write_bytes(content)
            read(file)

        return ask

    healthy = write_run(files / "healthy", [r | {"nan": 0} for r in TENSORS], STEPS, facts=FACTS)
    baseline, prescriptions, settings = files / "baseline.toml", files / "fix.toml", files / "precdoctor.toml"
    view = view_of(open_run(run))
    yield Target(
        "baseline", baseline, (text_of(learn_from([open_run(healthy)])).encode(),), reading(baseline, read_baseline)
    )
    text = dumps(prescribe(view, diagnose(view.run)), "runs/a").encode()
    yield Target("prescriptions", prescriptions, (text,), reading(prescriptions, load))
    yield Target("settings", settings, (SETTINGS,), reading(settings, lambda f: Settings({}, f.parent)))


def fresh(workspace: Path) -> Path:
    """An empty directory."""
    shutil.rmtree(workspace, ignore_errors=True)
    workspace.mkdir(parents=True)
    return workspace
