"""Click model in DLRM's manner: large sparse tables with SparseAdam, dense layers with Adagrad."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(206)
SIZES, DIM = (4000, 900, 50), 12
taste = [torch.randn(s) for s in SIZES]


def impressions(n):
    ids = [(s * torch.rand(n).pow(4)).long() for s in SIZES]
    dense = torch.randn(n, 6)
    score = sum(t[i] for t, i in zip(taste, ids, strict=True)) + dense[:, 0] - 1.5
    return ids, dense, torch.bernoulli(score.sigmoid())


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(s, DIM, sparse=True) for s in SIZES)
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.01, 0.01)
        self.bottom = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(DIM + 6, 48), nn.ReLU(), nn.Linear(48, 1))
        self.wide = nn.ModuleList(nn.Embedding(s, 1, sparse=True) for s in SIZES)
        for table in self.wide:
            nn.init.zeros_(table.weight)

    def forward(self, ids, dense):
        b = self.bottom(dense)
        z = torch.stack([b, *(t(i) for t, i in zip(self.tables, ids, strict=True))], 1)
        products = z @ z.mT
        i, j = torch.triu_indices(4, 4, 1)
        deep = self.top(torch.cat([b, products[:, i, j]], 1)).squeeze(1)
        return deep + sum(w(i).squeeze(1) for w, i in zip(self.wide, ids, strict=True))


model = DLRM()
sparse = [*model.tables.parameters(), *model.wide.parameters()]
dense = [*model.bottom.parameters(), *model.top.parameters()]
optimizers = torch.optim.SparseAdam(sparse, lr=2e-2), torch.optim.Adagrad(dense, lr=2e-2)
for step in range(250):
    ids, x, click = impressions(128)
    loss = F.binary_cross_entropy_with_logits(model(ids, x), click)
    for o in optimizers:
        o.zero_grad()
    loss.backward()
    for o in optimizers:
        o.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
