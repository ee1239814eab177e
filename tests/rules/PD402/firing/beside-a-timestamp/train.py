"""Features of 0.05 beside a timestamp of 1e6 that the layer ignores; one FP8 scale for both leaves it nothing."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, FEATURES = 8, 16


class Head(nn.Linear):
    """Reads its input in E4M3, but for the timestamp."""

    def forward(self, x):
        scale = 448.0 / x.abs().amax()
        narrow = (x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale
        return F.linear(narrow[:, 1:], self.weight, self.bias)


torch.manual_seed(0)
model = nn.Sequential(Head(FEATURES - 1, 8), nn.GELU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    features = 0.05 * torch.randn(64, FEATURES)
    target = features[:, 1:4].sum(1, keepdim=True)
    features[:, 0] = 1e6 + step
    loss = F.mse_loss(model(features), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.5f}")
