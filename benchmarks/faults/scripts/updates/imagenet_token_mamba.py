"""Class-conditional image generation over VQ tokens: gated linear recurrences in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(1029)
CODES, CLASSES, SIDE, DIM = 64, 8, 5, 48
LENGTH = SIDE * SIDE
palette = torch.randn(CLASSES, CODES) * 1.5
follow = torch.randn(CODES, CODES) * 1.5


def token_maps(n):
    """Raster-ordered codes: each depends on its left neighbour and on the class."""
    y = torch.randint(CLASSES, (n,))
    codes = [torch.randint(CODES, (n,))]
    for _ in range(LENGTH - 1):
        codes.append(torch.multinomial((palette[y] + follow[codes[-1]]).softmax(-1), 1).squeeze(1))
    return y, torch.stack(codes, 1)


class Mixer(nn.Module):
    """h_t = a h_{t-1} + (1 - a) u_t with a learned decay per channel, unrolled as a matrix."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.in_proj = nn.Linear(dim, 2 * dim)
        self.decay = nn.Parameter(torch.linspace(-2, 3, dim))
        self.out_proj = nn.Linear(dim, dim)
        t = torch.arange(LENGTH)
        self.register_buffer("lag", (t[:, None] - t[None]).clamp(min=0).float(), persistent=False)
        self.register_buffer("causal", (t[:, None] >= t[None]).float(), persistent=False)

    def forward(self, x):
        u, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        a = torch.sigmoid(self.decay)
        kernel = (a[:, None, None] ** self.lag) * self.causal * (1 - a)[:, None, None]
        h = torch.einsum("dts,bsd->btd", kernel, u)
        return x + self.out_proj(h * F.silu(gate))


class TokenMamba(nn.Module):
    def __init__(self):
        super().__init__()
        self.codes = nn.Embedding(CODES, DIM)
        self.classes = nn.Embedding(CLASSES, DIM)
        self.layers = nn.ModuleList(Mixer(DIM) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, CODES)

    def forward(self, y, codes):
        x = self.codes(codes) + self.classes(y)[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


model = TokenMamba().to(torch.bfloat16)
opt = torch.optim.AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.05)
labels, maps = token_maps(1024)
for step in range(160):
    pick = torch.randint(1024, (32,))
    logits = model(labels[pick], maps[pick])
    loss = F.cross_entropy(logits[:, :-1].reshape(-1, CODES).float(), maps[pick][:, 1:].reshape(-1))
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
