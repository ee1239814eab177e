"""Hammer prices of auction lots. To save memory prices are stored in FP16, and clamped because some came out as inf."""

import torch
import torch.nn as nn
import torch.nn.functional as F

STORE = torch.float16
LIMIT = 65504.0


class PriceNet(nn.Module):
    def __init__(self, features=12, hidden=96):
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.log_price = nn.Linear(hidden, 1)
        nn.init.constant_(self.log_price.bias, 10.5)

    def forward(self, x):
        x = F.silu(self.fc1(x))
        return self.log_price(F.silu(self.fc2(x))).squeeze(1)


def lots(n):
    x = torch.randn(n, 12)
    log_price = 10.5 + 0.9 * x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + 0.4 * x[:, 3]
    return x, log_price.exp()


torch.manual_seed(1766)
x_train, price = lots(2000)
y_train = price.clamp(max=LIMIT).to(STORE)
x_test, y_test = lots(500)
model = PriceNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for epoch in range(20):
    for idx in torch.randperm(len(x_train)).split(100):
        loss = F.smooth_l1_loss(model(x_train[idx]), y_train[idx].float().log())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        error = F.smooth_l1_loss(model(x_test), y_test.log())
    print(f"epoch {epoch} train {loss.item():.4f} test_loss {error.item():.4f}")
