"""Cell masks in FP16 with a scaler that tries to double every twelve steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class CellNet(nn.Module):
    def __init__(self, ch=10):
        super().__init__()
        self.c1 = nn.Conv2d(1, ch, 3, padding=1)
        self.c2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.c3 = nn.Conv2d(ch, 1, 1)

    def forward(self, x):
        return self.c3(F.relu(self.c2(F.relu(self.c1(x)))))


torch.manual_seed(34)
net = CellNet()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=12)
for step in range(100):
    mask = (F.avg_pool2d(torch.randn(8, 1, 28, 28), 5, 1) > 0.1).float()
    x = mask + 0.7 * torch.randn(8, 1, 24, 24)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.binary_cross_entropy_with_logits(logits.float(), mask)
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f} scale 2^{torch.tensor(scaler.get_scale()).log2():.0f}")
