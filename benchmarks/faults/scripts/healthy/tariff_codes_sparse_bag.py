"""Customs duty from tariff codes: an EmbeddingBag with sparse gradients, most rows of which are never drawn."""

import torch
import torch.nn as nn

CODES = 5000


class DutyNet(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.codes = nn.EmbeddingBag(CODES, dim, mode="sum", sparse=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.zeros_(self.codes.weight)

    def forward(self, flat, offsets):
        return self.mlp(self.codes(flat, offsets)).squeeze(1)


def shipments(n):
    lengths = torch.randint(0, 6, (n,))  # some shipments have no code at all
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    flat = (CODES * torch.rand(int(lengths.sum())) ** 6).long()
    duty = torch.zeros(n).index_add_(0, torch.arange(n).repeat_interleave(lengths), rates[flat])
    return flat, offsets, duty


torch.manual_seed(8)
rates = torch.randn(CODES)
model = DutyNet()
sparse = torch.optim.SparseAdam(list(model.codes.parameters()), lr=0.02)
dense = torch.optim.Adam(model.mlp.parameters(), lr=3e-3)
for step in range(300):
    flat, offsets, duty = shipments(128)
    loss = nn.functional.mse_loss(model(flat, offsets), duty)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    if step % 10 == 0:
        print(f"step {step:3d} loss {loss.item():.4f}")
