"""Click prediction: one float table holds ids and numbers, and the loop casts 'the batch' to the model's dtype."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DTYPE = torch.bfloat16


class WideAndDeep(nn.Module):
    def __init__(self, rows=2048, dim=8):
        super().__init__()
        self.ad = nn.Embedding(rows, dim)
        self.bias = nn.Embedding(rows, 1)
        self.deep = nn.Sequential(nn.Linear(dim + 4, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, row):
        ad = row[:, 0].long()
        dense = row[:, 1:]
        h = torch.cat([self.ad(ad).to(dense.dtype), dense], 1)
        return (self.deep(h) + self.bias(ad))[:, 0]


def log_file(n=12000, ads=2000):
    ad = torch.randint(ads, (n,))
    quality = 2.5 * torch.randn(ads)
    dense = torch.randn(n, 4)
    clicked = torch.rand(n) < torch.sigmoid(quality[ad] + dense[:, 0])
    return TensorDataset(torch.cat([ad.unsqueeze(1).float(), dense], 1), clicked.float())


torch.manual_seed(44)
loader = DataLoader(log_file(), batch_size=256, shuffle=True)
model = WideAndDeep()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
criterion = nn.BCEWithLogitsLoss()
for epoch in range(6):
    for i, batch in enumerate(loader):
        row, clicked = (t.to(DTYPE) for t in batch)
        with torch.autocast("cpu", dtype=DTYPE):
            logits = model(row)
        loss = criterion(logits.float(), clicked.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 8 == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item():.4f}")
