"""What a GPU brings along, shown on a CPU: threads without Python below autograd, children that may free nothing."""

from __future__ import annotations

import pytest

import precdoctor
from tests.support.processes import record, script

#: From the sixtieth gradient within a gradient on, autograd computes them in a thread that no Python code began. Some
#: versions of torch cannot do that under any dispatch mode, which a deep scan is.
DEEP = """
import threading
import torch

threads = set()


class Deep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        threads.add(threading.get_ident())
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(3, 4, requires_grad=True)
                y = Deep.apply(x, ctx.depth - 1)
                torch.autograd.grad((y.tanh() * y.softmax(-1)).sum(), x, create_graph=ctx.depth == 1)
        return gradient, None


torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(6):
    y = net(torch.randn(3, 4))
    (g,) = torch.autograd.grad(Deep.apply(y, 70).square().sum(), y, create_graph=True)
    (g.square().sum() + y.square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
assert len(threads) > 1
"""

#: The parent says that it uses CUDA. Freeing its pinned batches in a child would end that with `initialization error`.
FORKS = """
import os
import weakref
import torch

torch.cuda.is_initialized = lambda: os.getpid() == parent
parent = os.getpid()


def freed():
    if os.getpid() != parent:
        os.write(2, b"freed in a child\\n")


torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
optimizer = torch.optim.AdamW(net.parameters(), 0.1)
for step, batch in enumerate(torch.utils.data.DataLoader(torch.randn(24, 4), 4)):
    weakref.finalize(batch, freed).atexit = False
    net(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    del batch
    child = os.fork()
    if child == 0:
        if step % 2:
            raise SystemExit(0)  # ends as any program does
        os._exit(0)  # as the workers of a data loader
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(DEEP, id="threads without Python"),
        pytest.param(FORKS, id="forked children", marks=pytest.mark.slow),
    ],
)
def test_training_is_recorded_and_goes_on(text, tmp_path):
    script(tmp_path, "train.py", text)
    done = record(tmp_path, "--strict", "--deep-scan", "off", "train.py")
    assert done.status == 0, done.err
    assert len(precdoctor.open_run(done.run).steps()) == 6
    assert "freed in a child" not in done.err
