"""A deep equilibrium layer: fixed points by iteration under no_grad, from a residual of inf; one custom Function for -inf."""

import torch
from torch import nn


class MaskedMax(torch.autograd.Function):
    """Maximum over valid positions. Padding is -inf while it is searched for, and gets no gradient."""

    @staticmethod
    def forward(ctx, x, valid):
        best, where = x.masked_fill(~valid.unsqueeze(-1), float("-inf")).max(1)
        ctx.save_for_backward(where)
        ctx.length = x.shape[1]
        return best

    @staticmethod
    def backward(ctx, grad):
        (where,) = ctx.saved_tensors
        out = grad.new_zeros(grad.shape[0], ctx.length, grad.shape[1])
        return out.scatter_(1, where.unsqueeze(1), grad.unsqueeze(1)), None


class Equilibrium(nn.Module):
    def __init__(self, dim, tolerance=1e-4, limit=25):
        super().__init__()
        self.state, self.inject = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        nn.init.orthogonal_(self.state.weight, gain=0.4)
        self.tolerance, self.limit = tolerance, limit
        self.register_buffer("last_residual", torch.tensor(float("inf")))

    def forward(self, x):
        drive = self.inject(x)
        with torch.no_grad():
            z, residual = torch.zeros_like(drive), torch.tensor(float("inf"))
            for _ in range(self.limit):
                nxt = torch.tanh(self.state(z) + drive)
                residual = (nxt - z).norm() / z.norm()
                z = nxt
                if residual < self.tolerance:
                    break
            self.last_residual.copy_(residual)
        return torch.tanh(self.state(z) + drive)


class SetModel(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.read, self.deq, self.out = nn.Linear(3, dim), Equilibrium(dim), nn.Linear(dim, 1)

    def forward(self, x, valid):
        return self.out(MaskedMax.apply(self.deq(self.read(x)), valid)).squeeze(-1)


torch.manual_seed(76)
model = SetModel()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(40):
    size = torch.randint(1, 9, (16,))
    valid = torch.arange(8) < size[:, None]
    x = torch.randn(16, 8, 3)
    y = torch.where(valid, x.sum(-1), torch.tensor(float("-inf"))).amax(1)
    loss = nn.functional.huber_loss(model(x, valid), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f} residual {model.deq.last_residual.item():.1e}")
