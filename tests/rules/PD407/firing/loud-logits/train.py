"""A language model with everything in FP8, the layer of the logits as well; they spread by some ten nats."""

import torch
from torch import nn
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn
WIDTH, WORDS, STEPS = 64, 96, 10


class FP8Linear(nn.Module):
    """Input and weight in E4M3, each at the scale of its own amax; gradients pass straight through."""

    def __init__(self, inputs, outputs, spread=1.0):
        super().__init__()
        self.weight = nn.Parameter(spread * torch.randn(outputs, inputs) / inputs**0.5)

    def quantise(self, x):
        with torch.no_grad():
            scale = 448.0 / x.abs().amax().clamp_min(1e-12)
            seen = (x * scale).to(E4M3).float() / scale
        return x + (seen - x).detach()

    def forward(self, x):
        return self.quantise(x) @ self.quantise(self.weight).t()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.up, self.down = FP8Linear(WIDTH, 2 * WIDTH), FP8Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = FP8Linear(WIDTH, WORDS, spread=10.0)

    def forward(self, words):
        x = self.embedding(words)
        x = x + self.down(F.gelu(self.up(x)))
        return self.lm_head(self.norm(x))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(STEPS):
    words = torch.randint(0, WORDS, (8, 32))
    loss = F.cross_entropy(model(words).flatten(0, 1), (words * 7 + 3).remainder(WORDS).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.4f}")
