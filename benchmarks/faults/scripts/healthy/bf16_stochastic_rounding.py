"""BF16 weights whose updates are rounded stochastically: most elements stay put in a step, and that is right on average."""

import torch
import torch.nn.functional as F
from torch import nn


def stochastic_round(x):
    """FP32 to BF16, up or down with the probability of the nearness."""
    bits = x.view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    return ((bits + noise) & -65536).view(torch.float32).to(torch.bfloat16)


class SignSGD(torch.optim.Optimizer):
    """Adam-like momentum steps on FP32 copies made for the moment of the step."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("momentum", torch.zeros_like(p, dtype=torch.float32))
                v = state.setdefault("square", torch.zeros_like(p, dtype=torch.float32))
                g = p.grad.float()
                m.lerp_(g, 0.1)
                v.lerp_(g * g, 0.02)
                p.copy_(stochastic_round(p.float() - group["lr"] * m / (v.sqrt() + 1e-8)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(24, 64), nn.Linear(64, 64), nn.Linear(64, 6)

    def forward(self, x):
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


torch.manual_seed(0)
model = Net().to(torch.bfloat16)
optimizer = SignSGD(model.parameters(), lr=3e-4)
centres = torch.randn(6, 24)
for step in range(150):
    y = torch.randint(6, (64,))
    x = (centres[y] + torch.randn(64, 24)).to(torch.bfloat16)
    loss = F.cross_entropy(model(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
