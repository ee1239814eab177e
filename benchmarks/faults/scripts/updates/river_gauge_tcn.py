"""Forecasts a river's level at a gauge with a temporal convolution; large batches by accumulation in Accelerate."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(40)
WINDOW = 32


def catchment(n=5200):
    """Rain falls in showers and drains slowly; the level is measured downstream."""
    rain = (torch.rand(n) < 0.08).float() * torch.empty(n).exponential_()
    level, soil = [], torch.tensor(0.5)
    for r in rain:
        soil = 0.95 * soil + 0.3 * r
        level.append(soil + 0.2 * soil**2)
    level = torch.stack(level) + 0.03 * torch.randn(n)
    level = (level - level.mean()) / level.std()
    series = torch.stack([rain, level])
    x = series.unfold(1, WINDOW, 1).transpose(0, 1)[:-4]
    return TensorDataset(x, level[WINDOW + 3 :])


class Causal(nn.Module):
    def __init__(self, a, b, dilation):
        super().__init__()
        self.pad = 2 * dilation
        self.conv = nn.Conv1d(a, b, 3, dilation=dilation)
        self.skip = nn.Conv1d(a, b, 1)

    def forward(self, x):
        return F.relu(self.conv(F.pad(x, (self.pad, 0)))) + self.skip(x)


class LevelNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(Causal(2, width, 1), Causal(width, width, 2), Causal(width, width, 4))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.layers(x)[..., -1])[:, 0]


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=8)
    model = LevelNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loader = DataLoader(catchment(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for epoch in range(3):
        for x, y in loader:
            with accelerator.accumulate(model):
                model.zero_grad()
                loss = F.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
            losses.append(loss.item())
            if len(losses) == 64:
                accelerator.print(f"epoch {epoch} loss {sum(losses) / 64:.4f}")
                losses.clear()


if __name__ == "__main__":
    main()
