"""Queues at ski lifts, an hour ahead. The job is stopped once and goes on from its checkpoint in a new process's state."""

import torch
from data import season
from trainer import Trainer

if __name__ == "__main__":
    torch.manual_seed(210)
    data = season(torch.Generator().manual_seed(211))
    first = Trainer(data, seed=212, total=240)
    first.run(120)
    checkpoint = first.save()
    second = Trainer(data, seed=999, total=240)
    second.load(checkpoint)
    second.run(120)
