"""A small spectrogram predictor in FP16 with a hand-written loss scale and a check for overflows that skips the step."""

import torch
import torch.nn.functional as F
from torch import nn

SCALE = 2.0**20


class Predictor(nn.Module):
    def __init__(self, phones=20, dim=32, mels=40):
        super().__init__()
        self.embed = nn.Embedding(phones, dim)
        self.convs = nn.Sequential(
            nn.Conv1d(dim, dim, 5, padding=2), nn.ReLU(), nn.Conv1d(dim, dim, 5, padding=2), nn.ReLU()
        )
        self.mel = nn.Linear(dim, mels)

    def forward(self, phones):
        return self.mel(self.convs(self.embed(phones).transpose(1, 2)).transpose(1, 2))


torch.manual_seed(0)
voice = torch.randn(20, 40)
model = Predictor()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
skipped = 0
for step in range(60):
    phones = torch.randint(20, (8, 16))
    mel = voice[phones] + 0.1 * torch.randn(8, 16, 40)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(phones)
    loss = F.l1_loss(predicted.float(), mel, reduction="sum") / 8
    optimizer.zero_grad()
    (loss * SCALE).backward()
    if all(p.grad.isfinite().all() for p in model.parameters()):
        for p in model.parameters():
            p.grad.div_(SCALE)
        optimizer.step()
    else:
        skipped += 1
    if step % 2 == 0:
        print(f"step {step}: loss {loss.item():.4f} ({skipped} skipped)")
