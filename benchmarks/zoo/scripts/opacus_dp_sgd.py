"""Opacus: differentially private SGD with per-sample gradients.

library: opacus
"""

import torch
import torch.nn.functional as F
from _digest import finish
from opacus import PrivacyEngine
from torch import nn

torch.manual_seed(0)
targets = torch.randint(0, 4, (512,))
inputs = torch.randn(4, 16)[targets] + torch.randn(512, 16)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=32)
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    noise_generator=torch.Generator().manual_seed(1),
)
losses = []
for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
finish(losses, model)
