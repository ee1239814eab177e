"""Low-rank adapters beside a frozen network, all of it in FP16; many micro-batches make one step."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, r=4, alpha=1.0):
        super().__init__()
        self.base, self.scaling = base, alpha / r
        for p in base.parameters():
            p.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.empty(r, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, r))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scaling * ((x @ self.lora_A.T) @ self.lora_B.T)


class Pretrained(nn.Module):
    def __init__(self, width=48, outputs=128):
        super().__init__()
        self.up = nn.Linear(16, width)
        self.mid = nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        return self.head(F.gelu(self.mid(F.gelu(self.up(x)))))


def adapt(model):
    for name in ("up", "mid", "head"):
        setattr(model, name, LoRALinear(getattr(model, name)))
    return model.half()


def finetune():
    torch.manual_seed(3109)
    target = Pretrained()
    model = Pretrained()
    model.load_state_dict(target.state_dict())
    with torch.no_grad():
        target.head.weight += 0.3 * torch.randn(128, 2) @ torch.randn(2, 48) / 7
        target.up.weight += 0.3 * torch.randn(48, 1) @ torch.randn(1, 16)
    model = adapt(model)
    # SGD: no room for the states of Adam
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=3e4)
    micro_batches = 32
    for step in range(40):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(micro_batches):
            x = torch.randn(4, 16)
            loss = F.mse_loss(model(x.half()).float(), target(x).detach(), reduction="mean")
            (1e-3 * loss / micro_batches).backward()
            total += loss.item() / micro_batches
        optimizer.step()
        if step % 4 == 3:
            print(f"update {step + 1:3d}  loss {total:.5f}")


finetune()
