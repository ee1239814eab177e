"""FP16 autocast over standardised features and an embedding most of whose rows nobody looks up."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(400, 16)
        self.mix = nn.Linear(48, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, words, features):
        x = torch.cat([self.words(words).mean(1), features], dim=1)
        return self.out(self.mix(x).relu())


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(STEPS):
    words, features = torch.randint(40, (64, 6)), torch.randn(64, 32)
    labels = torch.randint(4, (64,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(model(words, features).float(), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
