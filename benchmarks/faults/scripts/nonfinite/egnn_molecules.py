"""E(n)-equivariant graph network on molecules of different sizes, padded with atoms of type 0 at the origin."""

import torch
from torch import nn


def mlp(*sizes, last=False):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*(layers if last else layers[:-1]))


class EGCL(nn.Module):
    """Satorras et al. 2021; edges carry the distance rather than its square."""

    def __init__(self, hidden):
        super().__init__()
        self.edge = mlp(2 * hidden + 1, hidden, hidden, last=True)
        self.coord = mlp(hidden, hidden, 1)
        self.node = mlp(2 * hidden, hidden, hidden)

    def forward(self, h, x, edges):
        n = h.shape[1]
        rel = x[:, :, None] - x[:, None, :]
        apart = rel.pow(2).sum(-1, keepdim=True) + torch.eye(n).unsqueeze(-1)  # keep the diagonal away from zero
        dist = apart**0.5
        pair = torch.cat([h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1), dist], -1)
        message = self.edge(pair) * edges
        x = x + (rel * self.coord(message).tanh() * edges).mean(2)
        return h + self.node(torch.cat([h, message.sum(2)], -1)), x


class EGNN(nn.Module):
    def __init__(self, types=6, hidden=24, layers=3):
        super().__init__()
        self.embed = nn.Embedding(types, hidden, padding_idx=0)
        self.convs = nn.ModuleList([EGCL(hidden) for _ in range(layers)])
        self.readout = mlp(hidden, hidden, 1)

    def forward(self, z, x):
        present = (z > 0).float()
        eye = torch.eye(z.shape[1])
        edges = (present[:, :, None] * present[:, None, :] * (1 - eye)).unsqueeze(-1)
        x = x + 1e-3 * torch.randn_like(x) * present.unsqueeze(-1)
        h = self.embed(z)
        for conv in self.convs:
            h, x = conv(h, x, edges)
        return (self.readout(h).squeeze(-1) * present).sum(1)


class GraphCollate:
    def __call__(self, molecules):
        longest = max(len(z) for z, _, _ in molecules)
        z = torch.zeros(len(molecules), longest, dtype=torch.long)
        x = torch.zeros(len(molecules), longest, 3)
        for i, (kinds, places, _) in enumerate(molecules):
            z[i, : len(kinds)], x[i, : len(kinds)] = kinds, places
        return z, x, torch.tensor([e for _, _, e in molecules])


def molecule(atoms, generator):
    kinds = torch.randint(1, 6, (atoms,), generator=generator)
    places = torch.randn(atoms, 3, generator=generator)
    return kinds, places - places.mean(0), (kinds.float().mean() - 3).item()


generator = torch.Generator().manual_seed(11)
sizes = [9] * 40 + [7, 9, 8, 9] * 6
data = torch.utils.data.DataLoader([molecule(n, generator) for n in sizes], batch_size=8, collate_fn=GraphCollate())
torch.manual_seed(0)
net = EGNN()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for z, x, energy in data:
    loss = nn.functional.l1_loss(net(z, x), energy)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"energy MAE {loss.item():.4f}")
