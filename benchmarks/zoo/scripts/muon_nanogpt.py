"""Muon of torch for matrices beside AdamW for the rest, on a small GPT with QK-norm, ReLU squared and a soft cap.

library: torch
"""

import torch
import torch.nn.functional as F
from _digest import finish
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (c,))).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = F.rms_norm(q, (q.shape[-1],)), F.rms_norm(k, (k.shape[-1],))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (c,)))).square())


class GPT(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(3))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return 15 * torch.tanh(self.head(F.rms_norm(x, (x.shape[-1],))) / 15)


model = GPT()
matrices = list(model.blocks.parameters())
others = [*model.tokens.parameters(), *model.places.parameters(), *model.head.parameters()]
optimizers = [torch.optim.Muon(matrices, lr=0.02, momentum=0.95), torch.optim.AdamW(others, lr=3e-3, betas=(0.8, 0.95))]
losses = []
for _ in range(60):
    ids = (torch.randint(0, 64, (16, 1)) + torch.randint(1, 4, (16, 1)) * torch.arange(25)) % 64
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())
finish(losses, model)
