"""Intent tagging: bfloat16 weights in the model, float32 copies in the optimizer, copied back after each step."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(204)
V, T, D, INTENTS = 60, 14, 40, 6
trigger = torch.randint(INTENTS, (V,))


def turns(n):
    ids = torch.randint(1, V, (n, T))
    at = torch.randint(1, T, (n,))
    ids[torch.arange(n), at - 1] = 0
    return ids, trigger[ids[torch.arange(n), at]]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, D)
        self.conv = nn.Conv1d(D, D, 2, padding=1)
        self.norm = nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, INTENTS))

    def forward(self, ids):
        h = F.gelu(self.conv(self.emb(ids).mT)).mT
        return self.mlp(self.norm(h).amax(1)).float()


model = Tagger().bfloat16()
masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.01)
for step in range(200):
    ids, y = turns(48)
    loss = F.cross_entropy(model(ids), y)
    model.zero_grad()
    loss.backward()
    for m, p in zip(masters, model.parameters(), strict=True):
        m.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for m, p in zip(masters, model.parameters(), strict=True):
            p.copy_(m)
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
