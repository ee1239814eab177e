"""A retention-style model that reads long meter logs; its recurrent state is summed up in bfloat16."""

import torch
from torch import nn


class Retention(nn.Module):
    def __init__(self, dim, state=8, dtype=torch.bfloat16):
        super().__init__()
        self.key, self.value = nn.Linear(dim, state), nn.Linear(dim, state)
        self.state_dtype = dtype

    def forward(self, x):
        k = torch.sigmoid(self.key(x)).to(self.state_dtype)
        v = self.value(x).to(self.state_dtype)
        s = torch.zeros(len(x), k.shape[-1], v.shape[-1], dtype=self.state_dtype)
        z = torch.zeros(len(x), k.shape[-1], dtype=self.state_dtype)
        for t in range(x.shape[1]):
            s = s + k[:, t, :, None] * v[:, t, None, :]
            z = z + k[:, t]
        return s.float(), z.float()


class Meter(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.retention = Retention(dim)
        self.head = nn.Linear(64 + 8, 1)

    def forward(self, x):
        s, z = self.retention(torch.tanh(self.embed(x)))
        return self.head(torch.cat([s.flatten(1), z], 1) / 400)[:, 0]


def logs(n=8, longest=1200):
    """Meters were installed at different times; the hours before are zeros. What has each used in all?"""
    since = torch.randint(200, longest, (n, 1))
    on = (torch.rand(n, longest) < 0.7).float() * (torch.arange(longest) >= longest - since)
    watt = torch.stack([on, on * (1 + 0.1 * torch.randn(n, longest)), torch.rand(n, longest)], -1)
    return watt, on.sum(1) / 400


torch.manual_seed(13)
model = Meter()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(40):
    x, y = logs()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
