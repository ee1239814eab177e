"""Differentially private training: gradients per example, clipped, summed one after the other, and a bit of noise."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

CLIP, SIGMA, BATCH, RATE = 0.5, 0.3, 600, 2.0
SUM_DTYPE = torch.bfloat16


class Churn(nn.Module):
    def __init__(self, features=12):
        super().__init__()
        self.hidden = nn.Linear(features, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x))).squeeze(-1)


def customers(n, weights):
    x = torch.randn(n, 12)
    y = (torch.rand(n) < torch.sigmoid(3 * (x @ weights) + 3.0)).to(x.dtype)
    return x, y


def per_example_gradients(model, x, y):
    parameters = {k: v.detach() for k, v in model.named_parameters()}

    def loss(parameters, one, target):
        logit = functional_call(model, parameters, (one.unsqueeze(0),))
        return nn.functional.binary_cross_entropy_with_logits(logit.squeeze(0), target)

    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)


def flatten(gradients):
    return torch.cat([g.flatten(1) for g in gradients.values()], 1)


def clipped(rows):
    return rows * (CLIP / rows.norm(dim=1, keepdim=True).clamp(min=CLIP))


def summed(rows):
    total = torch.zeros(rows.shape[1], dtype=SUM_DTYPE)
    for row in rows:
        total += row.to(SUM_DTYPE)
    return total


@torch.no_grad()
def apply(model, flat):
    start = 0
    for p in model.parameters():
        p -= RATE * flat[start : start + p.numel()].view_as(p)
        start += p.numel()


def main():
    torch.manual_seed(21006)
    weights = torch.randn(12) / 3
    x, y = customers(2400, weights)
    model = Churn()
    for step in range(32):
        batch = torch.randperm(len(x))[:BATCH]
        rows = clipped(flatten(per_example_gradients(model, x[batch], y[batch])))
        total = summed(rows)
        noise = SIGMA * CLIP * torch.randn(rows.shape[1])
        apply(model, (total.to(rows.dtype) + noise) / BATCH)
        with torch.no_grad():
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        print(f"step {step} loss {loss.item():.5f}")
    return rows, total


if __name__ == "__main__":
    rows, total = main()
