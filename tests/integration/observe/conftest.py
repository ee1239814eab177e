"""The zoo, trained once without and once with the recorder, side by side."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import precdoctor
from precdoctor.runlog.reader import Run
from tests.support.processes import AS_ANYWHERE, PATIENCE, ROOT, environment, warm

BOOT = ROOT / "precdoctor" / "recording" / "boot_path"


@dataclass(frozen=True)
class Zoo:
    """What the two children left behind.

    Attributes:
        plain: JSON line of each specimen trained without the recorder, by name.
        recorded: the same with it.
    """

    directory: Path
    plain: dict[str, dict[str, Any]]
    recorded: dict[str, dict[str, Any]]
    _cache: dict[tuple[str, str], Any] = field(default_factory=dict)

    def run(self, name: str) -> Run:
        """The run recorded from one specimen."""
        return self._kept(name, "run", lambda: precdoctor.open_run(self.directory / "runs" / name))

    def rows(self, name: str, **equal: Any) -> pd.DataFrame:
        """Its tensors rows; those whose columns have these values."""
        frame = self._kept(name, "tensors", lambda: self.run(name).tensors())
        for column, value in equal.items():
            frame = frame[frame[column] == value]
        return frame

    def steps(self, name: str) -> pd.DataFrame:
        """Its steps rows, by step."""
        return self._kept(name, "steps", lambda: self.run(name).steps().set_index("step"))

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """The data of its events of one kind, with their step."""
        frame = self._kept(name, "events", lambda: self.run(name).events())
        chosen = frame[frame["event"] == event]
        return [json.loads(data) | {"step": step} for data, step in zip(chosen["data"], chosen["step"], strict=True)]

    def oracle(self, model: str) -> tuple[int, dict[str, str], dict[str, np.ndarray]]:
        """The step a script looked at by itself, the types of what it saw, and the values."""
        facts = json.loads((self.directory / "oracle" / f"{model}.json").read_text())
        with np.load(self.directory / "oracle" / f"{model}.npz") as arrays:
            return facts["step"], facts["types"], dict(arrays)

    def _kept(self, name: str, what: str, make: Any) -> Any:
        if (name, what) not in self._cache:
            self._cache[name, what] = make()
        return self._cache[name, what]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one zoo for all workers
    directory, results = base / "zoo", base / "zoo" / "results.json"
    with (base / "zoo.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            directory.mkdir()
            results.write_text(json.dumps(train(directory)))
    assert results.exists(), "training the zoo failed in another worker"
    return Zoo(directory, *json.loads(results.read_text()))


def train(directory: Path, *names: str, **more: str) -> list[dict[str, dict[str, Any]]]:
    """The zoo, or the named of it, without and with the recorder, at the same time; the specimens' JSON lines by name.

    With variables of the environment given, only with the recorder.
    """
    for part in ("runs", "oracle"):
        (directory / part).mkdir()
    recording = {
        "PRECDOCTOR_RUN": str(directory / "runs"),
        "PRECDOCTOR_OPTIONS": json.dumps({"strict": True}),  # an internal error is a failure
        "ZOO_RUNS": str(directory / "runs"),
        "ZOO_ORACLE": str(directory / "oracle"),
    }
    command = warm("-m", "tests.support.zoo", *names)
    environments = (
        environment(PYTHONPATH=str(ROOT), **AS_ANYWHERE),
        environment(PYTHONPATH=f"{BOOT}{os.pathsep}{ROOT}", **AS_ANYWHERE, **(recording | more)),
    )[bool(more) :]
    children = [
        subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for env in environments
    ]
    results = []
    for child in children:
        out, err = child.communicate(timeout=PATIENCE)
        assert child.returncode == 0, err[-4000:]
        # A constant that a loss was multiplied by is on the host, on CUDA as well; the emulation takes it for a tensor.
        assert more or "precdoctor:" not in err, err
        results.append({line["name"]: line for line in map(json.loads, out.splitlines())})
    return results
