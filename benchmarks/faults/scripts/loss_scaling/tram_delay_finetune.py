"""Tram delays: pretrained on all lines, then tuned on one of them, in half precision with loss scaling."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(40)
LINES, D = 30, 40
line_effect, w = torch.randn(LINES), torch.randn(10)


def trips(n, line=None):
    numbers = torch.randint(LINES, (n,)) if line is None else torch.full((n,), line)
    x = torch.randn(n, 10)
    slope = 1.0 if line is None else -0.7
    delay = line_effect[numbers] + slope * torch.tanh(x @ w / 2) + 0.5 * x[:, 0] * x[:, 1]
    return numbers, x, delay


class Delay(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Embedding(LINES, 16)
        self.inp = nn.Linear(26, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.out = nn.Linear(D, 1)

    def forward(self, line, x):
        h = self.inp(torch.cat([self.line(line), x], 1))
        for norm, layer in zip(self.norms, self.layers):
            h = h + F.gelu(layer(norm(h)))
        return self.out(h).squeeze(1)


class Trainer:
    def __init__(self, model, lr, max_norm=None):
        self.model, self.max_norm = model, max_norm
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13, growth_interval=500)

    def step(self, line, x, delay):
        with torch.autocast("cpu", torch.float16):
            predicted = self.model(line, x)
        loss = F.mse_loss(predicted.float(), delay)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()

    def fit(self, name, steps, **which):
        for step in range(steps):
            loss = self.step(*trips(96, **which))
            if step % 20 == 19:
                print(f"{name} step {step} loss {loss:.4f}")


model = Delay()
Trainer(model, 0.03).fit("all lines", 200)
Trainer(model, 0.01, max_norm=1.0).fit("line 7", 400, line=7)
