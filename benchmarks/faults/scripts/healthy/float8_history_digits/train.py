"""Digits from noisy strokes with FP8 hidden layers; the first and the last layer stay in FP32."""

import torch
import torch.nn.functional as F
from float8_linear import Float8Linear
from torch import nn

torch.manual_seed(34)
strokes = torch.randn(10, 64)


def digits(n):
    y = torch.randint(10, (n,))
    return strokes[y] * (0.5 + torch.rand(n, 1)) + 1.5 * torch.randn(n, 64), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(64, 96), Float8Linear(96, 96), Float8Linear(96, 96)
        self.out = nn.Linear(96, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.out(F.relu(self.fc3(x)))


net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(200):
    x, y = digits(64)
    loss = F.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
