"""What is seen of each stack? `make stacks` writes benchmarks/results/stacks.md.

Trains with torch, Accelerate, DeepSpeed and Megatron-core on two ranks (gloo, CPU), plain and recorded, and diagnoses
what was recorded; then the layouts of tests/support/layouts.py, and the quantising libraries of tests/support/zoo.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import precdoctor
from precdoctor.runlog import Run, open_run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "results" / "stacks.md"
#: Modules beside this one, what they are called, and how real they are.
TRAINERS = {
    "torch": ("torch: DDP, FSDP2", "real"),
    "accelerate": ("Accelerate: DDP, FSDP2, DeepSpeed ZeRO 2", "real; told that it may shard on a CPU"),
    "deepspeed": ("DeepSpeed: ZeRO 1, 2, 3", "real; told that this CPU has FP16"),
    "megatron": ("Megatron-core: DDP, DistributedOptimizer, TP", "real; `device='cuda'` means the CPU"),
}
#: Of tests/support/layouts.py: on how many ranks, healthy and faulty trainings.
LAYOUTS = {
    "torch: HSDP": (4, ("hsdp.accumulate", "hsdp.bf16"), ("hsdp.flip",)),
    "torch: TP": (2, ("tp", "tp.sgd"), ("tp.flip.bias",)),
    "torch: FSDP2 and TP": (4, ("fsdp2_tp",), ("fsdp2_tp.flip.bias",)),
    "torch: pipeline": (2, ("pp", "pp.1f1b.sgd"), ()),
}
#: Of tests/support/zoo: the package whose version is stated, or the release that a stand-in follows.
ENGINES = {
    "torchao: Float8Linear": (
        "torchao",
        ("torchao_float8_tensorwise", "torchao_float8_rowwise", "torchao_float8_scaled_mm", "torchao_mxfp8"),
        ("torchao_float8_scale_too_large", "torchao_float8_rowwise_scale_too_small"),
    ),
    "torchao: quantised optimizers": (
        "torchao",
        ("torchao_adamw8bit", "torchao_adamw4bit", "torchao_adamwfp8"),
        ("torchao_adamwfp8_outliers",),
    ),
    "Transformer Engine": (
        "2.18",
        ("te_current", "te_custom", "te_delayed_ops", "te_blocks", "te_mxfp8", "te_nvfp4"),
        ("te_delayed_ops_stale", "te_blocks_saturated"),
    ),
    "MS-AMP": ("0.4.0", ("msamp_o2",), ("msamp_lost_state",)),
}
#: By the last word of a faulty training: the codes that name the fault.
EXPECTED = {
    "nan": ("PD104",),
    "drift": ("PD710",),
    "flip": ("PD710",),
    "bias": ("PD710",),
    "high": ("PD307",),
    "low": ("PD201", "PD203", "PD708"),
    "expert": ("PD101",),
    "lost": ("PD501",),
    "torchao_float8_scale_too_large": ("PD401",),
    "torchao_float8_rowwise_scale_too_small": ("PD402",),
    "torchao_adamwfp8_outliers": ("PD506",),
    "te_delayed_ops_stale": ("PD404",),
    "te_blocks_saturated": ("PD401",),
    "msamp_lost_state": ("PD506",),
}
#: Faults of one rank, the second.
ON_ONE_RANK = ("nan", "drift", "flip", "bias", "expert")
#: Kinds of rows in the order in which the table has them, and what they are called there.
KINDS = {
    "weight": "weights",
    "master_weight": "FP32 copies",
    "weight_grad": "gradients on the rank",
    "weight_grad_step": "gradients as given to the optimizer",
    "update": "updates",
    "opt_state": "states",
    "fp8_operand": "FP8 operands",
    "subbyte_operand": "FP4 operands",
    "block_scale": "block scales",
    "buffer": "buffers",
}

HEAD = """\
# Stacks

Written by `make stacks`. Each training runs twice, plain and recorded at every step: *bits* says whether losses and
final weights are equal. Rows are of one healthy run, all ranks. *Names* says whether each row of a weight, a gradient
or an update has the name of a module's parameter. A fault is *found* if the first finding has the code of it and,
of a fault of one rank, names the rank.

Data, models and faults: [benchmarks/stacks](../stacks); layouts: tests/support/layouts.py; torchao, Transformer Engine
and MS-AMP: tests/support/zoo.

| stack | version | real or stand-in | trainings | bits | names | rows | faults found | healthy runs silent |
|---|---|---|---:|---|---|---|---|---|
"""
FAULTS = """
## Faults

