"""A search ranker with FP8 linears. scale and scale_inv changed places when the weights were ported."""

import torch
from torch import nn

FP8 = torch.float8_e4m3fn


class Cast(torch.autograd.Function):
    """Rounds to FP8 at ``x * scale``; the gradient passes."""

    @staticmethod
    def forward(ctx, x, scale):
        return (x * scale).clamp(-448, 448).to(FP8).to(x.dtype) / scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Fp8Linear(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_out, fan_in) / fan_in**0.5)
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x):
        x_scale = 448.0 / x.detach().abs().amax().clamp(min=1e-12)
        w_scale = self.weight.detach().abs().amax() / 448.0
        return nn.functional.linear(Cast.apply(x, x_scale), Cast.apply(self.weight, w_scale), self.bias)


class Ranker(nn.Module):
    def __init__(self, features=32, width=64):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.fc1, self.fc2 = Fp8Linear(features, width), Fp8Linear(width, width)
        self.score = nn.Linear(width + features, 1)

    def forward(self, x):
        h = torch.relu(self.fc2(torch.relu(self.fc1(self.norm(x)))))
        return self.score(torch.cat([h, x], -1))[..., 0]


def queries(n, w, documents=10):
    x = torch.randn(n, documents, 32)
    relevance = (x @ w[:, 0]) * torch.sigmoid(2 * (x @ w[:, 1])) + (x @ w[:, 2]).abs()
    return x, relevance


def main():
    torch.manual_seed(28)
    w = torch.randn(32, 3) / 3
    model = Ranker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(140):
        x, relevance = queries(32, w)
        loss = nn.functional.cross_entropy(model(x), (3 * relevance).softmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
