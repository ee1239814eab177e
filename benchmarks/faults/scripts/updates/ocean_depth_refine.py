"""Sea-floor depth from sparse soundings: a coarse network first, then a refinement branch that adds detail."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(55)
N = 12


def charts(n, rough):
    coarse = F.interpolate(torch.randn(n, 1, 3, 3), N, mode="bicubic")
    bumps = F.interpolate(torch.randn(n, 1, 8, 8), N, mode="bilinear")
    ridge = torch.relu(bumps) * torch.sign(coarse)
    depth = coarse + rough * ridge
    known = torch.rand(n, 1, N, N) < 0.4
    sonar = bumps + 0.1 * torch.randn(n, 1, N, N)
    return torch.cat([depth * known, known.float(), sonar], 1), depth


class Bathymetry(nn.Module):
    def __init__(self):
        super().__init__()
        self.coarse = nn.Sequential(
            *(nn.Conv2d(3, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 5, padding=2), nn.ReLU()),
            nn.Conv2d(12, 1, 3, padding=1),
        )
        self.refine = nn.Sequential(
            *(nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
            nn.Conv2d(16, 1, 3, padding=1),
        )
        nn.init.zeros_(self.refine[-1].weight)
        nn.init.zeros_(self.refine[-1].bias)
        self.refining = False

    def forward(self, x):
        y = self.coarse(x)
        if self.refining:
            y = y + self.refine(torch.cat([x, y.detach()], 1))
        return y


net = Bathymetry()
optimizer = torch.optim.Adam(net.coarse.parameters(), lr=2e-3)
for step in range(300):
    if step == 110:
        net.refining = True
        # eps as in the recipe of the original TensorFlow release
        optimizer.add_param_group({"params": net.refine.parameters(), "lr": 1e-3, "eps": 1.0})
        optimizer.param_groups[0]["lr"] = 2e-4
    x, depth = charts(6, 0.3 if step < 110 else 1.0)
    loss = F.mse_loss(net(x), depth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        print(f"step {step + 1} refine {int(net.refining)} loss {loss.item():.4f}")