| stack | training | first finding | rank | parameter or module | step |
|---|---|---|---|---|---:|
"""


@dataclass
class Stack:
    """One row of the table.

    Attributes:
        equal: by training, whether it was the same in every bit.
        healthy, faulty: the runs by training.
    """

    title: str
    version: str
    kind: str
    equal: dict[str, bool]
    healthy: dict[str, Run] = field(default_factory=dict)
    faulty: dict[str, Run] = field(default_factory=dict)


def run_ranks(python: str, ranks: int, folder: Path, *arguments: str) -> None:
    """Start a module on some ranks, one thread each.

    Raises:
        SystemExit: it failed.
    """
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", *arguments]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with (folder / "log.txt").open("ab") as log:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=log, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}: see {folder / 'log.txt'}")


def trainer(python: str, folder: Path, name: str) -> Stack:
    """Of a module beside this one."""
    out = folder / name
    out.mkdir(parents=True, exist_ok=True)
    run_ranks(python, 2, out, "benchmarks.stacks.drive", name, str(out))
    found = [json.loads((out / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
    equal = {n: all(f["equal"][n] for f in found) for n in found[0]["equal"]}
    runs = {n: open_run(out / n) for n in equal}
    healthy = {n: runs.pop(n) for n in found[0]["healthy"]}
    return Stack(TRAINERS[name][0], found[0]["version"], TRAINERS[name][1], equal, healthy, runs)


def layout(folder: Path, title: str) -> Stack:
    """Of tests/support/layouts.py; a training is compared with its plain one."""
    import torch

    ranks, healthy, faulty = LAYOUTS[title]
    out = folder / title.replace(" ", "-").replace(":", "")
    names = (*healthy, *faulty)
    plain = [f"{name}.plain" for name in names]
    if not out.exists():
        out.mkdir(parents=True)
        run_ranks(sys.executable, ranks, out, "tests.support.layouts", str(out), "12", *plain, *names)
    weights = {n: (out / n / "weights").read_bytes() for n in (*plain, *names)}
    equal = {n: weights[n] == weights[f"{n}.plain"] for n in names}
    version = torch.__version__.partition("+")[0]
    runs = {n: open_run(out / n) for n in names}
    return Stack(title, version, "real", equal, {n: runs[n] for n in healthy}, {n: runs[n] for n in faulty})


def engine(folder: Path, title: str) -> Stack:
    """Of tests/support/zoo."""
    from importlib import metadata

    from tests.integration.observe.conftest import train

    package, healthy, faulty = ENGINES[title]
    out = folder / title.replace(" ", "-").replace(":", "")
    results = out / "equal.json"
    if not results.exists():
        out.mkdir(parents=True)
        plain, recorded = train(out, *healthy, *faulty)
        same = {n: plain[n]["digest"] == recorded[n]["digest"] != "failed" for n in (*healthy, *faulty)}
        results.write_text(json.dumps(same))
    equal = json.loads(results.read_text())
    real = not package[0].isdigit()
    version = metadata.version(package) if real else package
    runs = {n: open_run(out / "runs" / n) for n in (*healthy, *faulty)}
    kind = "real" if real else "stand-in"
    return Stack(title, version, kind, equal, {n: runs[n] for n in healthy}, {n: runs[n] for n in faulty})


def counts(run: Run) -> str:
    """Rows by kind."""
    found = Counter(run.tensors(columns=["kind"])["kind"])
    return ", ".join(f"{found[kind]:,} {words}" for kind, words in KINDS.items() if found[kind])


def named(runs: Iterable[Run]) -> bool:
    """Whether rows of weights, gradients and updates are all of a module's parameters, and of no optimizer's."""
    kinds = ("weight", "master_weight", "weight_grad_step", "update")
    frames = [run.tensors(columns=["kind", "root", "name"]) for run in runs]
    rows = [frame[frame["kind"].isin(kinds)] for frame in frames]
    return all(frame["name"].str.contains("[a-z]").all() and frame["root"].ne("").all() for frame in rows)


def line(stack: Stack, found: dict[str, bool]) -> str:
    """Its row of the table."""
    noisy = [n for n, run in stack.healthy.items() if precdoctor.diagnose(run).findings]
    first = next(iter(stack.healthy.values()))
    wrong = [n for n, equal in stack.equal.items() if not equal]
    return (
        " | ".join(
            (
                f"| {stack.title}",
                stack.version,
                stack.kind,
                str(len(stack.equal)),
                "equal" if not wrong else f"not equal: {', '.join(wrong)}",
                "all" if named((*stack.healthy.values(), *stack.faulty.values())) else "not all",
                counts(first),
                f"{sum(found.values())} of {len(found)}",
                f"{len(stack.healthy) - len(noisy)} of {len(stack.healthy)}"
                + (f": not {', '.join(noisy)}" if noisy else ""),
            )
        )
        + " |\n"
    )


def fault(stack: Stack, name: str, run: Run) -> tuple[str, bool]:
    """The line of a fault, and whether the first finding is about it."""
    findings = precdoctor.diagnose(run).findings
    if not findings:
        return f"| {stack.title} | `{name}` | none | | | |\n", False
    first = findings[0]
    word = name.rpartition(".")[2]
    found = first.code in EXPECTED[word] and (word not in ON_ONE_RANK or first.location.rank == 1)
    place = ".".join(p for p in (first.location.root, first.location.module) if p) or "all"
    cells = (first.title.replace("|", "\\|"), first.location.rank_place or "", f"`{place}`", str(first.location.step))
    return f"| {stack.title} | `{name}` | {first.code}: {' | '.join(cells)} |\n", found


def main() -> None:
    """Train, diagnose, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the libraries")
    parser.add_argument("--keep", type=Path, help="directory for the runs; what it has is not repeated")
    parser.add_argument("-k", default="", help="stacks with this in their name only, printed and not written")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        jobs = [(t, lambda n=n: trainer(options.python, folder, n)) for n, (t, _) in TRAINERS.items()]
        jobs += [(t, lambda t=t: layout(folder, t)) for t in LAYOUTS]
        jobs += [(t, lambda t=t: engine(folder, t)) for t in ENGINES]
        table, faults = "", ""
        for title, make in jobs:
            if options.k.lower() not in title.lower():
                continue
            stack = make()
            lines = {name: fault(stack, name, run) for name, run in stack.faulty.items()}
            table += line(stack, {name: found for name, (_, found) in lines.items()})
            faults += "".join(text for text, _ in lines.values())
            print(title, file=sys.stderr)
    page = (
        HEAD
        + table
        + FAULTS
        + faults
        + f"\n{platform.system()} {platform.machine()}, Python {platform.python_version()}.\n"
    )
    if options.k:
        print(page)
    else:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
