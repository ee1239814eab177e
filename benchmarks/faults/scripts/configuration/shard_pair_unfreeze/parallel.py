import copy

import torch


class Replicas:
    """Two copies of a model that see different shards; gradients are averaged before the step."""

    def __init__(self, model, make_optimizer, world=2):
        self.models = [model] + [copy.deepcopy(model) for _ in range(world - 1)]
        self.optimizers = [make_optimizer(m) for m in self.models]
        self.buckets = [[p for p in m.parameters() if p.requires_grad] for m in self.models]

    def refresh_buckets(self):
        self.buckets = [[p for p in m.parameters() if p.requires_grad] for m in self.models]

    def unfreeze(self, name):
        for m in self.models:
            getattr(m, name).requires_grad_(True)

    @torch.no_grad()
    def reduce(self):
        for same in zip(*self.buckets):
            mean = torch.stack([p.grad for p in same]).mean(0)
            for p in same:
                p.grad.copy_(mean)

    def step(self, losses):
        for o in self.optimizers:
            o.zero_grad()
        for loss in losses:
            loss.backward()
        self.reduce()
        for o in self.optimizers:
            o.step()
