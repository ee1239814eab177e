"""Sections about processes: tight and failing environments, and threads; the training is to be what it is by itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from precdoctor.errors import PrecdoctorError
from precdoctor.runlog.verify import verify

_TRAINING = """
    import hashlib, os, sys, time
    {before}
    import torch
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(30):
        {each}
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    with open(sys.argv[1], "w") as file:
        file.write(digest)
    sys.exit(7)
"""
_RUN = "os.environ.get('PRECDOCTOR_RUN', '')"
_NO_THREADS = """if step == 0:
            import _thread, threading
            def refuse(*_, **__): raise RuntimeError("can't start new thread")
            threading._start_new_thread = _thread.start_new_thread = refuse"""
#: By name: what is done before torch is imported, what at each step, and what is written behind the command.
ENVIRONMENTS: Mapping[str, tuple[str, str, str]] = {
    "full disk": ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))", "pass", ""),
    "read-only directory": (f"{_RUN} and os.chmod({_RUN}, 0o500)", "pass", ""),
    "vanished directory": (
        "import shutil",
        f"step == 5 and {_RUN} and shutil.rmtree({_RUN}, ignore_errors=True)",
        "",
    ),
    "few descriptors": ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))", "pass", ""),
    "no threads": (
        "",
        _NO_THREADS,
        "",
    ),
    "clock that jumps": (
        "real = time.time, time.time_ns",
        "time.time = lambda: real[0]() + (-1) ** step * 1e7; time.time_ns = lambda: int(time.time() * 1e9)",
        "",
    ),
    "closed streams": ("", "pass", "<&- >&- 2>&-"),
    "timer that interrupts": (
        "import signal",
        "signal.signal(signal.SIGALRM, lambda *a: None); signal.setitimer(signal.ITIMER_REAL, 0.002)",
        "",
    ),
}
_THREADS = """
    import threading, torch
    torch.set_num_threads(1)
    def train(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(3):
            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.randn(4, 8, generator=generator)).sum().backward()
                optimizer.step()
    threads = [threading.Thread(target=train, args=(n,)) for n in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
"""


def environments(workspace: Path, seed: int, count: int) -> str:
    """Train in adverse places, plain and recorded: equal weights, equal exit status, a log that is read or refused."""
    del seed
    words = []
    for name in list(ENVIRONMENTS)[:count]:
        before, each, behind = ENVIRONMENTS[name]
        here = workspace / name.replace(" ", "-")
        here.mkdir()
        (here / "train.py").write_text(textwrap.dedent(_TRAINING).format(before=before, each=each))
        own = f"{sys.executable} train.py"
        plain = _shell(f"{own} plain.txt {behind}", here)
        recorded = _shell(f"{sys.executable} -m precdoctor record -o run -- {own} recorded.txt {behind}", here)
        assert plain == recorded == 7, f"{name}: status {plain} plain, {recorded} recorded"
        assert (here / "plain.txt").read_text() == (here / "recorded.txt").read_text(), f"{name}: other weights"
        words.append(f"{name}: {_log(here / 'run')}")
    return f"{len(words)} environments, all with the status and the bits of the plain run ({'; '.join(words)})"


def threads(workspace: Path, seed: int, count: int) -> str:
    """Record a program that trains in three threads at once; it ends as it would."""
    del seed
    (workspace / "train.py").write_text(textwrap.dedent(_THREADS))
    bad = []
    for number in range(count):
        command = f"{sys.executable} -m precdoctor record -o run-{number} -- {sys.executable} train.py"
        if (status := _shell(command, workspace)) != 0:
            bad.append(f"run {number} ended with {status}")
        elif not verify(workspace / f"run-{number}").ok:
            bad.append(f"the log of run {number} is damaged")
    assert not bad, "; ".join(bad)
    return f"{count} recordings of three training threads, all ended well, all logs sound"


def _shell(command: str, directory: Path) -> int:
    done = subprocess.run(["sh", "-c", command], cwd=directory, capture_output=True, check=False, timeout=300)
    return done.returncode


def _log(run: Path) -> str:
    try:
        found = verify(run)
    except PrecdoctorError as error:
        return type(error).__name__
    rows = sum(rank.rows for rank in found.ranks)
    return f"{rows} rows" if found.ok else f"{rows} rows, {len(found.problems)} problems told"
