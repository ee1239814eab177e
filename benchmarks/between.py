"""What a step between samples costs over a plain one, in milliseconds: blocks of steps in turn, in one process.

    python benchmarks/between.py [--blocks 200] [--steps 10]

Both kinds of steps train the same model. A block is timed as a whole, in CPU time of the training thread, and paired
with the one next to it; which goes first changes from pair to pair. Prints medians over all pairs, with quartiles, and
what the fastest tenth of the recorded blocks takes more than the fastest tenth of the plain ones: other users of the
machine are in that least.
"""

import argparse
import os
import platform
import statistics
import time

import torch
from recorders import Ours
from torch import nn

#: Steps before the first block: the recorder has met the model, and its caches are full.
_WARM_UP = 40


def stack(modules, width=64):
    """That many linear layers, each with weight and bias."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(modules)))


def mlp():
    """Three layers."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


#: Models, and how many ops lie between the model and ``backward`` beside the loss itself.
MODELS = {
    "MLP, 3 layers": (mlp, 0),
    "the same, 100 ops of loss code": (mlp, 100),
    "30 modules": (lambda: stack(30), 0),
    "300 modules": (lambda: stack(300), 0),
}


def trainer(model, ops=0):
    """A function that makes so many training steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randn(32, 64)

    def train(steps):
        for _ in range(steps):
            result = model(batch)
            for _ in range(ops):
                result = result * 0.999
            loss = result.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def measure(train, recorder, blocks, steps):
    """Milliseconds a step of each pair of blocks: plain, recorded."""
    pairs = []
    with recorder.step():
        train(_WARM_UP)
    for number in range(blocks):
        took = {}
        for recorded in (number % 2 == 0, number % 2 == 1):
            began = time.thread_time_ns()
            if recorded:
                with recorder.step():
                    train(steps)
            else:
                train(steps)
            took[recorded] = (time.thread_time_ns() - began) / steps / 1e6
        pairs.append((took[False], took[True]))
    return pairs


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=10, help="training steps a block")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    recorder = Ours({"every": 1024, "deep_scan": 0})
    processor = platform.processor() or platform.machine()
    print(f"{time.strftime('%Y-%m-%d')}  {processor}, {os.cpu_count()} cores  torch {torch.__version__}")
    print("| model | plain, ms | between samples, ms | more, ms: median (quartiles) | fastest tenths | ratio |")
    print("|---|---|---|---|---|---|")
    for name, (model, ops) in MODELS.items():
        pairs = measure(trainer(model(), ops), recorder, arguments.blocks, arguments.steps)
        plain, ours = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
        low, more, high = statistics.quantiles((b - a for a, b in pairs), n=4)
        fastest = [statistics.quantiles((pair[i] for pair in pairs), n=10)[0] for i in (0, 1)]
        least, ratio = fastest[1] - fastest[0], statistics.median(b / a for a, b in pairs)
        more_of = f"{more:.2f} ({low:.2f} to {high:.2f}) | {least:.2f}"
        print(f"| {name} | {plain:.2f} | {ours:.2f} | {more_of} | {ratio:.3f} |", flush=True)
    recorder.close()


if __name__ == "__main__":
    main()
