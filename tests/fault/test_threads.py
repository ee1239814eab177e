"""Threads that make and train models at once: each trains as it would without a recorder."""

from __future__ import annotations

import concurrent.futures

import pytest

from tests.support.processes import PYTHON, Finished, environment, finish, record_command, script, start

#: Each thread makes models, large enough that a look at all of them takes a while, and fills tuples step by step, as
#: scripts do. Prints the weights of all; an exception in a thread leaves its part out.
TRAINING = """
import faulthandler
import hashlib
import sys
import threading
import torch
from torch import nn

faulthandler.enable()
torch.set_num_threads(1)
sys.setswitchinterval(float(sys.argv[2]))
SEED = int(sys.argv[1])


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(self.norm(x)))
        return x


def train(number, done, begin):
    begin()
    made = hashlib.sha256()
    for round in range(3):
        draws = torch.Generator().manual_seed(100 * SEED + 10 * number + round)
        net = nn.Sequential(nn.Linear(16, 32 + 32 * number), *(Block(32 + 32 * number) for _ in range(2)))
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(0.1 * torch.randn(p.shape, generator=draws))
        optimizer = (torch.optim.AdamW, torch.optim.SGD)[(SEED + round) % 2](net.parameters(), lr=1e-3)
        for step in range(5):
            parts = tuple(torch.randn(8, 16, generator=draws) for _ in range(4))
            optimizer.zero_grad()
            net(torch.cat(parts)).square().mean().backward()
            optimizer.step()
        for p in net.parameters():
            made.update(p.detach().numpy().tobytes())
    done[number] = made.hexdigest()


done, begin = {}, threading.Barrier(3).wait
threads = [threading.Thread(target=train, args=(number, done, begin)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(done.items()))
"""
#: Seconds after which the interpreter has threads change places: its own, and hostile ones.
INTERVALS = (0.0001, 0.00001, 0.005)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")
    script(folder, "train.py", TRAINING)
    return folder


@pytest.mark.parametrize("count", [1, pytest.param(200, marks=pytest.mark.slow)])
def test_threads_that_make_and_train_models_at_once(folder, count):
    """Before, most such runs lost one of the script's threads to SystemError."""
    seeds = 1 + count // 50

    def plain(seed: int) -> Finished:
        return finish(start(folder, [PYTHON, "train.py", str(seed), "0.005"], environment()), folder)

    def recorded(number: int) -> tuple[int, Finished]:
        seed, interval = number % seeds, INTERVALS[number % len(INTERVALS)]
        every = ["--every", "1"] if number // len(INTERVALS) % 2 else []
        run = folder / f"run-{count}-{number}"
        return seed, finish(start(folder, record_command(run, *every, "train.py", str(seed), str(interval))), run)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        alone = list(pool.map(plain, range(seeds)))
        runs = list(pool.map(recorded, range(count)))
    assert all(run.status == 0 and run.out.count(b"(") == 3 for run in alone)
    for seed, run in runs:
        assert (run.status, run.out) == (0, alone[seed].out), (run.run, run.err)
        assert "Traceback" not in run.err and "error" not in run.err, run.err
        assert run.end()["errors"] == 0
