"""Reads till receipts line by line: small CNN over columns, BiGRU, CTC. Lines are bucketed by width."""

import random

import torch
from torch import nn

random.seed(5)
torch.manual_seed(5)
CHARS = 12
GLYPHS = torch.randn(CHARS, 8, 6)  # height 8, width 6


def line():
    chars = [random.randrange(CHARS) for _ in range(random.randint(3, 9))]
    squeeze = random.choice((1, 1, 1, 1, 2)) if len(chars) < 9 else 1
    image = torch.cat([GLYPHS[c] for c in chars], 1)[:, ::squeeze]
    if random.random() < 0.004:
        image = image[:, : max(image.shape[1] // 3, 8)]  # torn off
    return image + 0.1 * torch.randn_like(image), torch.tensor(chars) + 1


class Reader(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.columns = nn.Sequential(
            nn.Conv1d(8, width, 5, stride=2, padding=2), nn.ReLU(), nn.Conv1d(width, width, 3, padding=1)
        )
        self.rnn = nn.GRU(width, width // 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(width, CHARS + 1)

    def forward(self, images):
        h = self.columns(images).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.out(h).log_softmax(-1)


def collate(items):
    widths = [x.shape[1] for x, _ in items]
    batch = torch.zeros(len(items), 8, max(widths))
    for row, (x, _) in zip(batch, items):
        row[:, : x.shape[1]] = x
    targets = torch.cat([y for _, y in items])
    return batch, targets, torch.tensor([(w + 1) // 2 for w in widths]), torch.tensor([len(y) for _, y in items])


reader = Reader()
criterion = nn.CTCLoss()
optimizer = torch.optim.Adam(reader.parameters(), lr=3e-3)
pool = sorted((line() for _ in range(1400)), key=lambda p: p[0].shape[1])
batches = [pool[i : i + 16] for i in range(0, len(pool), 16)]
random.shuffle(batches)
for i, items in enumerate(batches):
    images, targets, frames, lengths = collate(items)
    loss = criterion(reader(images).transpose(0, 1), targets, frames, lengths)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 10 == 0:
        print(f"batch {i} loss {loss.item():.3f}")
