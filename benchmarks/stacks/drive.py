"""Trains with one stack, plain and recorded: `torchrun ... -m benchmarks.stacks.drive STACK DIRECTORY [NAME ...]`.

Trainings that the directory has are not repeated. All plain ones come first, before there is a recorder in the process.
Writes one JSON file per rank: by name, whether losses and weights are equal in every bit, and the version of the
library.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import warnings
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    """Train, and compare."""
    warnings.simplefilter("ignore")
    stack, folder, *names = sys.argv[1:]
    module = importlib.import_module(f"benchmarks.stacks.with_{stack}")
    module.start()
    rank = dist.get_rank()
    results = Path(folder) / f"{stack}.{rank}.json"
    known = json.loads(results.read_text())["equal"] if results.exists() else {}
    every = names or [*module.HEALTHY, *module.FAULTY]
    names = [name for name in every if name not in known or not (Path(folder) / name).exists()]
    dist.barrier()
    plain = {name: _ended(module, name, rank) for name in names}

    from precdoctor.recording import installation  # a plain process has none of it
    from precdoctor.recording.options import RecordOptions
    from precdoctor.runlog.layout import create_run

    equal = known
    for name in names:
        run = Path(folder) / name
        if rank == 0:
            create_run(run, {"command": ["torchrun", "--nproc-per-node", "2", f"{stack}.py", name]})
        dist.barrier()
        recorder = installation.begin(run, RecordOptions(every=1, strict=True))
        try:
            recorded = _ended(module, name, rank)
        finally:
            recorder.end()
        equal[name] = recorded == plain[name] and not recorded.startswith("failed")
    healthy = [name for name in every if name in module.HEALTHY]
    results.write_text(json.dumps({"version": module.VERSION, "equal": equal, "healthy": healthy}))
    dist.barrier()
    dist.destroy_process_group()


def _ended(module, name: str, rank: int) -> str:
    """The digest of a training, or how it failed."""
    try:
        return module.train(name, rank)
    except Exception as error:  # noqa: BLE001 - told as what it is
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}"


if __name__ == "__main__":
    main()
