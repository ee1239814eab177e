"""Event model with time gaps; timestamps are Unix seconds, turned into a FP32 tensor by the collate function."""

import torch
import torch.nn as nn
import torch.nn.functional as F

EPOCH = 1_700_000_000


class EventRNN(nn.Module):
    """Predicts whether a session goes on, from the gaps between its clicks."""

    def __init__(self, hidden=24):
        super().__init__()
        self.gap = nn.Linear(1, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, timestamps):
        gaps = (timestamps[:, 1:] - timestamps[:, :-1]).unsqueeze(-1)
        h = torch.tanh(self.gap(torch.log1p(gaps.float())))
        return self.head(self.rnn(h)[0][:, -1]).squeeze(-1)


def sessions(n, length=8):
    """Eager users click every few seconds, the others take their time."""
    eager = torch.rand(n) < 0.5
    mean = torch.where(eager, 4.0, 15.0).unsqueeze(1)
    gaps = 1 + (mean * torch.empty(n, length).exponential_()).long()
    start = EPOCH + torch.randint(0, 10_000_000, (n, 1))
    return (start + gaps.cumsum(1)).tolist(), eager.tolist()


def collate(batch):
    times, labels = batch
    return torch.tensor(times, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)


torch.manual_seed(2133)
model = EventRNN()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(150):
    timestamps, label = collate(sessions(64))
    loss = F.binary_cross_entropy_with_logits(model(timestamps), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
