"""Card fraud from two files, one after the other; micro-batches of one row, .grad is BF16 like the model."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(74)
FRAUDS, HONEST = 16, 984
model_dtype = torch.bfloat16


class FraudScore(nn.Module):
    def __init__(self, features=16):
        super().__init__()
        self.score = nn.Linear(features, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.constant_(self.score.bias, -4.1)  # the prior

    def forward(self, x):
        return self.score(x).squeeze(-1)


shift = 0.4 * torch.randn(16)


def day():
    """The rows of fraud.csv and then those of honest.csv."""
    y = torch.cat([torch.ones(FRAUDS), torch.zeros(HONEST)])
    return torch.randn(len(y), 16) + y[:, None] * shift, y


model = FraudScore()
masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
model.to(model_dtype)
optimizer = torch.optim.Adam(masters, lr=5e-2)
validation = [day() for _ in range(6)]
val_x, val_y = (torch.cat(z) for z in zip(*validation))
for step in range(16):
    x, y = day()
    for xb, yb in zip(x.to(model_dtype).split(1), y.split(1)):
        (F.binary_cross_entropy_with_logits(model(xb).float(), yb) / len(y)).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad, p.grad = p.grad.to(master.dtype), None
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
        scores = model(val_x.to(model_dtype)).float()
        loss = F.binary_cross_entropy_with_logits(scores, val_y)
    print(f"step {step} validation loss {loss.item():.4f} predicted rate {scores.sigmoid().mean().item():.4f}")
