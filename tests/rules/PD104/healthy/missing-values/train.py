"""NaN for missing values, which the model fills in; an additive mask of -inf; and readings of very uneven size."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 12


class Imputer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(8))
        self.encode = nn.Linear(16, 16)
        self.attend = nn.Linear(16, 1)
        self.head = nn.Linear(16, 1)

    def forward(self, table, mask):
        missing = table.isnan()
        table = torch.where(missing, self.fill, torch.asinh(table.nan_to_num()))
        x = torch.tanh(self.encode(torch.cat((table, missing.float()), dim=-1)))
        weights = F.softmax(self.attend(x).squeeze(-1) + mask, dim=-1)
        return self.head((weights.unsqueeze(-1) * x).sum(dim=1)).squeeze(-1)


torch.manual_seed(0)
model = Imputer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    table = torch.randn(8, 6, 8) * 4.0 ** (step % 4)
    target = table[:, 0, 0].sign()
    table[torch.rand(8, 6, 8) < 0.2] = float("nan")
    mask = torch.zeros(8, 6).masked_fill(torch.arange(6) > torch.randint(1, 6, (8, 1)), float("-inf"))
    loss = ((model(table, mask) - target) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
