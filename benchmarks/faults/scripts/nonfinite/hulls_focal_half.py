"""Ships or clouds? A focal loss in FP16. Batches whose loss or gradient is not finite are skipped."""

import torch
import torch.nn as nn
import torch.nn.functional as F

DTYPE = torch.float16


class HullNet(nn.Module):
    def __init__(self, bands=6, hidden=64, classes=3):
        super().__init__()
        self.fc1 = nn.Linear(bands, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.classifier(F.relu(self.fc2(F.relu(self.fc1(x)))))


def focal_loss(logits, target, gamma=0.5):
    p = logits.softmax(-1).gather(1, target[:, None]).squeeze(1)
    return -((1 - p + 1e-3) ** gamma) * torch.log(p + 1e-8)


def pixels(n):
    y = torch.where(torch.rand(n) < 0.85, 0, torch.randint(1, 3, (n,)))
    x = 0.8 * torch.randn(n, 6)
    x[:, 0] += y.eq(1) * 2.0
    x[:, 1] += y.eq(2) * 2.0
    return 100 * x, y  # digital numbers


torch.manual_seed(17)
model = HullNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
valid_x, valid_y = pixels(1000)
skipped = 0
for step in range(240):
    if step % 10 == 0:
        with torch.no_grad():
            rare = valid_y > 0
            missed = F.cross_entropy(model(valid_x)[rare], valid_y[rare])
        print(f"step {step} skipped {skipped} rare_loss {missed.item():.4f}")
    x, y = pixels(16)
    with torch.autocast("cpu", dtype=DTYPE):
        logits = model(x).to(DTYPE)
    loss = focal_loss(logits, y).float().mean()
    if not torch.isfinite(loss):
        skipped += 1
        continue
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    if not torch.isfinite(norm):
        skipped += 1
        continue
    optimizer.step()
