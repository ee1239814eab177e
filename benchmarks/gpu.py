"""What only a GPU can show: kernel bandwidth against a plain copy. Run by `make gpu`, with benchmarks/overhead.py.

python benchmarks/gpu.py
"""

import time

import torch

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


if __name__ == "__main__":
    main()
