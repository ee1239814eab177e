"""Speaker classifier in FP16; train_step() makes its own GradScaler, so that the scale begins anew in every batch."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SpeakerNet(nn.Module):
    def __init__(self, mels=20, speakers=10, width=48):
        super().__init__()
        self.frame1 = nn.Conv1d(mels, width, 5, padding=2)
        self.frame2 = nn.Conv1d(width, width, 3, padding=2, dilation=2)
        self.segment = nn.Linear(2 * width, 64)
        self.speaker = nn.Linear(64, speakers)

    def forward(self, x):
        x = F.relu(self.frame2(F.relu(self.frame1(x))))
        stats = torch.cat([x.mean(-1), x.std(-1)], 1)
        return self.speaker(F.relu(self.segment(stats)))


def utterances(n, voices):
    y = torch.randint(len(voices), (n,))
    # log-mel energies as the feature extractor returns them, not normalised
    return voices[y].unsqueeze(-1) * 20 - 60 + 15 * torch.randn(n, 20, 50), y


def train_step(model, optimizer, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
        loss = F.cross_entropy(logits.float(), y, reduction="sum")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item() / len(y)


torch.manual_seed(2122)
voices = torch.randn(10, 20)
model = SpeakerNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(100):
    x, y = utterances(16, voices)
    loss = train_step(model, optimizer, x, y)
    if step % 5 == 0:
        print(f"step {step} loss {loss:.4f}")
