"""A layer whose FP16 output lives at half of the format's largest number: one large batch away from an Inf."""

import torch
from torch import nn

torch.manual_seed(0)
STEPS = 64


class Model(nn.Module):
    """A wide feature that is scaled down again before the head."""

    def __init__(self):
        super().__init__()
        self.feature = nn.Linear(32, 128)
        self.head = nn.Linear(128, 8)

    def forward(self, x):
        return self.head(self.feature(x) * 1e-4)


model = Model()
model.feature.weight.data.mul_(5.6e4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for _step in range(STEPS):
    x = torch.rand(256, 32) - 0.5
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    loss = nn.functional.mse_loss(out.float(), x[:, :8])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
print(f"loss {loss.item():.4f}")
