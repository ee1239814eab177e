"""Wind fields, coarse to fine, with a constant loss scale of 8 by hand."""

import torch
from torch import nn

LOSS_SCALE = 8.0
WEIGHT = 3e-5  # beside the loss of the temperatures


class Downscaler(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 256))

    def forward(self, coarse):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.net(coarse).float()


def field(n, modes):
    coarse = torch.randn(n, 16)
    return coarse, torch.tanh(coarse @ modes / 2)


def scaled_backward(loss, parameters):
    (LOSS_SCALE * WEIGHT * loss).backward()
    for p in parameters:
        p.grad.div_(LOSS_SCALE)


def train(model, modes, steps=60, batch=128):
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3, eps=1e-15)
    history = []
    for step in range(steps):
        coarse, fine = field(batch, modes)
        loss = (model(coarse) - fine).square().mean()
        optimizer.zero_grad()
        scaled_backward(loss, parameters)
        optimizer.step()
        history.append(loss.item() / fine.square().mean().item())
        if step % 6 == 5:
            print(f"step {step + 1}: relative loss {history[-1]:.4f}")
    return history


if __name__ == "__main__":
    torch.manual_seed(3116)
    train(Downscaler(), torch.randn(16, 256))
