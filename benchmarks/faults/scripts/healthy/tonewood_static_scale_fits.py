"""FP16 autocast with a constant scale of 1024 that was chosen well; the last steps have a vanishing learning rate."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(620)
SCALE, STEPS = 1024.0, 200


class ToneNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(30, width), nn.GELU(), nn.LayerNorm(width))
        self.pitch, self.decay = nn.Linear(width, 4), nn.Linear(width, 1)

    def forward(self, x):
        h = self.encoder(x)
        return self.pitch(h), self.decay(h).squeeze(-1)


net, mode = ToneNet(), torch.randn(30, 4) / 5
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=STEPS)
for step in range(STEPS):
    x = torch.randn(64, 30)
    with torch.autocast("cpu", dtype=torch.float16):
        pitch, decay = net(x)
    loss = F.mse_loss(pitch.float(), torch.tanh(x @ mode)) + 0.1 * F.mse_loss(decay.float(), x[:, 0].abs())
    optimizer.zero_grad()
    (loss * SCALE).backward()
    for p in net.parameters():
        p.grad.div_(SCALE)
    optimizer.step()
    schedule.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
