"""1024 micro-batches make one batch; the BF16 network's gradients are summed where backward leaves them."""

import torch
from torch import nn


class Regressor(nn.Module):
    """Rounded to BF16 in its products, as on the accelerator; the optimizer divides the sums."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 24)
        self.out = nn.Linear(24, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x)))


class SummedSGD(torch.optim.SGD):
    """SGD on gradients that are sums over the micro-batches."""

    def step_mean(self, micro_batches):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(micro_batches)
        self.step()
        self.zero_grad()


def train(steps=6, micro_batches=1024):
    torch.manual_seed(3129)
    mixing = torch.randn(8, 2) / 2
    model = Regressor().to(torch.bfloat16)
    optimizer = SummedSGD(model.parameters(), lr=0.02)
    for step in range(steps):
        total = 0.0
        for _ in range(micro_batches):
            x = torch.randn(2, 8)
            target = 6.0 + torch.sin(x @ mixing)
            predicted = model(x.to(torch.bfloat16))
            loss = (predicted.to(x.dtype) - target).square().mean()
            loss.backward()
            total += loss.item()
        optimizer.step_mean(micro_batches)
        print(f"batch {step + 1:2d} loss {total / micro_batches:.4f}")


train()
