"""The same, its inverse frequencies computed in FP32 and only a short table of segment numbers in BF16."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LENGTH, STEPS = 24, 16, 96, 4


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 100.0 ** -torch.linspace(0, 1, width // 2))

    def forward(self, x):
        angle = torch.arange(x.shape[1])[:, None] * self.inv_freq.float()
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = Rotary(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.token(tokens)
        q, k = self.rotary(self.query(x)), self.rotary(self.key(x))
        mixed = F.scaled_dot_product_attention(q, k, self.value(x).float(), is_causal=True)
        return self.head(mixed)


torch.manual_seed(0)
model = Model()
model.register_buffer("segment_positions", torch.arange(8, dtype=torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(STEPS):
    tokens = (torch.randint(VOCABULARY, (2, 1)) + torch.arange(LENGTH + 1)) % VOCABULARY
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
