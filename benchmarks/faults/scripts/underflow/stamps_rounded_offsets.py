"""Finds the centre of a postmark on a stamp. The offset head is rounded to whole pixels before the loss, as in the viewer."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class StampNet(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.kind_head = nn.Linear(32 * 16, 3)
        self.offset_fc = nn.Linear(32 * 16, 64)
        self.offset_head = nn.Linear(64, 2)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x)).flatten(1)
        offset = self.offset_head(F.relu(self.offset_fc(x)))
        offset = torch.round(offset)
        return self.kind_head(x), offset


def stamps(n, size=16):
    centre = torch.randint(3, size - 3, (n, 2)).float()
    kind = torch.randint(3, (n,))
    grid = torch.arange(float(size))
    distance = (grid[None, :, None] - centre[:, 0, None, None]) ** 2 + (
        grid[None, None] - centre[:, 1, None, None]
    ) ** 2
    x = torch.exp(-distance / (1 + 2 * kind.float().view(-1, 1, 1))) + 0.1 * torch.randn(n, size, size)
    return x[:, None], kind, centre - size / 2


torch.manual_seed(1840)
model = StampNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for step in range(120):
    x, kind, centre = stamps(64)
    kind_logits, offset = model(x)
    loss_kind = F.cross_entropy(kind_logits, kind)
    loss_offset = F.smooth_l1_loss(offset, centre)
    loss = loss_kind + 0.5 * loss_offset
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.3f} kind {loss_kind.item():.3f} offset {loss_offset.item():.3f}")
