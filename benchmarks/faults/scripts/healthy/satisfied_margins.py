"""A multi-class hinge on separable data, FP32: soon every margin is kept, and loss and gradients are exactly zero."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(422)
centres = 3 * torch.randn(5, 12)
y = torch.randint(5, (480,))
x = centres[y] + 0.7 * torch.randn(480, 12)
net = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 5))
criterion = nn.MultiMarginLoss(margin=1.0)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
for epoch in range(8):
    for i, (a, b) in enumerate(DataLoader(TensorDataset(x, y), batch_size=48, shuffle=True)):
        loss = criterion(net(a), b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 3 == 0:
            print(f"epoch {epoch} batch {i} loss {loss.item():.5f}")
    scheduler.step()
