"""Image-caption pairs by contrast, with a learned temperature in a parameter group without decay."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1312)
FACTORS, PAIRS = 6, 192
image_map, text_map = torch.randn(FACTORS, 40), torch.randn(FACTORS, 24)


def pairs(n):
    f = torch.randn(n, FACTORS)
    image = torch.tanh(f @ image_map) + 0.8 * torch.randn(n, 40)
    return image, torch.tanh(f @ text_map) + 0.8 * torch.randn(n, 24)


class DualEncoder(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, d))
        self.text = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, d))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        i, t = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.logit_scale.exp() * i @ t.T


model = DualEncoder()
towers = [*model.image.parameters(), *model.text.parameters()]
optimizer = torch.optim.AdamW(
    [{"params": towers, "weight_decay": 0.1}, {"params": [model.logit_scale], "weight_decay": 0.0, "lr": 0.1}],
    lr=1e-3,
)
train, val = pairs(PAIRS), pairs(128)
for epoch in range(60):
    for idx in torch.randperm(PAIRS).split(48):
        logits = model(train[0][idx], train[1][idx])
        labels = torch.arange(len(idx))
        nll = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        optimizer.zero_grad()
        nll.backward()
        optimizer.step()
    if epoch % 2 == 1:
        with torch.no_grad():
            logits = model(*val)
            val_nll = F.cross_entropy(logits, torch.arange(128))
        print(f"epoch {epoch} train {nll.item():.4f} val loss {val_nll.item():.4f}")
