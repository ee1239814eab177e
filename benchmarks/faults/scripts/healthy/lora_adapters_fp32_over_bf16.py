"""LoRA: the frozen base is BF16, the adapters are FP32, B starts at zero so that A has no gradient at first."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.scaling * self.lora_b(self.lora_a(x))


torch.manual_seed(2174)
model = nn.Sequential(LoRALinear(nn.Linear(16, 64)), nn.GELU(), LoRALinear(nn.Linear(64, 4)))
labels_of = torch.randn(16, 4)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
for step in range(150):
    x = torch.randn(64, 16)
    loss = F.cross_entropy(model(x), (x @ labels_of).argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
