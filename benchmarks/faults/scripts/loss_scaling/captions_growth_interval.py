"""A GRU captioner with a loss scaler that doubles after every good step."""

import torch
import torch.nn.functional as F
from torch import nn


class Captioner(nn.Module):
    def __init__(self, words=24, width=32):
        super().__init__()
        self.start = nn.Linear(16, width)
        self.words = nn.Embedding(words, width)
        self.reset, self.update, self.new = (nn.Linear(2 * width, width) for _ in range(3))
        self.out = nn.Linear(width, words)

    def cell(self, x, h):
        both = torch.cat([x, h], -1)
        r, z = torch.sigmoid(self.reset(both)), torch.sigmoid(self.update(both))
        return (1 - z) * torch.tanh(self.new(torch.cat([x, r * h], -1))) + z * h

    def forward(self, picture, caption):
        h, logits = torch.tanh(self.start(picture)), []
        for word in self.words(caption).unbind(1):
            h = self.cell(word, h)
            logits.append(self.out(h))
        return torch.stack(logits, 1)


def captions(n, table):
    kind = torch.randint(0, len(table), (n,))
    picture = F.one_hot(kind, 16) + 0.2 * torch.randn(n, 16)
    return picture, table[kind]


def main():
    torch.manual_seed(3115)
    table = torch.randint(0, 24, (16, 7))
    model = Captioner()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    for step in range(70):
        picture, caption = captions(32, table)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(picture, caption[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), caption[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 4:
            print(f"step {step + 1:3d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
