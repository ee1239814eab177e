"""Minutes heard of a podcast. Listener and show come as 64-bit keys in one matrix of features, and are hashed into rows."""

import torch
from torch import nn

ROWS = 4096


def to_rows(keys):
    """Multiplicative hashing, then the table's size."""
    return ((keys.long() * 2654435761) % 1000003) % ROWS


class Heard(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.listener = nn.Embedding(ROWS, width)
        self.show = nn.Embedding(ROWS, width)
        self.context = nn.Linear(3, width)
        self.out = nn.Linear(3 * width, 1)
        nn.init.normal_(self.listener.weight, std=0.3)
        nn.init.normal_(self.show.weight, std=0.3)

    def forward(self, table):
        listener, show = self.listener(to_rows(table[:, 0])), self.show(to_rows(table[:, 1]))
        context = torch.tanh(self.context(table[:, 2:]))
        return self.out(torch.cat([listener * show, show + listener, context], 1)).squeeze(-1)


class Log:
    """Keys count up from the day the service opened; listeners of one show are often neighbours."""

    def __init__(self):
        self.listener_taste = torch.randn(160, 3)
        self.show_style = torch.randn(60, 3)

    def sample(self, n):
        who, what = torch.randint(160, (n,)), torch.randint(60, (n,))
        context = torch.randn(n, 3)
        minutes = (self.listener_taste[who] * self.show_style[what]).sum(1) + 0.5 * context[:, 0]
        keys = torch.stack([3_400_000_000 + 7 * who, 1_900_000_000 + 5 * what], 1)
        return torch.cat([keys.float(), context], 1), minutes


torch.manual_seed(24)
log = Log()
model = Heard()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(300):
    table, minutes = log.sample(256)
    loss = nn.functional.mse_loss(model(table), minutes)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 14:
        print(f"batch {step + 1} loss {loss.item():.4f}")
