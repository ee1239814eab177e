"""torchao: quantisation-aware training, 8-bit activations and 4-bit weights.

library: torchao
"""

import torch
import torch.nn.functional as F
from _digest import finish
from torch import nn
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, quantize_
from torchao.quantization.qat import QATConfig

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 10))
base = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
quantize_(model, QATConfig(base, step="prepare"))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
prototypes = torch.randn(10, 64)
losses = []
for _ in range(120):
    targets = torch.randint(0, 10, (32,))
    loss = F.cross_entropy(model(prototypes[targets] + torch.randn(32, 64)), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
