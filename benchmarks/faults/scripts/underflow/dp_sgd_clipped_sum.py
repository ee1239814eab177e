"""Differentially private SGD: hooks collect gradients per example, which are clipped and summed one after the other."""

import torch
from torch import nn

CLIP, SIGMA, BATCH = 4.0, 0.1, 4000
SUM_DTYPE = torch.bfloat16


class Churn(nn.Module):
    def __init__(self, features=12):
        super().__init__()
        self.hidden, self.out = nn.Linear(features, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x))).squeeze(-1)


class PerExample:
    """Keeps what every linear layer got and the gradient of what it gave."""

    def __init__(self, model):
        self.inputs, self.gradients = {}, {}
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        for layer in self.layers:
            layer.register_forward_hook(self.forward)

    def forward(self, layer, args, output):
        if output.requires_grad:
            self.inputs[layer] = args[0].detach()
            output.register_hook(lambda g: self.gradients.__setitem__(layer, g))

    def rows(self):
        """One row per example, in the order of the parameters."""
        parts = []
        for layer in self.layers:
            g, x = self.gradients[layer], self.inputs[layer]
            parts += [torch.einsum("bo,bi->boi", g, x).flatten(1), g]
        return torch.cat(parts, 1)


def customers(n, weights):
    x = torch.randn(n, 12)
    return x, (torch.rand(n) < torch.sigmoid(3 * (x @ weights) + 3.0)).to(x.dtype)


def private_sum(rows):
    rows = rows * (CLIP / rows.norm(dim=1, keepdim=True).clamp(min=CLIP))
    total = torch.zeros(rows.shape[1], dtype=SUM_DTYPE)
    for row in rows.to(SUM_DTYPE):
        total += row
    return total, rows


def assign(model, flat):
    pieces = flat.split([p.numel() for p in model.parameters()])
    for p, piece in zip(model.parameters(), pieces):
        p.grad = piece.view_as(p).clone()


def main():
    torch.manual_seed(21006)
    weights = torch.randn(12) / 3
    x, y = customers(8000, weights)
    model = Churn()
    collected = PerExample(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(30):
        batch = torch.randperm(len(x))[:BATCH]
        loss = nn.functional.binary_cross_entropy_with_logits(model(x[batch]), y[batch], reduction="sum")
        loss.backward()
        total, rows = private_sum(collected.rows())
        assign(model, (total.to(rows.dtype) + SIGMA * CLIP * torch.randn(len(total))) / BATCH)
        optimizer.step()
        print(f"step {step} loss {loss.item() / BATCH:.5f}")
    return rows, total


if __name__ == "__main__":
    rows, total = main()
