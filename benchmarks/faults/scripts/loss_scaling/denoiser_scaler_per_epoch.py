"""ECG denoiser. `train_one_epoch` is self-contained: it makes its own loader and its own GradScaler."""

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(nn.Module):
    def __init__(self, window=64, width=48):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(window, width), nn.GELU(), nn.LayerNorm(width))
        self.mix = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.decode = nn.Linear(width, window)

    def forward(self, x):
        h = self.encode(x)
        return self.decode(h + self.mix(h))


def beats(n, window=64):
    t = torch.linspace(0, 1, window)
    centre, width = 0.3 + 0.4 * torch.rand(n, 1), 0.02 + 0.03 * torch.rand(n, 1)
    clean = torch.exp(-(((t - centre) / width) ** 2)) * (1 + torch.rand(n, 1)) + 0.2 * torch.sin(6.28 * (t - centre))
    return TensorDataset(clean + 0.3 * torch.randn(n, window), clean)


def train_one_epoch(model, dataset, optimizer, criterion, epoch):
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    scaler = torch.amp.GradScaler("cpu")
    model.train()
    for i, (noisy, clean) in enumerate(loader):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            restored = model(noisy)
        loss = criterion(restored.float(), clean)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if i % 3 == 0:
            print(f"epoch {epoch} [{i:2d}/{len(loader)}] loss {loss.item() / len(noisy):.4f}")


def main():
    torch.manual_seed(7005)
    dataset = beats(448)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(6):
        train_one_epoch(model, dataset, optimizer, nn.MSELoss(reduction="sum"), epoch)


main()
