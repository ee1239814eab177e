"""CNN in FP16 autocast: the scaler starts far too high and finds its place in the first steps."""

import torch
from torch import nn


def block(cin, cout, stride):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = block(3, 8, 1)
        self.stages = nn.Sequential(block(8, 16, 2), block(16, 32, 2))
        self.fc = nn.Linear(32, 5)

    def forward(self, x):
        return self.fc(self.stages(self.stem(x)).mean((2, 3)))


def main():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19)
    means = torch.randn(5, 3, 1, 1)
    for step in range(24):
        y = torch.randint(5, (16,))
        x = means[y] + torch.randn(16, 3, 12, 12)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 4 == 0:
            print(f"step {step}: loss {loss.item():.3f}, scale {scaler.get_scale():g}")


main()
