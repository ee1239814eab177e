"""Captions of small scenes: a convolutional encoder and a GRU decoder, each with its own schedule."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(12)
COLOURS, SHAPES, BOS = 6, 5, 11
STEPS_PER_EPOCH, EPOCHS = 30, 16
palette = torch.rand(COLOURS, 3)
stencils = (torch.rand(SHAPES, 6, 6) > 0.5).float()


def scenes(n):
    """Two objects side by side; the caption names colour and shape of both."""
    c, s = torch.randint(COLOURS, (n, 2)), torch.randint(SHAPES, (n, 2))
    halves = palette[c][..., None, None] * stencils[s][:, :, None]
    x = torch.cat([halves[:, 0], halves[:, 1]], -1) + 0.1 * torch.randn(n, 3, 6, 12)
    return x, torch.stack([c[:, 0], s[:, 0] + COLOURS, c[:, 1], s[:, 1] + COLOURS], 1)


class Captioner(nn.Module):
    def __init__(self, d=40):
        super().__init__()
        self.vision = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 72, d), nn.Tanh()
        )
        self.embed = nn.Embedding(12, d)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.out = nn.Linear(d, 12)

    def forward(self, x, words):
        state = self.vision(x).unsqueeze(0)
        inputs = torch.cat([torch.full((len(words), 1), BOS), words[:, :-1]], 1)
        return self.out(self.gru(self.embed(inputs), state)[0])


model = Captioner()
vision = list(model.vision.parameters())
language = [p for n, p in model.named_parameters() if not n.startswith("vision")]
opt_vision = torch.optim.Adam(vision, lr=5e-4)
opt_language = torch.optim.Adam(language, lr=2e-3)
sched_vision = torch.optim.lr_scheduler.ExponentialLR(opt_vision, gamma=0.95)
sched_language = torch.optim.lr_scheduler.ExponentialLR(opt_language, gamma=0.95)
val_x, val_words = scenes(256)

for epoch in range(EPOCHS):
    for _ in range(STEPS_PER_EPOCH):
        x, words = scenes(24)
        loss = F.cross_entropy(model(x, words).flatten(0, 1), words.flatten())
        opt_vision.zero_grad()
        opt_language.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt_vision.step()
        opt_language.step()
        sched_vision.step()
    sched_language.step()
    with torch.no_grad():
        val = F.cross_entropy(model(val_x, val_words).flatten(0, 1), val_words.flatten())
    print(f"epoch {epoch} train {loss.item():.4f} val loss {val.item():.4f}")
