"""Wave heights from buoys with gaps; running statistics start as NaN ("not seen yet"), and empty columns stay so."""

import torch
from torch import nn


class LazyScaler(nn.Module):
    """Standardises by running statistics of what was measured; columns nobody has measured yet give zero."""

    def __init__(self, columns, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.full((columns,), float("nan")))
        self.register_buffer("var", torch.full((columns,), float("nan")))

    @torch.no_grad()
    def update(self, x):
        flat = x.flatten(0, 1)
        mean = flat.nanmean(0)
        var = (flat - mean).square().nanmean(0)
        for buffer, new in ((self.mean, mean), (self.var, var)):
            mixed = torch.where(buffer.isnan(), new, torch.lerp(buffer, new, self.momentum))
            buffer.copy_(torch.where(new.isnan(), buffer, mixed))

    def forward(self, x):
        if self.training:
            self.update(x)
        return torch.nan_to_num((x - self.mean) / (self.var + 1e-4).sqrt(), nan=0.0)


class BuoyNet(nn.Module):
    def __init__(self, columns=7, width=32):
        super().__init__()
        self.scale = LazyScaler(columns)
        self.decay = nn.Linear(columns, width)
        self.cell = nn.GRUCell(2 * columns, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        seen = (~x.isnan()).float()
        x = self.scale(x)
        h = x.new_zeros(len(x), self.cell.hidden_size)
        for t in range(x.shape[1]):
            h = h * torch.exp(-torch.relu(self.decay(1 - seen[:, t])))
            h = self.cell(torch.cat([x[:, t], seen[:, t]], -1), h)
        return self.head(h).squeeze(-1)


def reports(n, step, length=10):
    state = torch.randn(n, 1, 7).cumsum(-1) + 0.3 * torch.randn(n, length, 7)
    height = state[:, -1, :3].mean(-1).abs()
    x = state * torch.tensor([1.0, 10.0, 0.1, 100.0, 3.0, 1.0, 50.0])
    x[torch.rand_like(x) < 0.3] = float("nan")
    if step < 8:
        x[..., 6] = float("nan")  # the new sensor is not yet afloat
    x[0] = float("nan")
    return x, height


torch.manual_seed(66)
model = BuoyNet()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(24):
    x, height = reports(24, step)
    loss = nn.functional.smooth_l1_loss(model(x), height)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f} means {[round(m, 2) for m in model.scale.mean.tolist()]}")
