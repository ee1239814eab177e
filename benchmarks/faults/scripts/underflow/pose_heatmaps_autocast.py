"""Keypoint heatmaps: MSE over all pixels of small Gaussian peaks, in FP16 autocast to save memory."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Joints(Dataset):
    """Blobs at the joints; the target has one narrow peak for each joint."""

    def __init__(self, n=96, size=48, joints=6, sigma=1.0):
        gen = torch.Generator().manual_seed(11)
        ys, xs = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        centre = torch.randint(6, size - 6, (n, joints, 2), generator=gen)
        d2 = (ys - centre[..., 0, None, None]) ** 2 + (xs - centre[..., 1, None, None]) ** 2
        self.target = torch.exp(-d2 / (2 * sigma**2))
        shade = torch.linspace(0.5, 1.5, joints).view(1, joints, 1, 1)
        self.image = (torch.exp(-d2 / 8.0) * shade).sum(1, keepdim=True)
        self.image += 0.05 * torch.randn(self.image.shape, generator=gen)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.target[i]


class SimplePose(nn.Module):
    def __init__(self, joints=6, width=16):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, width, 5, 2, 2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 1, 1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        )
        self.deconv = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.norm = nn.BatchNorm2d(width)
        self.final = nn.Conv2d(width, joints, 1)
        nn.init.normal_(self.final.weight, std=0.001)
        nn.init.zeros_(self.final.bias)

    def forward(self, x):
        x = self.backbone(x)
        return self.final(torch.relu(self.norm(self.deconv(x))))


def main():
    torch.manual_seed(7)
    loader = DataLoader(Joints(), batch_size=16, shuffle=True)
    model = SimplePose()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(8):
        for step, (image, target) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.float16):
                heatmaps = model(image)
            loss = nn.functional.mse_loss(heatmaps.float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 3 == 0:
                print(f"epoch {epoch} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
