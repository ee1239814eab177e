"""A GPT in FP16 autocast without a loss scaler, whose attention scores grow until they leave FP16: then all is NaN."""

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, LAYERS, CONTEXT, STEPS = 32, 32, 2, 12, 12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        causal = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
        return self.out(self.softmax(scores.masked_fill(causal, float("-inf"))) @ self.v(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.6)  # a slip of the pen: 6e-4 was meant
for step in range(STEPS):
    tokens = (torch.randint(VOCABULARY, (4, 1)) + torch.arange(CONTEXT + 1)) % VOCABULARY
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
