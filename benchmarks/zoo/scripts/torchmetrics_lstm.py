"""torchmetrics: metrics as modules beside a recurrent network over packed sequences.

library: torchmetrics
"""

import _torchvision  # noqa: F401
import torch
import torch.nn.functional as F
from _digest import finish
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torchmetrics.classification import MulticlassAccuracy

torch.manual_seed(0)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 32, num_layers=2, dropout=0.1)
        self.head = nn.Linear(32, 4)
        self.accuracy = MulticlassAccuracy(4)

    def forward(self, packed, targets):
        logits = self.head(self.rnn(packed)[1][0][-1])
        self.accuracy.update(logits, targets)
        return F.cross_entropy(logits, targets)


model = Reader()
optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
losses = []
for _ in range(50):
    targets = torch.randint(0, 4, (16,))
    lengths = torch.randint(4, 12, (16,)).tolist()
    series = [torch.randn(n, 8) + torch.eye(8)[int(t)] for n, t in zip(lengths, targets, strict=True)]
    loss = model(pack_sequence(series, enforce_sorted=False), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish([*losses, model.accuracy.compute()], model)
