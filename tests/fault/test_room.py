"""Recording where address space is short (``ulimit -v``, as batch systems set it): the run is the plain run."""

from __future__ import annotations

import concurrent.futures
import random
import re
import subprocess

import pytest

import precdoctor
from tests.support.processes import PATIENCE, PYTHON, environment, record_command, script

#: Prints the weights after training; on stderr the most address space that the process has had, in kB.
TRAINING = """
import hashlib
import sys
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(20):
    x = torch.randn(64, 64)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), x[:, :8].argmax(1)).backward()
    optimizer.step()
print(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmPeak")), "kB", file=sys.stderr)
"""
#: In the middle of its training the script leaves itself little room.
TIGHTENED = """
import resource
import training

def tighten(step):
    if step == 10:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (300 << 20), resource.RLIM_INFINITY))

print(training.digest(training.train(40, after_step=tighten)))
"""
BLOCK = """
import resource
import precdoctor
import training

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), resource.RLIM_INFINITY))
with precdoctor.record("block"):
    print(training.digest(training.train(3)))
"""
DECLINED = re.compile(r"\d+ MiB of address space \(ulimit -v\) are left, and recording needs 2048 MiB; .* unrecorded")
SEED = 20261124


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("room")
    script(folder, "train.py", TRAINING)
    script(folder, "tightened.py", TIGHTENED)
    script(folder, "block.py", BLOCK)
    return folder


def limited(folder, kib, command):
    """Run a command with so much address space, the command itself and what it starts."""
    shell = ["/bin/sh", "-c", f'ulimit -v {kib or "unlimited"}; exec "$@"', "sh", *command]
    return subprocess.run(shell, cwd=folder, env=environment(), capture_output=True, timeout=PATIENCE, check=False)


def said(finished):
    return [
        line.removeprefix("precdoctor: ") for line in finished.stderr.decode().splitlines() if "precdoctor: " in line
    ]


@pytest.fixture(scope="module")
def needed(folder):
    """KiB of address space that the plain run takes."""
    plain = limited(folder, None, [PYTHON, "train.py"])
    assert plain.returncode == 0, plain.stderr
    return int(plain.stderr.split()[-2])


@pytest.mark.parametrize("count", [2, pytest.param(48, marks=pytest.mark.slow)])
def test_at_every_limit_the_run_is_the_plain_run(folder, needed, count):
    """From what it needs up to where recording has room; before, it died, or went on with half a recorder."""
    draw = random.Random(SEED)
    tight = [needed + draw.randrange(500 << 10) for _ in range(count // 2)]
    wide = [needed + draw.randrange(500 << 10, 3 << 20) for _ in range(count - count // 2 - 1)]

    def at(kib):
        plain = limited(folder, kib, [PYTHON, "train.py"])
        inside = ["/bin/sh", "-c", f'ulimit -v {kib}; exec "$@"', "sh", PYTHON, "train.py"]
        return kib, plain, limited(folder, None, record_command(folder / f"run-{count}-{kib}", *inside))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(at, [*tight, *wide, needed + (4 << 20)]))
    for kib, plain, recorded in runs:
        assert (recorded.returncode, recorded.stdout) == (plain.returncode, plain.stdout), (kib, recorded.stderr)
        first, *others = said(recorded)
        declined = DECLINED.fullmatch(first) and len(others) == 1 and others[0].startswith("nothing was recorded: ")
        assert declined or (first.startswith("recorded 1 process in") and not others), (kib, recorded.stderr)
    assert [bool(DECLINED.match(said(r)[0])) for _, _, r in runs][: count // 2] == [True] * (count // 2)
    assert said(runs[-1][2])[0].startswith("recorded 1 process in")


@pytest.mark.slow
def test_under_a_limit_the_recorder_takes_little_of_it(folder, needed):
    """Arrow's own allocator alone would take 1 GiB."""
    recorded = limited(folder, 8 << 20, record_command(folder / "little", "train.py"))
    assert recorded.returncode == 0, recorded.stderr
    (peak,) = re.findall(r"^(\d+) kB$", recorded.stderr.decode(), re.MULTILINE)
    assert int(peak) - needed < 512 << 10


def test_recording_stops_while_there_is_some_room_left(folder):
    plain = limited(folder, None, [PYTHON, "tightened.py"])
    recorded = limited(folder, None, record_command(folder / "tightened", "--every", "1", "tightened.py"))
    assert (recorded.returncode, recorded.stdout) == (plain.returncode, plain.stdout) and plain.returncode == 0
    first, closing, *more = said(recorded)
    assert re.fullmatch(r"\d+ MiB of address .* needs 512 MiB; recording has stopped, training goes on", first)
    assert closing.startswith("recorded 1 process in tightened (until it stopped early: running short of room: ")
    assert not more
    assert sorted(precdoctor.open_run(folder / "tightened").steps()["step"]) == list(range(12))


@pytest.mark.slow
def test_a_block_is_not_recorded_either(folder):
    plain = limited(folder, None, [PYTHON, "-c", "import training; print(training.digest(training.train(3)))"])
    block = limited(folder, None, [PYTHON, "block.py"])
    assert (block.returncode, block.stdout) == (0, plain.stdout), block.stderr
    (sentence,) = said(block)
    assert DECLINED.fullmatch(sentence)
