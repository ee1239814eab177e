"""einops: an MLP-Mixer from its layers, Rearrange and Reduce inside a Sequential.

library: einops
"""

import torch
import torch.nn.functional as F
from _digest import finish
from einops.layers.torch import Rearrange, Reduce
from torch import nn

torch.manual_seed(0)


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(48), *layers)

    def forward(self, x):
        return x + self.body(x)


def mix(width, conv):
    return conv(width, 2 * width), nn.GELU(), conv(2 * width, width)


def over_patches(inner, outer):
    return nn.Conv1d(inner, outer, 1)


model = nn.Sequential(
    Rearrange("n c (h p) (w q) -> n (h w) (p q c)", p=8, q=8),
    nn.Linear(192, 48),
    *(layer for _ in range(2) for layer in (Residual(*mix(16, over_patches)), Residual(*mix(48, nn.Linear)))),
    nn.LayerNorm(48),
    Reduce("n patches c -> n c", "mean"),
    nn.Linear(48, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
prototypes = torch.randn(10, 3, 32, 32)
losses = []
for _ in range(60):
    targets = torch.randint(0, 10, (16,))
    loss = F.cross_entropy(model(prototypes[targets] + torch.randn(16, 3, 32, 32)), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
