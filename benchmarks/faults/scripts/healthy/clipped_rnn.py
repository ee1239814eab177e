"""A plain tanh RNN with an orthogonal start, whose gradients explode now and then and are clipped to 0.5."""

import torch
import torch.nn.functional as F
from torch import nn


class Adder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.rnn, self.out = nn.RNN(2, width, batch_first=True), nn.Linear(width, 1)
        nn.init.orthogonal_(self.rnn.weight_hh_l0, gain=1.3)

    def forward(self, x):
        return self.out(self.rnn(x)[1][0]).squeeze(1)


def sums(n, length=20):
    value = torch.rand(n, length)
    marks = torch.zeros(n, length)
    marks[:, -6:] = (torch.rand(n, 6) < 0.5).to(value.dtype)
    return torch.stack([value, marks], 2), (value * marks).sum(1)


torch.manual_seed(3217)
model = Adder()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(80):
    x, y = sums(64)
    loss = F.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} norm {norm:.2f} loss {loss.item():.4f}")
