"""FP16, a scaler, and gradients of four micro-batches: divided by four, unscaled once, clipped, and the odd rest stepped too."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Highway(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gate, self.change = nn.Linear(dim, dim), nn.Linear(dim, dim)
        nn.init.constant_(self.gate.bias, -2.0)

    def forward(self, x):
        g = torch.sigmoid(self.gate(x))
        return g * F.relu(self.change(x)) + (1 - g) * x


class SpeechCommands(nn.Module):
    def __init__(self, bins=20, classes=6):
        super().__init__()
        self.front = nn.Conv1d(bins, 32, 5, padding=2)
        self.highway = nn.Sequential(Highway(32), Highway(32))
        self.out = nn.Linear(32, classes)

    def forward(self, x):
        x = F.relu(self.front(x)).mean(-1)
        return self.out(self.highway(x))


def utterances(n, bins=20, frames=30):
    template = torch.randn(6, bins, 1)
    label = torch.randint(6, (n,))
    loud = 0.5 + torch.rand(n, 1, 1)
    x = loud * template[label] + torch.randn(n, bins, frames)
    return TensorDataset(x, torch.where(torch.rand(n) < 0.2, torch.randint(6, (n,)), label))


def main(accumulation_steps=4, epochs=5):
    torch.manual_seed(630)
    loader = DataLoader(utterances(704), batch_size=8, shuffle=True)  # 88 micro-batches
    model = SpeechCommands()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    running, seen = 0.0, 0
    for epoch in range(epochs):
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y) / accumulation_steps
            scaler.scale(loss).backward()
            running, seen = running + loss.item() * accumulation_steps, seen + 1
            if (i + 1) % accumulation_steps == 0 or i + 1 == len(loader):
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                if (i + 1) % 16 == 0:
                    print(f"epoch {epoch} batch {i + 1} loss {running / seen:.4f}")
                    running, seen = 0.0, 0


main()
