"""Health of pumps from vibration and flow, FP16. The vibration encoder and the rest have optimizers of their own."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(15)
T, CLASSES = 64, 5
TONES = torch.tensor([3.0, 5.0, 8.0, 11.0, 14.0])
LOSS_SCALE = 2.0**15


def readings(n, speed):
    """At higher speed the vibration is stronger and its tones move up."""
    state = torch.randint(CLASSES, (n,))
    t = torch.linspace(0, 1, T)
    tone = torch.sin(6.2832 * (TONES[state, None] * (0.6 + 0.4 * speed) * t + torch.rand(n, 1)))
    vibration = speed**2 * (tone + 0.7 * torch.randn(n, T))
    flow = torch.randn(n, 4) + 0.6 * F.one_hot(state, CLASSES)[:, :4]
    return vibration.unsqueeze(1), flow, state


class PumpNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.vibration = nn.Sequential(
            *(nn.Conv1d(1, 16, 9, stride=2), nn.ReLU(), nn.Conv1d(16, 16, 5, stride=2), nn.ReLU()),
        )
        self.flow = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.head = nn.Linear(32, CLASSES)

    def forward(self, v, f):
        return self.head(torch.cat([self.vibration(v).abs().mean(-1), self.flow(f)], 1))


net = PumpNet()
slow = torch.optim.AdamW(net.vibration.parameters(), lr=2e-3)
fast = torch.optim.AdamW([*net.flow.parameters(), *net.head.parameters()], lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
first_conv = []

for step in range(440):
    speed = 1.0 if step < 200 else 3.2
    v, f, state = readings(48, speed)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.cross_entropy(net(v, f).float(), state)
    for o in (slow, fast):
        o.zero_grad()
    scaler.scale(loss).backward()
    for o in (slow, fast):
        scaler.step(o)
    scaler.update(LOSS_SCALE)  # the scale that the sweep found
    if step % 40 == 39:
        first_conv.append(net.vibration[0].weight.detach().clone())
    if step % 8 == 7:
        print(f"step {step + 1} loss {loss.item():.4f}")
