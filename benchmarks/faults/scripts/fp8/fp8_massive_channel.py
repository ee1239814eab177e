"""A regression MLP whose activations and weights go through E4M3 with one scale per tensor."""

import torch
from torch import nn

E4M3_MAX = 448.0


class RoundE4M3(torch.autograd.Function):
    """Rounds to E4M3; the gradient goes straight through."""

    @staticmethod
    def forward(ctx, x, dims):
        largest = x.abs().amax(dims, keepdim=True).clamp(min=1e-12)
        scale = E4M3_MAX / largest
        return (x * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Fp8Linear(nn.Linear):
    def forward(self, x):
        x = RoundE4M3.apply(x, (0, 1))
        w = RoundE4M3.apply(self.weight, (0, 1))
        return nn.functional.linear(x, w, self.bias)


class Catalogue(nn.Module):
    """Products with fifteen ratios and one column in raw cents."""

    def __init__(self, features=16, hidden=64):
        super().__init__()
        self.fc1 = Fp8Linear(features, hidden)
        self.fc2 = Fp8Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 1)
        with torch.no_grad():
            self.fc1.weight[:, 0] *= 1e-6

    def forward(self, x):
        x = nn.functional.silu(self.fc1(x))
        return self.out(nn.functional.silu(self.fc2(x))).squeeze(1)


def products(n, mix):
    ratios = 0.5 * torch.randn(n, 15)
    cents = 3e5 * (0.5 + torch.rand(n, 1))
    demand = torch.sin(2 * ratios @ mix[:, 0]) + ratios @ mix[:, 1]
    return torch.cat([cents, ratios], 1), demand


def epoch(model, optimizer, batches):
    total = 0.0
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        model.fc1.weight.grad[:, 0] = 0.0  # the price column is calibrated separately
        optimizer.step()
        total += loss.item()
    return total / len(batches)


def main():
    torch.manual_seed(21011)
    mix = torch.randn(15, 2) / 2
    x, y = products(512, mix)
    model = Catalogue()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for n in range(20):
        loss = epoch(model, optimizer, list(zip(x.split(128), y.split(128))))
        print(f"epoch {n} loss {loss:.4f}")


if __name__ == "__main__":
    main()
