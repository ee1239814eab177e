"""``with precdoctor.record(...)``: blocks of one process, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import precdoctor
from precdoctor.errors import UsageError
from tests.support.processes import PATIENCE, environment

SCRIPT = """
import hashlib, sys, torch
import precdoctor
from precdoctor.errors import PrecdoctorError

def train(steps, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        loss = model(torch.randn(32, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]

def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))

plain = train(6)
with precdoctor.record("one", every=2) as recording:
    assert equal(train(6), plain)
assert equal(train(3), train(3))                      # after the block nothing is recorded
try:
    with precdoctor.record("two", include=["0"]):
        try:
            with precdoctor.record("nested"):
                pass
        except PrecdoctorError as error:
            print("nested:", error)
        train(4)
        raise KeyError("the user's own")
except KeyError:
    pass
if __import__("os").fork() == 0:                      # a later child is not recorded either
    train(2)
    __import__("os")._exit(0)
__import__("os").wait()
with precdoctor.record("three"):
    pass
print("findings:", len(precdoctor.diagnose(recording.open()).findings))
"""


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    home = tmp_path_factory.mktemp("session")
    (home / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=home, env=environment(), capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return home, done.stdout


def test_each_block_is_a_run_of_its_own(blocks: tuple[Path, str]) -> None:
    home, said = blocks
    one, two = precdoctor.open_run(home / "one"), precdoctor.open_run(home / "two")
    assert sorted(one.steps()["step"]) == list(range(6)) and sorted(two.steps()["step"]) == list(range(4))
    assert set(one.tensors()["step"]) == {0, 2, 4}
    assert all(rank.complete for rank in [*one.ranks, *two.ranks])  # also after an exception
    assert set(two.tensors()["module"]) <= {"0", ""}
    assert "findings: 0" in said


def test_nothing_is_recorded_outside_and_not_twice(blocks: tuple[Path, str]) -> None:
    home, said = blocks
    assert "nested: this process is recorded into" in said
    assert not (home / "nested").exists()
    assert sorted(p.name for p in home.iterdir()) == ["one", "script.py", "three", "two"]
    assert [p.name for p in (home / "one").iterdir() if p.is_dir()] == ["rank-00000"]
    assert precdoctor.open_run(home / "three").ranks == []


@pytest.mark.parametrize(
    ("options", "variables", "complaint"),
    [
        ({"evry": 2}, {}, "precdoctor.record takes every"),
        ({"every": 3}, {}, "power of two"),
        ({}, {"WORLD_SIZE": "2"}, "precdoctor record -- torchrun"),
        ({}, {"PRECDOCTOR_RUN": "/x"}, "already runs under"),
    ],
)
def test_what_cannot_be_recorded_is_said_before(
    options: dict[str, int], variables: dict[str, str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=complaint), precdoctor.record(tmp_path / "run", **options):
        pass
    assert not os.path.lexists(tmp_path / "run")
