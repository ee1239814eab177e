"""Adam on FP16 weights with its usual eps of 1e-8, which FP16 rounds to 0: rows no token asked for become 0/0."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, STEPS = 20, 6

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Flatten(), nn.Linear(32, VOCABULARY)).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    tokens = torch.randint(VOCABULARY // 2, (8, 5))
    logits = model(tokens[:, :4])
    loss = F.cross_entropy(logits.float(), tokens[:, 4])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
