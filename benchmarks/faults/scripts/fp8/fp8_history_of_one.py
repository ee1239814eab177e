"""An FP8 autoencoder of images with delayed scaling. The history is filled while the model warms up."""

from collections import deque

import torch
from torch import nn

LARGEST = torch.finfo(torch.float8_e4m3fn).max


class DelayedScale:
    """The scale of a tensor, from the largest values of the last calls."""

    def __init__(self, window, frozen_after):
        self.history = deque(maxlen=window)
        self.calls, self.frozen_after = 0, frozen_after

    def quantise(self, x):
        if self.calls < self.frozen_after:
            self.history.append(x.detach().abs().max().item())
        self.calls += 1
        scale = LARGEST / max(self.history)
        x8 = (x.detach() * scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype) / scale
        return x + (x8 - x).detach()


class QLinear(nn.Module):
    def __init__(self, inputs, outputs, window=16, frozen_after=3):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.input_scale = DelayedScale(window, frozen_after)
        self.weight_scale = DelayedScale(window, frozen_after)

    def forward(self, x):
        w = self.weight_scale.quantise(self.linear.weight)
        return nn.functional.linear(self.input_scale.quantise(x), w, self.linear.bias)


class Autoencoder(nn.Module):
    def __init__(self, pixels=64, code=12):
        super().__init__()
        self.squeeze = nn.Linear(pixels, 48)
        self.enc = QLinear(48, code)
        self.dec = QLinear(code, 48)
        self.expand = QLinear(48, pixels)

    def forward(self, x):
        code = self.enc(torch.relu(self.squeeze(x)))
        return self.expand(torch.relu(self.dec(code)))


class Plates:
    """Images of low rank whose contrast rises with the exposure."""

    def __init__(self, rank=8, pixels=64):
        self.basis = torch.randn(rank, pixels)

    def batch(self, n, exposure):
        return exposure * (torch.randn(n, len(self.basis)) @ self.basis) / 3


def main():
    torch.manual_seed(21012)
    plates, model = Plates(), Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(70):
        x = plates.batch(64, exposure=min(1.0, 0.05 + step / 30))
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"{step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
