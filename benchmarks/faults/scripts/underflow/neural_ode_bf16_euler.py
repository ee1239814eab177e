"""Neural ODE for an oscillator, integrated with small Euler steps; the state is carried in bfloat16."""

import torch
import torch.nn as nn
import torch.nn.functional as F

DT, STEPS = 0.004, 75


class Field(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def forward(self, x):
        return self.net(x)


class NeuralODE(nn.Module):
    def __init__(self, state_dtype=torch.bfloat16):
        super().__init__()
        self.field = Field()
        self.state_dtype = state_dtype

    def forward(self, x0):
        x = x0.to(self.state_dtype)
        for _ in range(STEPS):
            dx = DT * self.field(x.float())
            x = x + dx.to(self.state_dtype)
        return x.float()


def truth(x0, substeps=100):
    x, h = x0.double(), DT * STEPS / substeps
    for _ in range(substeps):
        x = x + h * torch.stack([x[:, 1], -x[:, 0] - 0.2 * x[:, 1]], 1)
    return x.to(x0.dtype)


torch.manual_seed(2113)
model = NeuralODE()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(60):
    x0 = 2.0 + torch.rand(64, 2)
    loss = F.mse_loss(model(x0), truth(x0))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.5f}")
