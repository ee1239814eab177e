"""What only a GPU can show: kernel bandwidth against a plain copy, and launches per step. Run by `make gpu`, with
benchmarks/overhead.py.

python benchmarks/gpu.py
"""

import collections
import tempfile
import time

import models
import torch

import precdoctor
from precdoctor.recording import kernels


def seconds(body, repeat=20):
    """Median device time of one call, by events."""
    body()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        body()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def many_small():
    """The weights of a small model, one by one and in one launch: device time and host time."""
    tensors = [torch.randn(256, 256, device="cuda") for _ in range(200)]
    jobs, tables = (
        [kernels.Job(x, slot, stream=kernels.stream_of(x)) for slot, x in enumerate(tensors)],
        kernels.Tables(),
    )
    bodies = {
        "one by one": lambda: [kernels.stat(x, slot) for slot, x in enumerate(tensors)],
        "together": lambda: kernels.together(jobs, tables),
    }
    print("\n| 200 FP32 tensors of 256 x 256 | device, ms | host, ms |\n|---|---|---|")
    for name, body in bodies.items():
        device = seconds(body)
        torch.cuda.synchronize()
        began = time.perf_counter()
        body()
        print(f"| {name} | {device * 1e3:.2f} | {(time.perf_counter() - began) * 1e3:.2f} |")


def launches_per_step(recorded):
    """Launches and device time of a step of a GPT-2-medium-sized model, all of it and our kernels'."""
    model, forward = models.make("medium", "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def profiled():
        for _ in range(4):
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
        return [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]

    if not recorded:
        return profiled()
    with tempfile.TemporaryDirectory() as folder, precdoctor.record(f"{folder}/run", every=1, deep_scan=0):
        return profiled()


def print_launches():
    """Of a plain and of a fully recorded step."""
    plain, recorded = launches_per_step(recorded=False), launches_per_step(recorded=True)
    ours = collections.Counter(e.name for e in recorded if e.name in OURS)
    print("\n| GPT-2 medium, BF16 autocast, every step | launches | device, ms |\n|---|---|---|")
    for name, events in {
        "plain step": plain,
        "recorded step": recorded,
        **{f"of these `{name}`": [e for e in recorded if e.name == name] for name in ours},
    }.items():
        print(f"| {name} | {len(events)} | {sum(e.time_range.elapsed_us() for e in events) / 1e3:.2f} |")


#: Our kernels: of one tensor (outputs and their gradients), and of many.
OURS = ("_stat", "_stat_many", "_restart_many", "_update_many")


def main():
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu.py needs a CUDA device; there is none here")
    print(f"{time.strftime('%Y-%m-%d')}  {torch.cuda.get_device_name()}  torch {torch.__version__}")
    device = torch.device("cuda", torch.cuda.current_device())
    kernels.stat(torch.ones(1 << 20, device=device, dtype=torch.bfloat16), 0)
    print(f"kernel: {kernels.in_use(device)}; a copy reads and writes, statistics only read\n")
    print("| tensor | copy, GB/s | statistics, GB/s | share |\n|---|---|---|---|")
    for mebibytes in (1, 16, 64, 256):
        x = torch.randn(mebibytes << 19, device="cuda").bfloat16()
        y = torch.empty_like(x)
        size = x.numel() * 2
        copy = 2 * size / seconds(lambda x=x, y=y: y.copy_(x))
        ours = size / seconds(lambda x=x: kernels.stat(x, 0))
        print(f"| BF16 {mebibytes} MiB | {copy / 1e9:.0f} | {ours / 1e9:.1f} | {ours / copy:.1%} |")
    small = [torch.randn(size, device="cuda") for size in (64, 1024, 4096, 65536)]
    print("\n| FP32 elements | one launch, µs |\n|---|---|")
    for x in small:
        print(f"| {x.numel()} | {seconds(lambda x=x: kernels.stat(x, 1)) * 1e6:.1f} |")
    many_small()
    print_launches()


if __name__ == "__main__":
    main()
