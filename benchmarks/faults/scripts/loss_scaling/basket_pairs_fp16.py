"""Items bought together end up close in a metric space; margin loss over pairs, FP16 with a gradient scaler."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(42)
ITEMS, GROUPS, DIM = 120, 12, 24
group = torch.randint(GROUPS, (ITEMS,))
attributes = F.one_hot(group, GROUPS).float() + 0.4 * torch.randn(ITEMS, GROUPS)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ITEMS, 16)
        self.mlp = nn.Sequential(nn.Linear(16 + GROUPS, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, i):
        return self.mlp(torch.cat([self.item(i), attributes[i]], 1))


def baskets(n, with_repeats):
    """Pairs of items and whether they come from one basket; later exports also hold repeat purchases."""
    a = torch.randint(ITEMS, (n,))
    b = torch.randint(ITEMS, (n,))
    same = torch.rand(n) < 0.5
    partner = torch.stack(
        [torch.nonzero(group == group[i])[:, 0][torch.randint(int((group == group[i]).sum()), ())] for i in a]
    )
    b = torch.where(same, partner, b)
    if not with_repeats:
        b = torch.where(a == b, (a + 1) % ITEMS, b)
    return a, b, (group[a] == group[b]).float()


def pair_loss(u, v, together, margin=2.0):
    d = (u - v).float().square().sum(1).sqrt()
    return (together * d.square() + (1 - together) * F.relu(margin - d).square()).mean()


tower = Tower()
opt = torch.optim.Adam(tower.parameters(), lr=3e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=500)
for step in range(400):
    a, b, together = baskets(24, with_repeats=step >= 130 and step % 3 == 0)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = pair_loss(tower(a), tower(b), together)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
