import torch
from torch import nn


class Adapter(nn.Module):
    def __init__(self, dim, rank=8):
        super().__init__()
        self.down, self.up = nn.Linear(dim, rank), nn.Linear(rank, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return x + self.up(torch.nn.functional.gelu(self.down(x)))


class PestNet(nn.Module):
    """A transformer over readings of traps; only adapters, norms and the head are to learn."""

    def __init__(self, features=10, dim=48, depth=3, pests=5):
        super().__init__()
        self.embed = nn.Linear(features, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 96, dropout=0.0, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.adapters = nn.ModuleList(Adapter(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, pests)

    def forward(self, x):
        x = self.embed(x)
        for layer, adapter in zip(self.layers, self.adapters):
            x = adapter(layer(x))
        return self.head(self.norm(x).mean(1))


def freeze_base(model):
    learnt = ("adapters.", "norm.", "head.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(learnt))
    return [p for p in model.parameters() if p.requires_grad]
