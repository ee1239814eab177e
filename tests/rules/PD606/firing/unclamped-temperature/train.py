"""Half of the labels are noise, and the temperature grows by a tenth per step: nothing caps the output's logits."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 48


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(16, 64), nn.Linear(64, 10)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.head(F.gelu(self.hidden(x))) * self.scale


torch.manual_seed(0)
model, centres = Classifier(), torch.randn(10, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    labels = torch.randint(10, (64,))
    x = centres[labels] + torch.randn(64, 16)
    noisy = torch.where(torch.rand(64) < 0.5, torch.randint(10, (64,)), labels)
    loss = F.cross_entropy(model(x), noisy)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.scale *= 1.15
    print(f"step {step}: loss {loss.item():.4f}")
