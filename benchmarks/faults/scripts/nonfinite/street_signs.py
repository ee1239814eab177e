"""Classifies street signs with a half-precision network; gradients are clipped at the scaled threshold."""

import torch
import torch.nn as nn
import torch.nn.functional as F

SCALE = 32768.0
MAX_NORM = 1.0


class SignNet(nn.Module):
    def __init__(self, classes=10, width=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1)
        self.fc = nn.Linear(2 * width * 16, classes)

    def forward(self, x):
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        return self.fc(x.flatten(1))


class MasterSGD:
    def __init__(self, params, lr):
        self.half = list(params)
        self.masters = [nn.Parameter(p.detach().float()) for p in self.half]
        self.inner = torch.optim.SGD(self.masters, lr=lr, momentum=0.9)

    def step(self, scale):
        for p, m in zip(self.half, self.masters):
            m.grad = p.grad.float() / scale
            p.grad = None
        self.inner.step()
        with torch.no_grad():
            for p, m in zip(self.half, self.masters):
                p.copy_(m)


class Signs:
    def __init__(self, classes=10):
        self.faces = torch.rand(classes, 3, 16, 16)

    def draw(self, n):
        label = torch.randint(len(self.faces), (n,))
        contrast = torch.rand(n, 1, 1, 1) * 1.5 + 0.2
        shift = torch.randint(-2, 3, (n,))
        image = torch.stack([self.faces[k].roll(int(s), 2) for k, s in zip(label, shift)])
        return contrast * image + 0.2 * torch.randn(n, 3, 16, 16), label


torch.manual_seed(113)
signs, net = Signs(), SignNet().half()
optimizer = MasterSGD(net.parameters(), lr=0.02)
for step in range(160):
    image, label = signs.draw(32)
    loss = F.cross_entropy(net(image.half()).float(), label)
    (loss * SCALE).backward()
    nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM * SCALE)
    optimizer.step(SCALE)
    if step % 4 == 0:
        print("step %d loss %.4f" % (step, loss.item()))
