"""An optimizer over FP32 copies of BF16 weights."""

import torch


class MasterWeightOptimizer:
    def __init__(self, params, **options):
        self.live = list(params)
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.live]
        self.inner = torch.optim.AdamW(self.masters, **options)

    def step(self):
        for m, p in zip(self.masters, self.live):
            m.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        with torch.no_grad():
            for m, p in zip(self.masters, self.live):
                p.copy_(m)

    @torch.no_grad()
    def rebuild_masters_from_live(self):
        for m, p in zip(self.masters, self.live):
            m.copy_(p)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)
