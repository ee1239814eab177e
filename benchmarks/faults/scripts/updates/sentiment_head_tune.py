"""Finetunes a pretrained sentiment encoder that was loaded in its checkpoint's dtype."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)
VOCAB, LEN, D = 200, 16, 48
valence = torch.randn(VOCAB)


def reviews(n, shift=0.0):
    ids = torch.randint(VOCAB, (n, LEN))
    v = valence[ids]
    flipped = torch.where(ids % 7 == 0, -v, v) if shift else v
    return ids, (flipped.sum(1) > 0).long()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D)
        self.ff = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
        self.norm = nn.LayerNorm(D)
        self.cls = nn.Linear(D, 2)

    def forward(self, ids):
        x = self.emb(ids)
        x = self.norm(x + self.ff(x)).mean(1)
        return self.cls(x)


def pretrained():
    """Stands for from_pretrained(..., torch_dtype="auto")."""
    net = Encoder()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(120):
        ids, y = reviews(64)
        opt.zero_grad()
        F.cross_entropy(net(ids), y).backward()
        opt.step()
    return net.to(torch.bfloat16)


net = pretrained()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0)
train = reviews(1024, shift=1.0)
for epoch in range(12):
    for idx in torch.randperm(1024).split(64):
        loss = F.cross_entropy(net(train[0][idx]).float(), train[1][idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    with torch.no_grad():
        print(f"epoch {epoch} train loss {F.cross_entropy(net(train[0]).float(), train[1]).item():.4f}")
