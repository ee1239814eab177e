"""Digits of water meters by CTC: the first losses are large, then everything is blank, then it learns."""

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self, digits=6, width=32):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(10, width, 5, padding=2), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1))
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * width, digits + 1)

    def forward(self, strip):
        h, _ = self.rnn(torch.relu(self.conv(strip)).transpose(1, 2))
        return self.out(h).log_softmax(-1)


def strips(n, glyphs, digits=4, frames=32):
    label = torch.randint(6, (n, digits))
    image = 0.3 * torch.randn(n, 10, frames)
    for i in range(n):
        for d in range(digits):
            at = 8 * d + int(torch.randint(4, (1,)))
            image[i, :, at : at + 4] += glyphs[label[i, d]]
    return image, label


torch.manual_seed(120)
glyphs = torch.randn(6, 10, 4)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
ctc = nn.CTCLoss(blank=6, zero_infinity=True)
for step in range(110):
    image, label = strips(16, glyphs)
    log_probs = model(image).transpose(0, 1)
    loss = ctc(log_probs, label, torch.full((16,), 32), torch.full((16,), 4))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step} loss {loss.item():.4f}")
