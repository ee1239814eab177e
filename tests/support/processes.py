"""Runs `precdoctor record` as people do: a real parent, real children, real signals."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
import sysconfig
import textwrap
import threading
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path

import precdoctor
from precdoctor.runlog.files import ATTACH_FILE, END_FILE
from precdoctor.runlog.layout import rank_directories

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable
WARM = ROOT / "tests" / "support" / "quick" / "warm.py"
#: Beside the interpreter lie torchrun and accelerate.
SCRIPTS = Path(PYTHON).parent
#: For :func:`environment`: torch imports all that it imports anywhere else, see ``tests/support/quick``.
AS_ANYWHERE = {"QUICK_TORCH": ""}
#: A child that hangs should fail its test, not the whole suite's patience. Nothing is measured with it.
PATIENCE = 240

#: A small training run: prints every loss to the last bit, and at the end the weights.
TRAINING = """
import hashlib
import os
import sys

import torch


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))


def train(steps, net=None, after_step=lambda step: None):
    net = net or model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        loss = net(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item().hex(), flush=True)
        after_step(step)
    return net


def say(*words):  # one write: torchrun's `python -u` writes print's words one by one, between another rank's
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


def digest(net):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()


if __name__ == "__main__":
    print(digest(train(3)), sys.argv[1:])
"""

#: One server for all threads.
_STARTING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Finished:
    """A `record` that has ended."""

    status: int
    out: bytes
    err: str
    run: Path

    @property
    def said(self) -> list[str]:
        """What precdoctor, not the command, wrote to stderr, without its name."""
        return [line.partition(": ")[2] for line in self.err.splitlines() if line.startswith("precdoctor: ")]

    @property
    def ranks(self) -> dict[str, Path]:
        """The rank directories by name."""
        return {rank.path.name: rank.path for rank in rank_directories(self.run)} if self.run.is_dir() else {}

    def pids(self, event: str) -> set[int]:
        """Processes that got as far as ``event``."""
        notes = (self.run / ATTACH_FILE).read_text().splitlines()
        return {note["pid"] for note in map(json.loads, notes) if note["event"] == event}

    def end(self, rank: str = "rank-00000") -> dict | None:
        """end.json; None when the process did not get to write one."""
        path = self.ranks[rank] / END_FILE
        return json.loads(path.read_text()) if path.is_file() else None

    def steps(self, rank: str = "rank-00000") -> list[int]:
        """Step numbers one process completed."""
        number, _, attempt = rank.removeprefix("rank-").partition(".")
        steps = precdoctor.open_run(self.run).steps()
        mine = (steps["rank"] == int(number)) & steps["complete"]
        if "attempt" in steps:
            mine &= steps["attempt"] == int(attempt or 0)
        return sorted(steps[mine]["step"])


def environment(**more: str) -> dict[str, str]:
    """This process's environment with one torch thread, and without what pytest or a user may have put there."""
    dropped = {"PYTHONPATH", "PYTEST_CURRENT_TEST", "PYTHONSAFEPATH", "RANK", "PRECDOCTOR_RUN", "PRECDOCTOR_OPTIONS"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    kept["PATH"] = f"{SCRIPTS}{os.pathsep}{kept.get('PATH', '')}"
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", **more}


def warm(*arguments: object) -> list[str]:
    """What stands for ``[PYTHON, *arguments]`` where what is trained matters, and not how its process begins and ends.

    See ``tests/support/quick/warm.py``. torch is there as anywhere, whatever ``QUICK_TORCH`` says. A script that sets
    no seed draws the same numbers in each of them.
    """
    if not hasattr(os, "pidfd_open"):
        return [PYTHON, *map(str, arguments)]
    with _STARTING:
        return [PYTHON, str(WARM), _warm_server(), *map(str, arguments)]


def torchrun(ranks: int, *arguments: object) -> list[str]:
    """``torchrun`` of as many :func:`warm` processes on this machine."""
    launcher = warm("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return [*launcher, "--no-python", *warm(*arguments)]


@functools.cache
def _warm_server() -> str:
    """Starts this process's; it ends with its standard input."""
    number = str(os.getpid())
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0precdoctor-warm-{number}")
        listening.listen(64)
        server = subprocess.Popen(
            [PYTHON, str(WARM), "serve", str(listening.fileno())],
            env=environment(**AS_ANYWHERE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,  # like those of its forks, which a file's buffer does not fit
            stderr=subprocess.PIPE,
            pass_fds=[listening.fileno()],
        )
    atexit.register(lambda: sys.stderr.buffer.write(server.communicate()[1]))
    return number


def record_command(run: Path, *arguments: str) -> list[str]:
    """`precdoctor record -o RUN ...`, with the precdoctor of this tree whether it is installed or not."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from precdoctor.cli import main; sys.exit(main())"
    return [PYTHON, "-c", start, "record", "-o", str(run), *arguments]


def record(
    folder: Path, *arguments: str, stdin: bytes = b"", run: Path | None = None, env: Mapping[str, str] | None = None
) -> Finished:
    """`precdoctor record -o RUN arguments`, in ``folder``, until it ends; the command itself is :func:`warm`."""
    run = run or folder / "run"
    command = warm(ROOT / "tests" / "support" / "quick" / "cli.py", "record", "-o", run, *arguments)
    return finish(start(folder, command, env), run, stdin)


def start(folder: Path, command: Sequence[str], env: Mapping[str, str] | None = None, **more) -> subprocess.Popen:
    """Starts any command in ``folder`` with pipes at all three ends."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, cwd=folder, env=env or environment(), **{**pipes, **more})


def finish(process: subprocess.Popen, run: Path, stdin: bytes = b"") -> Finished:
    """Waits for one, killing it when it hangs."""
    with process:  # else its pipes would be complained of in whatever test runs next
        try:
            out, err = process.communicate(stdin or None, timeout=PATIENCE)
        finally:
            process.kill()
    return Finished(process.returncode, out or b"", (err or b"").decode(), run)


def script(folder: Path, name: str, text: str) -> Path:
    """Writes a script; ``training.py`` beside it has :data:`TRAINING`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "training.py").write_text(TRAINING)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def interpreter(folder: Path, *, paths: Sequence[Path | str] = (), boot: bool = False) -> Path:
    """A fresh virtual environment that sees ``paths``; with ``boot`` the ``.pth`` file of an installed precdoctor."""
    venv.create(folder, with_pip=False, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "paths.pth").write_text("".join(f"{path}\n" for path in paths))
    (packages / "quick_torch.pth").write_bytes((ROOT / "tests/support/quick/quick_torch.pth").read_bytes())
    if boot:
        (packages / "precdoctor-boot.pth").write_bytes((ROOT / "precdoctor-boot.pth").read_bytes())
    return folder / "bin" / "python"


def packages_here() -> list[str]:
    """Where torch and pyarrow lie: the site-packages of this interpreter."""
    return list(dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))))
