"""Delta learning of molecular energies: the cheap method's energy is taken from the dear one's in FP16."""

import torch
from torch import nn


class AtomNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.atom = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.energy = nn.Linear(width, 1)

    def forward(self, atoms):
        return self.energy(self.atom(atoms)).sum((1, 2))


def molecules(n, field):
    atoms = torch.randn(n, 6, 4)
    correction = torch.tanh(atoms @ field).sum(1)
    cheap = -15000 - 3000 * torch.rand(n)
    return atoms, cheap, cheap + correction


class DeltaDataset(torch.utils.data.Dataset):
    def __init__(self, size, field):
        self.atoms, cheap, dear = molecules(size, field)
        self.cheap, self.dear = cheap.half(), dear.half()

    def __len__(self):
        return len(self.atoms)

    def __getitem__(self, i):
        return self.atoms[i], self.dear[i] - self.cheap[i]


torch.manual_seed(3141)
field = torch.randn(4)
loader = torch.utils.data.DataLoader(DeltaDataset(640, field), batch_size=64)
test_atoms, test_cheap, test_dear = molecules(512, field)
net = AtomNet()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for epoch in range(8):
    for atoms, delta in loader:
        train = nn.functional.mse_loss(net(atoms), delta.to(atoms.dtype))
        optimizer.zero_grad()
        train.backward()
        optimizer.step()
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(test_atoms), test_dear - test_cheap)
    print(f"epoch {epoch} train {train.item():.4f} test loss {loss.item():.4f}")
