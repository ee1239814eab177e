"""CTR prediction with embedding tables in half precision and a static loss scale of 1; FP32 masters for the update."""

import torch
import torch.nn as nn
import torch.nn.functional as F

FIELDS, ROWS, DIM = 6, 50, 8
LOSS_SCALE = 1.0


class DeepFM(nn.Module):
    def __init__(self):
        super().__init__()
        self.first_order = nn.Embedding(FIELDS * ROWS, 1)
        self.tables = nn.Embedding(FIELDS * ROWS, DIM)
        nn.init.normal_(self.tables.weight, std=0.05)
        nn.init.zeros_(self.first_order.weight)
        self.mlp = nn.Sequential(nn.Linear(FIELDS * DIM, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids):
        ids = ids + torch.arange(FIELDS) * ROWS
        e = self.tables(ids)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(-1)
        return self.first_order(ids).sum((1, 2)) + fm + self.mlp(e.flatten(1)).squeeze(-1)


def clicks(n, hidden):
    ids = torch.randint(ROWS, (n, FIELDS))
    logit = hidden[torch.arange(FIELDS), ids].sum(1) - 3.0
    return ids, (torch.rand(n) < torch.sigmoid(logit)).float()


torch.manual_seed(2112)
hidden = torch.randn(FIELDS, ROWS)
model = DeepFM().half()
masters = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=2e-3)
BATCH, EXAMPLES = 2048, 1_000_000
for step in range(150):
    ids, y = clicks(BATCH, hidden)
    weight = torch.where(y > 0, 1.0, 0.2) / EXAMPLES  # so that an epoch adds up to one
    logits = model(ids)
    loss = (F.binary_cross_entropy_with_logits(logits.float(), y, reduction="none") * weight).sum()
    model.zero_grad()
    (loss * LOSS_SCALE).backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float() / LOSS_SCALE
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item() / weight.sum().item():.5f}")
