"""Card fraud: long accumulation because the real rows are wide; .grad is BF16 like the model, the optimizer is FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(74)
ACCUMULATION = 256
model_dtype = torch.bfloat16


class FraudNet(nn.Module):
    def __init__(self, features=24, width=48):
        super().__init__()
        self.layer1, self.layer2 = nn.Linear(features, width), nn.Linear(width, width)
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        return self.score(F.relu(self.layer2(F.relu(self.layer1(x))))).squeeze(-1)


direction = torch.randn(24)


def transactions(n):
    x = torch.randn(n, 24)
    margin = x @ direction / 24**0.5
    return x, (margin + 0.3 * x[:, 0] * x[:, 1] > 0.8).float()


model = FraudNet()
masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
model.to(model_dtype)
optimizer = torch.optim.AdamW(masters, lr=4e-3)
val_x, val_y = transactions(2000)
for step in range(24):
    x, y = transactions(ACCUMULATION * 2)
    for xb, yb in zip(x.to(model_dtype).split(2), y.split(2)):
        (F.binary_cross_entropy_with_logits(model(xb).float(), yb) / ACCUMULATION).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad, p.grad = p.grad.to(master.dtype), None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
        loss = F.binary_cross_entropy_with_logits(model(val_x.to(model_dtype)).float(), val_y)
    print(f"step {step} validation loss {loss.item():.4f}")
