"""A selective state-space language model; the scan is written with two cumulative sums. Sequences grow during training."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelectiveScan(nn.Module):
    """h[t] = exp(dt[t] A) h[t-1] + dt[t] B[t] x[t], read out with C[t]; one input-dependent step size per channel."""

    def __init__(self, width: int, states: int):
        super().__init__()
        self.states = states
        self.log_rate = nn.Parameter(torch.log(torch.arange(1, states + 1).float()).repeat(width, 1))
        self.to_step = nn.Linear(width, width)
        self.to_bc = nn.Linear(width, 2 * states, bias=False)
        nn.init.constant_(self.to_step.bias, math.log(math.expm1(0.15)))

    def forward(self, x: Tensor) -> Tensor:
        dt = F.softplus(self.to_step(x))
        b, c = self.to_bc(x).split(self.states, dim=-1)
        decay = torch.einsum("btd,dn->btdn", dt, -self.log_rate.exp()).cumsum(1)
        drive = torch.einsum("btd,btn,btd->btdn", dt, b, x)
        state = torch.exp(decay) * torch.cumsum(drive * torch.exp(-decay), dim=1)
        return torch.einsum("btdn,btn->btd", state, c)


class Block(nn.Module):
    def __init__(self, width: int, states: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width, bias=False)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.scan = SelectiveScan(width, states)
        self.outer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.inner(self.norm(x)).chunk(2, dim=-1)
        h = self.conv(h.mT)[..., : x.shape[1]].mT
        return x + self.outer(self.scan(F.silu(h)) * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 16, depth: int = 2, states: int = 4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, states) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def periodic_text(batch: int, length: int, generator: torch.Generator) -> Tensor:
    motif = torch.randint(32, (batch, 8), generator=generator)
    return motif.repeat(1, length // 8 + 2)[:, : length + 1]


def main() -> None:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    model = Mamba()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    for step in range(24):
        length = 32 * 2 ** (step // 6)
        text = periodic_text(8, length, generator)
        logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 6 == 0:
            print(f"{step:3d} length {length:4d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
