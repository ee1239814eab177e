"""Customer churn from tabular features: a plain multilayer perceptron, written as in the course notes."""

import torch
import torch.nn as nn

torch.manual_seed(90)
N, FEATURES, HIDDEN, DEPTH = 2048, 12, 64, 6

x = torch.randn(N, FEATURES)
w1, w2 = torch.randn(FEATURES), torch.randn(FEATURES)
churned = ((x @ w1).relu() + (x @ w2).abs() > 3).float()[:, None]
train_x, train_y, val_x, val_y = x[:1600], churned[:1600], x[1600:], churned[1600:]


class ChurnNet(nn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        size = FEATURES
        for _ in range(DEPTH):
            layers += [nn.Linear(size, HIDDEN), nn.Sigmoid()]
            size = HIDDEN
        self.hidden = nn.Sequential(*layers)
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        return self.out(self.hidden(x))


net = ChurnNet()
criterion = nn.BCEWithLogitsLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

for epoch in range(16):
    net.train()
    for idx in torch.randperm(len(train_x)).split(64):
        optimizer.zero_grad()
        loss = criterion(net(train_x[idx]), train_y[idx])
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        logits = net(val_x)
        acc = ((logits > 0) == (val_y > 0.5)).float().mean().item()
        print(f"epoch {epoch:2d} val loss {criterion(logits, val_y).item():.4f} acc {acc:.3f}")
