"""The same training with its calls in the usual order."""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
x = torch.randn(64, 8)
for _ in range(12):
    loss = (model(x) - x[:, :1]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
