"""Super-resolution in the manner of VDSR: FP16 autocast for speed, an MSE over all pixels, and no GradScaler."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Net(nn.Module):
    def __init__(self, depth=6, width=12):
        super().__init__()
        self.input = nn.Conv2d(1, width, kernel_size=3, padding=1)
        self.residual_layer = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(width, width, kernel_size=3, padding=1), nn.ReLU()) for _ in range(depth)]
        )
        self.output = nn.Conv2d(width, 1, kernel_size=3, padding=1)

    def forward(self, x):
        out = torch.relu(self.input(x))
        return self.output(self.residual_layer(out)) + x


class Patches(Dataset):
    """Edges and blobs; the low resolution is a 3 x 3 mean."""

    def __init__(self, count, size=48):
        y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
        a, b, c = torch.randn(3, count, 1, 1)
        waves = torch.sin(6 * (a * x + b * y) + c)
        self.high = (0.5 + 0.3 * torch.sign(waves) * (waves.abs() > 0.2)).unsqueeze(1)
        self.low = nn.functional.avg_pool2d(self.high, 3, stride=1, padding=1, count_include_pad=False)

    def __len__(self):
        return len(self.high)

    def __getitem__(self, index):
        return self.low[index], self.high[index]


def train(loader, optimizer, model, criterion, epoch):
    model.train()
    for iteration, (low, high) in enumerate(loader, 1):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(low).float(), high)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if iteration % 5 == 0:
            print(f"===> Epoch[{epoch}]({iteration}/{len(loader)}): Loss: {1e3 * loss.item():.5f}e-3")


def main():
    parser = argparse.ArgumentParser(description="VDSR")
    parser.add_argument("--batchSize", type=int, default=4)
    parser.add_argument("--nEpochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=601)
    opt = parser.parse_args()
    torch.manual_seed(opt.seed)
    loader = DataLoader(Patches(100), batch_size=opt.batchSize, shuffle=True)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=opt.lr)
    for epoch in range(1, opt.nEpochs + 1):
        train(loader, optimizer, model, nn.MSELoss(), epoch)


if __name__ == "__main__":
    main()
