"""Domain-adversarial training in FP16: the loss scale falls and falls, because of one layer's gradients."""

import torch
from torch import nn


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.strength * gradient, None


class GradientReversal(nn.Module):
    def __init__(self, strength):
        super().__init__()
        self.strength = strength

    def forward(self, x):
        return Reverse.apply(x, self.strength)


class DANN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.label = nn.Linear(16, 3)
        self.reverse = GradientReversal(1e7)  # meant to be 1e-1 with the schedule's exponent
        self.domain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        h = self.features(x)
        return self.label(h), self.domain(self.reverse(h))


def main():
    torch.manual_seed(0)
    model, criterion = DANN(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(30):
        domain = torch.randint(2, (32,))
        x = torch.randn(32, 12) + domain[:, None]
        with torch.autocast("cpu", dtype=torch.float16):
            labels, domains = model(x)
            loss = criterion(labels.float(), x[:, 0].clamp(0, 2).long()) + criterion(domains.float(), domain)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step}: loss {loss.item():.3f} scale {scaler.get_scale():g}")


main()
