"""A selective state-space layer, written from the paper: A is stored as a logarithm, B, C and the step depend on the input."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SelectiveScan(nn.Module):
    def __init__(self, d, n=8):
        super().__init__()
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(d, 1))
        self.D = nn.Parameter(torch.ones(d))
        self.x_proj = nn.Linear(d, 2 * n)
        self.dt_proj = nn.Linear(d, d)
        nn.init.constant_(self.dt_proj.bias, -2.5)

    def forward(self, x):
        A = torch.exp(self.A_log)
        dt = F.softplus(self.dt_proj(x))
        B, C = self.x_proj(x).chunk(2, -1)
        decay = torch.exp(dt.unsqueeze(-1) * A)
        inflow = (dt * x).unsqueeze(-1) * B.unsqueeze(2)
        h, ys = torch.zeros_like(inflow[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + inflow[:, t]
            ys.append((h * C[:, t].unsqueeze(1)).sum(-1))
        return torch.stack(ys, 1) + self.D * x


class MambaBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.in_proj, self.out_proj = nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.scan = SelectiveScan(d)

    def forward(self, x):
        u, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        return x + self.out_proj(self.scan(F.silu(u)) * F.silu(gate))


class DnaModel(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.embed = nn.Embedding(8, d)
        self.blocks = nn.ModuleList(MambaBlock(d) for _ in range(2))
        self.head = nn.Linear(d, 8)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    torch.manual_seed(7011)
    model = DnaModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    motif = torch.randint(8, (8, 8))
    for step in range(50):
        seq = [torch.randint(8, (16,)), torch.randint(8, (16,))]
        for _ in range(30):
            seq.append(torch.where(torch.rand(16) < 0.1, torch.randint(8, (16,)), motif[seq[-2], seq[-1]]))
        ids = torch.stack(seq, 1)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 3 == 0:
            print(f"step {step:3d} loss {loss.item():.4f}")


main()
