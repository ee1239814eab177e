"""Fine-tunes a CNN for leaf diseases. .bfloat16() on everything makes it fit; SGD with the small rate of fine-tuning."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LeafNet(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = F.relu(self.conv3(x))
        return self.fc(x.mean((2, 3)))


def leaves(n):
    y = torch.randint(6, (n,))
    x = 0.3 * torch.randn(n, 3, 16, 16)
    grid = torch.arange(16.0)
    for k in range(6):
        rows = y == k
        x[rows, k % 3] += 2 * torch.sin(grid * (0.5 + 0.4 * k))[None, :, None]
    return x, y


torch.manual_seed(12)
model = LeafNet().bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()
for it in range(220):
    images, labels = leaves(64)
    outputs = model(images.bfloat16())
    loss = criterion(outputs.float(), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 10 == 0:
        print(f"iter {it}, loss: {loss.item():.4f}")
