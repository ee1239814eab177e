"""Tracer concentrations (kg/m3) in river plumes, data parallel over two processes with gradients sent in 16 bits."""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORLD = 2


def mlp(i, h, o):
    return nn.Sequential(
        nn.Linear(i, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h), nn.SiLU(), nn.Linear(h, o)
    )


class Plume(nn.Module):
    def __init__(self):
        super().__init__()
        self.flow = mlp(5, 32, 16)
        self.mix = mlp(16, 32, 1)

    def forward(self, x):
        return 1e-3 * self.mix(torch.tanh(self.flow(x))).squeeze(1)


def concentrations(generator, n=64):
    x = torch.randn(n, 5, generator=generator)
    c = torch.exp(-(x[:, 0] ** 2) - 0.5 * x[:, 1].abs()) + 0.5 * torch.sigmoid(3 * x[:, 2] * x[:, 3])
    return x, 2e-3 * c


def average_gradients(model):
    grads = [p.grad for p in model.parameters()]
    bucket = torch.cat([g.flatten() for g in grads]).half()
    dist.all_reduce(bucket)
    bucket = bucket.float() / WORLD
    for g, part in zip(grads, bucket.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


def worker(rank, path, steps=150):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(100 + rank)
    model = Plume()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-14)
    for step in range(steps):
        x, c = concentrations(generator)
        loss = (model(x) - c).square().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.3e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        store = f"{scratch}/store"
        other = mp.get_context("fork").Process(target=worker, args=(1, store))
        other.start()
        worker(0, store)
        other.join()
