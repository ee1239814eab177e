"""FP16 with activations in the thousands, one outlying batch, and a mask of finfo.min: large on purpose, and clear."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 14


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.value, self.pool = nn.Linear(16, 1), nn.Linear(16, 16), nn.Softmax(dim=1)
        self.out = nn.Linear(16, 4)

    def forward(self, x, alive):
        mask = torch.zeros(alive.shape, dtype=torch.float16).masked_fill(~alive, torch.finfo(torch.float16).min)
        weights = self.pool(self.score(x).squeeze(-1) + mask)
        return self.out((weights.unsqueeze(-1) * self.value(x * 800)).sum(1) / 800)


torch.manual_seed(0)
model = Masked()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
for step in range(STEPS):
    features = torch.randn(32, 6, 16) * (8.0 if step == 9 else 1.0)
    alive = torch.arange(6)[None] < torch.randint(1, 7, (32, 1))
    labels = features[:, 0, :4].argmax(dim=1)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(features, alive)
    loss = F.cross_entropy(logits.float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
