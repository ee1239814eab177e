import math

import torch
import torch.nn as nn


class LoRALinear(nn.Module):
    """A linear layer whose weight stays in bfloat16 and does not move, and a low-rank correction in float32."""

    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.to(torch.bfloat16)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scaling = alpha / rank

    def forward(self, x):
        frozen = self.base(x.to(self.base.weight.dtype)).to(x.dtype)
        return frozen + self.scaling * (x @ self.lora_a.T @ self.lora_b.T)


def add_lora(model, names, rank=4):
    """Replaces the named linear layers and freezes everything else."""
    model.requires_grad_(False)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and path.rpartition(".")[2] in names:
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], LoRALinear(module, rank))
    return model
