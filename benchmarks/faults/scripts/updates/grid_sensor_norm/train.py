"""Frequency of a power grid from two kinds of sensors. The second half has the loads of winter."""

import torch
import torch.nn.functional as F

from layers import GridNet

torch.manual_seed(11)
effect = torch.randn(12, 2) / 2


def minutes(n, winter):
    phasors, stress = torch.randn(n, 6), torch.randn(n, 6)
    z = torch.cat([phasors, stress], 1) @ effect
    y = torch.sin(0.7 * z[:, 0]) + 0.5 * torch.tanh(z[:, 1])
    loads = 20.0 + 40.0 * winter + (1.0 + winter) * stress
    return phasors, loads, y


net = GridNet()
net.load_scaler.to(torch.bfloat16)  # buffers only
net.load_scaler.mean.fill_(20.0)
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for step in range(500):
    phasors, loads, y = minutes(64, winter=float(step >= 180))
    loss = F.mse_loss(net(phasors, loads), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
