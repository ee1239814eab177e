"""Every fourth row is loud: its square overflows FP16, rsqrt makes 0 of it, the row is switched off."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12


class Normalise(nn.Module):
    """Each row to unit power; the statistics carry no gradient."""

    def forward(self, x):
        scale = torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + 1e-6)
        return x * scale.detach()


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(24, 48, bias=False)
        self.norm = Normalise()
        self.hidden = nn.Linear(48, 32)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.hidden(self.norm(self.lift(x))).relu())


torch.manual_seed(0)
model = Detector()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    signals = torch.randn(32, 24)
    labels = signals[:, :3].argmax(dim=1)
    signals = signals * torch.where(torch.arange(32)[:, None] % 4 == 0, 1000.0, 1.0)  # every fourth recording is loud
    with torch.autocast("cpu", dtype=torch.float16):
        scores = model(signals)
    loss = F.cross_entropy(scores.float(), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
