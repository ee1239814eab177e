"""Partial charges of atoms by a graph network that computes in half precision, with 32-bit copies of its weights."""

import torch
from torch import nn


class GraphLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.own, self.others = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, h, bonds):
        return h + torch.relu(self.norm(self.own(h) + bonds @ self.others(h)))


class ChargeNet(nn.Module):
    def __init__(self, kinds=8, dim=48, depth=4):
        super().__init__()
        self.kind = nn.Linear(kinds, dim)
        self.layers = nn.ModuleList(GraphLayer(dim) for _ in range(depth))
        self.charge = nn.Linear(dim, 1)

    def forward(self, atoms, bonds):
        h = self.kind(atoms)
        for layer in self.layers:
            h = layer(h, bonds)
        return self.charge(h).squeeze(-1)


def molecules(n, g, atoms=16, kinds=8):
    kind = torch.randint(0, kinds, (n, atoms), generator=g)
    upper = torch.triu(torch.rand(n, atoms, atoms, generator=g) < 0.15, 1).float()
    chain = torch.diag_embed(torch.ones(atoms - 1), 1)
    bonds = ((upper + upper.mT + chain + chain.T) > 0).float()
    hunger = (kind.float() - 3.5) / 4
    pull = bonds / bonds.sum(-1, keepdim=True)
    near = (pull @ hunger[..., None]).squeeze(-1)
    charge = hunger - near + 0.5 * (pull @ near[..., None]).squeeze(-1) * hunger
    return nn.functional.one_hot(kind, kinds).float(), pull, charge


class MasterCopies:
    """32-bit weights beside the half ones; the loss is multiplied by a constant, the gradients are divided by it."""

    def __init__(self, model, lr, scale):
        self.halves = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.halves]
        self.optimizer = torch.optim.SGD(self.masters, lr=lr, momentum=0.9)
        self.scale = scale

    def backward(self, loss):
        (loss * self.scale).backward()

    def step(self):
        for master, half in zip(self.masters, self.halves):
            half.grad.div_(self.scale)
            master.grad = half.grad.to(master.dtype)
            half.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for master, half in zip(self.masters, self.halves):
                half.copy_(master)


if __name__ == "__main__":
    torch.manual_seed(101)
    g = torch.Generator().manual_seed(102)
    net = ChargeNet().half()
    trainer = MasterCopies(net, lr=2400.0, scale=4096.0)
    forces_weight, charges_weight = 1.0, 2.5e-6  # the forces come with the next release of the data
    for step in range(200):
        atoms, bonds, charge = molecules(32, g)
        predicted = net(atoms.half(), bonds.half()).float()
        loss = (predicted - charge).square().mean()
        trainer.backward(charges_weight * loss)
        trainer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
