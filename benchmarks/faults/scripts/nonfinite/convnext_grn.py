"""ConvNeXt V2 stage with global response normalisation, FP16 autocast and a loss scaler."""

import torch
from torch import nn


class GRN(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        energy = x.abs().sum(dim=(1, 2), keepdim=True)
        share = energy / (energy.mean(-1, keepdim=True) + 1e-6)
        return self.gamma * (x * share) + self.beta + x


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.pwconv1, self.act, self.grn, self.pwconv2 = (
            nn.Linear(dim, 2 * dim),
            nn.ReLU(),
            GRN(2 * dim),
            nn.Linear(2 * dim, dim),
        )

    def forward(self, x):
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        return x + self.pwconv2(self.grn(self.act(self.pwconv1(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self, dim=12, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 2, 2)
        self.stages = nn.Sequential(ConvNeXtBlock(dim), ConvNeXtBlock(dim))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


torch.manual_seed(0)
net = ConvNeXt()
optimizer = torch.optim.AdamW(
    [
        {"params": [p for n, p in net.named_parameters() if "pwconv1" in n], "lr": 3.0},
        {"params": [p for n, p in net.named_parameters() if "pwconv1" not in n]},
    ],
    lr=1e-3,
)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(12):
    labels = torch.randint(4, (4,))
    images = torch.randn(4, 3, 96, 96) + labels.view(-1, 1, 1, 1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(images)
    loss = nn.functional.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: {loss.item():.4f}")
