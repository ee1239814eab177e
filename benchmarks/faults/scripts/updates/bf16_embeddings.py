"""Item embeddings kept in BF16 to save memory; the rest of the model is FP32. Nothing is NaN, but they do not learn."""

import torch
from torch import nn


class SessionModel(nn.Module):
    def __init__(self, items=120, dim=24):
        super().__init__()
        self.items = nn.Embedding(items, dim).to(torch.bfloat16)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.score = nn.Linear(dim, items)

    def forward(self, session):
        return self.score(self.gru(self.items(session).float())[0][:, -1])


def sessions(n, items=120):
    start, stride = torch.randint(items, (n, 1)), torch.randint(1, 3, (n, 1))
    walk = (start + stride * torch.arange(7)) % items
    return walk[:, :-1], walk[:, -1]


torch.manual_seed(0)
model = SessionModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
for step in range(16):
    session, following = sessions(32)
    loss = nn.functional.cross_entropy(model(session), following)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 4 == 0:
        print(step, "loss", loss.item())
