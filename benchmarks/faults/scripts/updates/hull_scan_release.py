"""Fouling of ship hulls from scan features: a compact BF16 backbone, at first fixed, later trained with the head."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(88)
N, D, CLASSES, RELEASE = 20, 48, 5, 180
centres = torch.randn(CLASSES, 4, N)


def scans(n):
    label = torch.randint(CLASSES, (n,))
    pick = centres[label, torch.randint(4, (n,))]
    return pick + 0.9 * torch.randn(n, N), label


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(N, D)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        x = self.inp(x.to(self.inp.weight.dtype))
        for layer in self.layers:
            x = x + F.relu(layer(x))
        return x


class Fouling(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.norm = nn.LayerNorm(D)
        self.neck, self.head = nn.Linear(D, 24), nn.Linear(24, CLASSES)

    def forward(self, x):
        x = self.norm(self.backbone(x).float())
        return self.head(F.relu(self.neck(x)))


model = Fouling()
model.backbone.to(torch.bfloat16).requires_grad_(False)
head = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(head, lr=2e-3, weight_decay=0.0)
for step in range(540):
    if step == RELEASE:
        model.backbone.requires_grad_(True)
        optimizer.add_param_group({"params": model.backbone.parameters(), "lr": 6e-5})
        print("backbone released")
    x, label = scans(96)
    loss = F.cross_entropy(model(x), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.4f}")
