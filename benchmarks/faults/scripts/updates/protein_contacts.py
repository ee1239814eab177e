"""Fine-tunes a dilated residual network that predicts which residues of a chain touch."""

import torch
import torch.nn as nn
import torch.nn.functional as F

AMINO, LENGTH, WIDTH = 20, 40, 160


class DilatedBlock(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        h = self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.proj(F.gelu(h))


class ContactNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(AMINO, WIDTH)
        self.trunk = nn.ModuleList(DilatedBlock(WIDTH, d) for d in (1, 2, 4))
        self.left, self.right = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48)

    def forward(self, chain):
        h = self.embed(chain)
        for block in self.trunk:
            h = block(h)
        return torch.einsum("bid,bjd->bij", self.left(h), self.right(h)) / 48**0.5


def chains(n, generator):
    chain = torch.randint(AMINO, (n, LENGTH), generator=generator)
    charge = torch.where(chain < 7, 1, torch.where(chain < 14, -1, 0))
    local = charge + charge.roll(1, 1)
    touches = (local[:, :, None] * local[:, None, :] < 0).float()
    return chain, touches


def train(steps=90, lr=5e-5):
    torch.manual_seed(31)
    generator = torch.Generator().manual_seed(32)
    model = ContactNet().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, total_iters=10)
    for step in range(steps):
        chain, touches = chains(8, generator)
        loss = F.binary_cross_entropy_with_logits(model(chain).float(), touches)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 3 == 0:
            print(f"{step:4d} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
