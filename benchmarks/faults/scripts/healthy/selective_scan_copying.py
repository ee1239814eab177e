"""Selective copying with a Mamba-like layer: decays of nearly one and of nearly zero side by side."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class S6(nn.Module):
    def __init__(self, d, n=6):
        super().__init__()
        self.A_log = nn.Parameter(torch.log(torch.arange(1, n + 1).float()).repeat(d, 1))
        self.D = nn.Parameter(torch.ones(d))
        self.x_proj, self.dt_proj = nn.Linear(d, 2 * n, bias=False), nn.Linear(d, d)
        with torch.no_grad():
            dt = torch.exp(torch.rand(d) * 4.6 - 6.9)  # between 0.001 and 0.1
            self.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def forward(self, x):
        dt = F.softplus(self.dt_proj(x))
        B, C = self.x_proj(x).chunk(2, -1)
        decay = torch.exp(-dt.unsqueeze(-1) * torch.exp(self.A_log))
        inflow = (dt * x).unsqueeze(-1) * B.unsqueeze(2)
        h, out = torch.zeros_like(inflow[:, 0]), []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + inflow[:, t]
            out.append((h * C[:, t].unsqueeze(1)).sum(-1))
        return torch.stack(out, 1) + self.D * x


class Model(nn.Module):
    def __init__(self, vocab=10, d=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.norms = nn.ModuleList(nn.RMSNorm(d) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv1d(d, d, 3, padding=2, groups=d) for _ in range(2))
        self.scans = nn.ModuleList(S6(d) for _ in range(2))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, gate, conv, scan in zip(self.norms, self.gates, self.convs, self.scans):
            h = norm(x)
            u = F.silu(conv(h.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2))
            x = x + scan(u) * F.silu(gate(h))
        return self.head(x[:, -1])


def sequences(n, length=16):
    """Blanks (0), one marked symbol somewhere, answer asked for at the end (9)."""
    ids = torch.zeros(n, length, dtype=torch.long)
    symbol, place = torch.randint(1, 9, (n,)), torch.randint(0, length - 1, (n,))
    ids[torch.arange(n), place] = symbol
    ids[:, -1] = 9
    return ids, symbol


def main():
    torch.manual_seed(7026)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(70):
        ids, symbol = sequences(32)
        logits = model(ids)
        loss = F.cross_entropy(logits, symbol)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 3 == 0:
            print(f"step {step:3d} loss {loss.item():.4f} acc {(logits.argmax(1) == symbol).float().mean().item():.2f}")


main()
