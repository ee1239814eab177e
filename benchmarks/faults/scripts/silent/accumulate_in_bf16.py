"""512 micro-batches make one batch; the BF16 network's gradients are summed where backward leaves them."""

import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 24)
        self.out = nn.Linear(24, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


class Masters:
    def __init__(self, model, lr):
        self.model = model
        self.copies = [p.detach().float().clone() for p in model.parameters()]
        self.optimizer = torch.optim.SGD(self.copies, lr=lr, momentum=0.5)

    @torch.no_grad()
    def step(self, micro_batches):
        for copy, p in zip(self.copies, self.model.parameters()):
            copy.grad = p.grad.float() / micro_batches
            p.grad = None
        self.optimizer.step()
        for copy, p in zip(self.copies, self.model.parameters()):
            p.copy_(copy)


def train(steps=8, micro_batches=512):
    torch.manual_seed(3129)
    mixing = torch.randn(8, 2) / 2
    model = Regressor().to(torch.bfloat16)
    masters = Masters(model, lr=0.5)
    for step in range(steps):
        total = 0.0
        for _ in range(micro_batches):
            x = torch.randn(2, 8)
            target = 1.0 + torch.sin(x @ mixing)
            predicted = model(x.to(torch.bfloat16))
            loss = (predicted.to(x.dtype) - target).square().mean()
            loss.backward()
            total += loss.item()
        masters.step(micro_batches)
        print(f"batch {step + 1:2d} loss {total / micro_batches:.4f}")


train()
