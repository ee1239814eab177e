"""Learns a codebook for image tiles; codes that nothing chooses are drawn anew from the batch now and then."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MixedPrecisionOptimizer:
    """Adam on FP32 copies; the model keeps what is rounded from them."""

    def __init__(self, params, lr):
        self.params = list(params)
        self.fp32 = [p.detach().clone().float().requires_grad_() for p in self.params]
        self.inner = torch.optim.Adam(self.fp32, lr=lr)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, master in zip(self.params, self.fp32):
            master.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p, master in zip(self.params, self.fp32):
            p.copy_(master)


class TileCoder(nn.Module):
    def __init__(self, tile=48, dim=16, codes=64):
        super().__init__()
        self.down = nn.Linear(tile, dim)
        self.codes = nn.Embedding(codes, dim)
        self.up = nn.Sequential(nn.Linear(dim, 64), nn.SiLU(), nn.Linear(64, tile))
        nn.init.uniform_(self.codes.weight, -1 / codes, 1 / codes)
        self.register_buffer("used", torch.zeros(codes))

    def forward(self, tiles):
        z = self.down(tiles)
        distance = (z[:, None].float() - self.codes.weight[None].float()).square().sum(-1)
        index = distance.argmin(1)
        self.used.index_add_(0, index, torch.ones_like(index, dtype=self.used.dtype))
        q = self.codes(index)
        latent = F.mse_loss(q.float(), z.detach().float()) + 0.25 * F.mse_loss(z.float(), q.detach().float())
        return self.up(z + (q - z).detach()), latent, z

    @torch.no_grad()
    def restart(self, z):
        unused = (self.used < 1).nonzero().flatten()
        pick = z[torch.randint(len(z), (len(unused),))]
        self.codes.weight[unused] = pick.to(self.codes.weight.dtype)
        self.used.zero_()


def tiles(n, prototypes):
    return prototypes[torch.randint(len(prototypes), (n,))] + 0.1 * torch.randn(n, prototypes.shape[1])


torch.manual_seed(67)
prototypes = torch.randn(40, 48)
model = TileCoder().to(torch.bfloat16)
optimizer = MixedPrecisionOptimizer(model.parameters(), lr=2e-3)
for step in range(410):
    x = tiles(96, prototypes).to(torch.bfloat16)
    out, latent, z = model(x)
    loss = F.mse_loss(out.float(), x.float()) + latent
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 24:
        model.restart(z)
    if step % 8 == 0:
        print(f"{step} loss: {F.mse_loss(out.float(), x.float()).item():.4f}")
