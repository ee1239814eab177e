"""Handwriting recognition: lines too short for their text are dropped by zero_infinity=True."""

import torch
from torch import nn


class LineReader(nn.Module):
    def __init__(self, symbols=15):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 8, 3, (2, 2), 1), nn.ReLU(), nn.Conv2d(8, 16, 3, (2, 1), 1), nn.ReLU())
        self.gru = nn.GRU(16 * 4, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, symbols)

    def forward(self, lines):
        x = self.cnn(lines).flatten(1, 2).transpose(1, 2)
        return self.head(self.gru(x)[0]).log_softmax(-1).transpose(0, 1)


torch.manual_seed(0)
reader = LineReader()
ctc = nn.CTCLoss(zero_infinity=True)
optimizer = torch.optim.Adam(reader.parameters(), lr=1e-3)
for step in range(12):
    lines = torch.rand(4, 1, 16, 40)
    letters = torch.tensor([4, 9, 25, 6]) if step % 3 == 1 else torch.tensor([4, 9, 7, 6])  # 20 columns at most
    text = torch.randint(1, 15, (int(letters.sum()),))
    loss = ctc(reader(lines), text, torch.full((4,), 20), letters)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, round(loss.item(), 3))
