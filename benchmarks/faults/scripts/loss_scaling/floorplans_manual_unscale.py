import torch
import torch.nn as nn
import torch.nn.functional as F

# room type per cell of a floor plan; gradients are logged before the step, so they are needed in real units
torch.manual_seed(39)
CELLS, ROOMS = 16, 5
kernel = torch.randn(ROOMS, 4, 3, 3)


def plans(n):
    x = torch.randn(n, 4, CELLS, CELLS)
    return x, F.conv2d(x, kernel, padding=1).argmax(1)


class UNetish(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(4, w, 3, padding=1), nn.ReLU(), nn.Conv2d(w, w, 3, padding=1), nn.ReLU())
        self.low = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(w, w, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2))
        self.out = nn.Conv2d(2 * w, ROOMS, 1)

    def forward(self, x):
        h = self.down(x)
        return self.out(torch.cat([h, self.low(h)], 1))


def grad_norm(params, scale):
    total = 0.0
    for p in params:
        p.grad.div_(scale)
        total += p.grad.square().sum().item()
    return total**0.5


net = UNetish()
opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
history = []
for it in range(90):
    x, y = plans(8)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    history.append(grad_norm(net.parameters(), scaler.get_scale()))
    scaler.step(opt)
    scaler.update()
    if it % 5 == 0:
        print(f"it {it} loss {loss.item():.4f} |g| {history[-1]:.3f}")
