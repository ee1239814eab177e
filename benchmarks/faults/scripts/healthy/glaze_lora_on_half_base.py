"""LoRA on a frozen FP16 base: B starts at zero, so that A has no gradient in the first step; adapters are FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=16):
        super().__init__()
        self.base = base.half().requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x.half()).float() + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling


class GlazeNet(nn.Module):
    def __init__(self, features=16, hidden=64, classes=5):
        super().__init__()
        self.fc1 = LoRALinear(nn.Linear(features, hidden))
        self.fc2 = LoRALinear(nn.Linear(hidden, hidden))
        self.head = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.head(F.relu(self.fc2(F.relu(self.fc1(x)))))


def shards(n):
    y = torch.randint(5, (n,))
    x = torch.randn(n, 16)
    x[torch.arange(n), y] += 1.5
    x[torch.arange(n), y + 8] *= 2
    return x, y


torch.manual_seed(1300)
model = GlazeNet()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
for step in range(160):
    x, y = shards(64)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
