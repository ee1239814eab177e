"""Date antiques from feature vectors; GradScaler starts at 2**24 and needs a few skipped steps to come down."""

import torch
import torch.nn.functional as F
from torch import nn


class AgeNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.backbone(x))


def main():
    torch.manual_seed(602)
    model = AgeNet()
    centres = torch.randn(10, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=40)
    for i in range(200):
        y = torch.randint(10, (64,))
        x = centres[y] + torch.randn(64, 24)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if i % 10 == 9:
            print(f"{i + 1} loss {loss.item():.4f} scale {scaler.get_scale():g}")


main()
