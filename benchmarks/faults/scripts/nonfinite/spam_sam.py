"""Short messages sorted into ham and spam by a bag of n-grams with hinge loss, trained with sharpness-aware minimisation."""

import torch
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base = base(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def climb(self):
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            scale = group["rho"] / norm
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["e"] = p.grad * scale
                p.add_(self.state[p]["e"])
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        self.climb()
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if "e" in self.state[p]:
                    p.sub_(self.state[p]["e"])
        self.base.step()
        return loss


class NgramClassifier(nn.Module):
    def __init__(self, buckets=400, dim=24):
        super().__init__()
        self.bag = nn.EmbeddingBag(buckets, dim, mode="mean")
        self.hidden = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, ids):
        return self.out(torch.relu(self.hidden(self.bag(ids)))).squeeze(-1)


def messages(n):
    spam = torch.rand(n) < 0.4
    ids = torch.randint(0, 360, (n, 20))
    ids[spam, :8] = torch.randint(360, 400, (int(spam.sum()), 8))
    return ids, torch.where(spam, 1.0, -1.0)


torch.manual_seed(9)
model = NgramClassifier()
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.4, momentum=0.9)


def margin_loss(ids, y):
    return torch.relu(1 - y * model(ids)).mean()


for step in range(70):
    ids, y = messages(16)

    def closure():
        loss = margin_loss(ids, y)
        loss.backward()
        return loss

    optimizer.zero_grad()
    loss = closure()
    optimizer.step(closure)
    if step % 10 == 0:
        print(f"step {step} hinge {loss.item():.4f}")
