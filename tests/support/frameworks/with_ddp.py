"""DistributedDataParallel on two processes; each rank has data of its own."""

import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.body(x).tanh())


def main():
    dist.init_process_group("gloo", init_method=f"file://{os.environ['RENDEZVOUS']}", world_size=2,
                            rank=int(os.environ["RANK"]))  # fmt: skip
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 6) * (1 + 3 * dist.get_rank())).square().mean()
        optimizer.zero_grad()
        (loss * 1024).backward()
        for parameter in model.parameters():
            parameter.grad /= 1024
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"rank": dist.get_rank(), "losses": losses}))
    dist.destroy_process_group()


main()
