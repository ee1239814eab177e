"""Plain gradient descent with a rate above the edge of stability: the loss shoots up for some steps, and falls then for good."""

import torch
from torch import nn

torch.manual_seed(425)
x = torch.randn(128, 10)
y = x[:, :1] * 0.5 + 0.2 * x[:, 1:2]


class TwoLayer(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.inner = nn.Linear(10, width, bias=False)
        self.outer = nn.Linear(width, 1, bias=False)
        nn.init.normal_(self.inner.weight, std=1.0)
        nn.init.normal_(self.outer.weight, std=1.0)
        self.width = width

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x))) / self.width**0.5


model = TwoLayer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.53)
for epoch in range(100):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.5f}")
