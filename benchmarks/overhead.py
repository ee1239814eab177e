"""What recording costs a training step, ours and what people use today: plain and recorded steps in turn.

    python benchmarks/overhead.py [--models gpt,cnn,lstm] [--recorders NAME,...] [--pairs 8]

Each recorder gets a process of its own, with two equal models: one is trained plainly, one recorded, step by step in
turn, the plain one first in half of the pairs. The ratio is that of all recorded steps to all plain ones. It is a
ratio of CPU time, which other programs disturb least: that of the training thread, and whatever other threads use
meanwhile is charged to the recorded steps; with several threads, of wall time. Peers that are not installed are left
out (requirements/bench.txt). Prints a Markdown table; behind ± is the standard error of the ratio. What recording costs
on a GPU, `make gpu` measures.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

import models
import torch
from recorders import OURS, PEERS, WHAT, Ours

#: Steps before the measured ones of ours, which settles down: precdoctor.recording.recorder.sampling's, and two.
_WARM_UP = 66
#: glibc's malloc gives the top of its heap back between steps or keeps it, as small blocks happen to lie, and page
#: faults of up to 3 % of a step then fall on either model: it is told to keep all.
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}
PRECISIONS = {"FP32": None, "BF16": torch.bfloat16}


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(name, model_name, dtype, pairs):
    """One recorder on one model: the table's numbers."""
    ours = name in OURS
    recorder = Ours(OURS[name]) if ours else PEERS[name][0]()
    plain, recorded = trainer(model_name, dtype), trainer(model_name, dtype)
    recorder.attach(*recorded[1:])
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    # Behind the first 64 steps the budget leads, and scans and block histograms are as rare as they stay.
    period = 8 if name.startswith(("budget", "every 8th")) else 1
    warm_up, pairs = _WARM_UP if ours else 2, period * pairs
    times = []
    for number in range(warm_up + pairs):
        if number == warm_up:
            others = time.process_time() - time.thread_time()
        # Sampled steps are an even number apart: either goes first in half of them, too.
        turns = (("recorded", "plain"), ("plain", "recorded"))[(number + number // 8) % 2]
        took = dict.fromkeys(turns, 0.0)
        for turn in turns if number >= warm_up - 2 else ("recorded",):
            began = clock()
            with recorder.step() if turn == "recorded" else contextlib.nullcontext():
                (recorded if turn == "recorded" else plain)[0]()
            took[turn] = clock() - began
        times.append((took["plain"], took["recorded"]))
    times = times[warm_up:]
    settle(recorder)
    others = time.process_time() - time.thread_time() - others if clock is time.thread_time else 0.0
    plain_s = sum(a for a, _ in times)
    ratio = (sum(b for _, b in times) + others) / plain_s
    # Of a sampled step and seven others the sum is taken first: they differ by design.
    dearer = [sum(b - a for a, b in times[i : i + period]) for i in range(0, pairs, period)]
    error = statistics.stdev(dearer) * len(dearer) ** 0.5 / plain_s
    facts = recorder.close()
    return {"ratio": ratio, "error": error, "plain_ms": plain_s / pairs * 1e3, "memory": peak_memory(), **facts}


def settle(recorder):
    """Let what other threads still have to do for the steps measured be done."""
    drain = recorder.recorder.drain if isinstance(recorder, Ours) else None
    while drain is not None and not drain.idle:
        time.sleep(0.01)


def trainer(model_name, dtype):
    """A training step of a fresh model, the model, its optimizer."""
    model, loss_of = models.make(model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def peak_memory():
    """In MB, of the whole process, both models included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e3 if sys.platform == "linux" else 1e6)


# --- the table -------------------------------------------------------------------------------------------------------


def child(arguments, name, model_name, precision):
    """Measure in a process of its own; null when the recorder fails there, which is said on stderr."""
    command = [sys.executable, __file__, "--pairs", str(arguments.pairs), "--threads", str(arguments.threads)]
    command += ["--child", name, model_name, precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | _MALLOC)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ratio"')]
    if not lines:
        print(f"{name}, {model_name}, {precision}: {done.stderr.strip()[-300:]}", file=sys.stderr)
    return json.loads(lines[-1]) if lines else None


def table(arguments):
    """Print it, a row as soon as it is known."""
    device = platform.processor() or platform.machine()
    from precdoctor.recording.kernels import native_cpu

    kernel = "C" if native_cpu.library() else "torch, blocked"
    clock = "CPU time" if arguments.threads == 1 else "wall time"
    print(f"{time.strftime('%Y-%m-%d')}  {device}, {os.cpu_count()} cores  torch {torch.__version__}  kernel: {kernel}")
    print(f"Ratio of recorded to plain steps, {clock}, {arguments.threads} thread(s), {arguments.pairs} pairs.\n")
    chosen = arguments.recorders.split(";") if arguments.recorders else [*OURS, *PEERS]
    for model_name in arguments.models.split(","):
        print(f"| {model_name} | collects | tensors a step | bytes a tensor | FP32 | BF16 autocast | peak memory, MB |")
        print("|---|---|---|---|---|---|---|")
        for name in chosen:
            if name in PEERS and importlib.util.find_spec(PEERS[name][1]) is None:
                continue
            found = {p: child(arguments, name, model_name, p) for p in PRECISIONS}
            known = next((f for f in found.values() if f), {})
            ratios = " | ".join(f"{f['ratio']:.3f} ± {f['error']:.3f}" if f else "fails" for f in found.values())
            tensors = f"{known['tensors']:.0f} ({known['sampled']} steps)" if "tensors" in known else ""
            size = f"{known['bytes']:.0f}" if "bytes" in known else ""
            print(
                f"| {name} | {WHAT[name]} | {tensors} | {size} | {ratios} | {known.get('memory', 0):.0f} |", flush=True
            )
        print()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gpt,cnn,lstm", help="of gpt, cnn, lstm")
    parser.add_argument("--recorders", help="names from the table, separated by semicolons; default: all installed")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--child", nargs=3, metavar=("RECORDER", "MODEL", "PRECISION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        name, model_name, precision = arguments.child
        print(json.dumps(measure(name, model_name, PRECISIONS[precision], arguments.pairs)))
    else:
        table(arguments)


if __name__ == "__main__":
    main()
