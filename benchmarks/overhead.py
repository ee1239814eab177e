"""What recording costs a training step: plain and recorded steps of the same model in turn, in one process.

    python benchmarks/overhead.py [--device cpu|cuda] [--size small|medium] [--every 1] [--pairs 8]

Prints one line of a table per precision. The ratio is the median over pairs of (recorded step / plain step); on the CPU
process time is used, which other programs do not disturb. Write the table to a file under benchmarks/results/.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

SIZES = {"small": (6, 256, 4, 256, 8, 512), "medium": (24, 1024, 16, 1024, 4, 32768)}


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def steps(recorder, arguments, dtype):
    """Seconds of each plain and each recorded step, pair by pair; one pair of warm-up is left out."""
    layers, width, heads, context, batch, vocabulary = SIZES[arguments.size]
    model = GPT(layers, width, heads, context, vocabulary).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(vocabulary, (batch, context + 1), device=arguments.device)
    clock = time.process_time if arguments.device == "cpu" else time.perf_counter
    pairs = []
    for _ in range(arguments.pairs + 1):
        times = []
        for recording in (False, True):
            recorder.live = recording and recorder.options.samples(recorder.step)
            recorder.current.sampled = recorder.live
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            began = clock()
            with torch.autocast(arguments.device, dtype=dtype, enabled=dtype is not None):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if arguments.device == "cuda":
                torch.cuda.synchronize()
            times.append(clock() - began)
        pairs.append(times)
    return pairs[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(arguments.threads)
    from precdoctor.recording.options import OPTIONS_VARIABLE, RUN_VARIABLE, RecordOptions
    from precdoctor.runlog.layout import create_run

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        create_run(run, {"command": ["benchmark"]})
        os.environ[RUN_VARIABLE] = str(run)
        os.environ[OPTIONS_VARIABLE] = RecordOptions(every=arguments.every).to_json()
        from precdoctor.recording import hooks
        from precdoctor.recording.kernels import native

        recorder = hooks.install()
        device = (
            torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
        )
        kernel = "torch" if arguments.device == "cuda" else ("C" if native.library() else "torch, blocked")
        print(
            f"{time.strftime('%Y-%m-%d')}  {device}  torch {torch.__version__}  kernel: {kernel}  GPT {arguments.size}"
        )
        print("| precision | plain step, ms | recorded / plain | spread |\n|---|---|---|---|")
        for name, dtype in (("FP32", None), ("BF16 autocast", torch.bfloat16)):
            pairs = steps(recorder, arguments, dtype)
            ratios = sorted(recorded / plain for plain, recorded in pairs)
            plain = statistics.median(p for p, _ in pairs) * 1e3
            print(f"| {name} | {plain:.0f} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} to {ratios[-1]:.2f} |")
        recorder.close()


if __name__ == "__main__":
    main()
