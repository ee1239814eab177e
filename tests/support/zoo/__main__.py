"""Train specimens, each in a fork of its own, two at a time.

With ``ZOO_RUNS`` set, the recorder (which ``PRECDOCTOR_RUN`` has put into this process, still idle) is pointed at a
fresh run directory ``ZOO_RUNS/NAME`` in each fork; without it nothing of precdoctor is here. With ``ZOO_LIKE_CUDA``
that recorder takes tensors for CUDA's, and each line holds the most waits for the device in one step.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import traceback
from pathlib import Path

from tests.support.zoo import Trained, load


def main(specimens) -> int:
    import torch
    import torch._dynamo  # optimizers import it when they are first made, which takes each fork two seconds
    import torch.utils.checkpoint

    torch.set_num_threads(1)
    running: dict[int, str] = {}
    failed = []
    for train in specimens:
        if len(running) == 2:
            failed += _wait(running)
        pid = os.fork()
        if pid == 0:
            _train(train.__name__, train)
        running[pid] = train.__name__
    while running:
        failed += _wait(running)
    return len(failed)


def _wait(running: dict[int, str]) -> list[str]:
    pid, status = os.wait()
    name = running.pop(pid)
    return [name] if status else []


def _train(name: str, train) -> None:
    cuda = None
    if "ZOO_RUNS" in os.environ:
        from precdoctor.recording import installation
        from precdoctor.runlog.layout import create_run

        run = Path(os.environ["ZOO_RUNS"]) / name
        create_run(run, {"command": ["python", "-m", "tests.support.zoo", name]}, force=False)
        assert installation._installed is not None, "the recorder is not in this process"
        installation._installed.run = run
    if "ZOO_LIKE_CUDA" in os.environ:
        from tests.support import like_cuda

        like_cuda.install(batches=os.environ["ZOO_LIKE_CUDA"] == "batches")
        cuda = like_cuda.CUDA
    try:
        trained: Trained = train()
    except Exception:
        traceback.print_exc()
        _tell({"name": name, "digest": "failed"})
        os._exit(1)
    line = {"name": name, "digest": trained.digest(), "losses": trained.losses}
    if cuda is not None:
        line |= {"waits": max(cuda.waits.values(), default=0), "refusals": like_cuda.refused()}
    _tell(line)
    atexit._run_exitfuncs()
    os._exit(0)  # tearing torch down takes a second


def _tell(line: dict) -> None:
    """In one write: under PYTHONUNBUFFERED ``print`` makes two, and two forks share this pipe."""
    os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(load(sys.argv[1:])))
