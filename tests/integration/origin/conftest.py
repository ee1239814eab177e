"""The faulty scripts, trained once without and once with the recorder."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import precdoctor
from precdoctor.diagnosis.claims.finding import Finding
from tests.support.processes import AS_ANYWHERE, PATIENCE, ROOT, environment, warm

BOOT = ROOT / "precdoctor" / "recording" / "boot_path"


@dataclass(frozen=True)
class Faulty:
    """What the two children left behind: JSON lines by name, and the runs."""

    directory: Path
    plain: dict[str, dict[str, Any]]
    recorded: dict[str, dict[str, Any]]

    def findings(self, name: str) -> list[Finding]:
        """What diagnose says of one run."""
        return list(precdoctor.diagnose(precdoctor.open_run(self.directory / name)).findings)

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """The data of its events of one kind."""
        frame = precdoctor.open_run(self.directory / name).events()
        return [json.loads(data) for data in frame[frame["event"] == event]["data"]]


@pytest.fixture(scope="session")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Faulty:
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    directory, results = base / "faulty", base / "faulty.json"
    with (base / "faulty.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            directory.mkdir()
            results.write_text(json.dumps(train(directory)))
    assert results.exists(), "training the faulty scripts failed in another worker"
    return Faulty(directory, *json.loads(results.read_text()))


def train(directory: Path) -> list[dict[str, dict[str, Any]]]:
    recording = {
        "PRECDOCTOR_RUN": str(directory),
        "PRECDOCTOR_OPTIONS": json.dumps({"strict": True}),
        "ZOO_RUNS": str(directory),
    }
    command = warm("-m", "tests.support.faulty")
    environments = (
        environment(PYTHONPATH=str(ROOT), **AS_ANYWHERE),
        environment(PYTHONPATH=f"{BOOT}{os.pathsep}{ROOT}", **AS_ANYWHERE, **recording),
    )
    children = [
        subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for env in environments
    ]
    results = []
    for child in children:
        out, err = child.communicate(timeout=PATIENCE)
        assert child.returncode == 0, err[-4000:]
        results.append({line["name"]: line for line in map(json.loads, out.splitlines())})
    return results
