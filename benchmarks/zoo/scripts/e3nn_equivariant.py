"""e3nn: an equivariant tensor-product network tells shapes of point clouds apart.

library: e3nn
"""

import torch
import torch.nn.functional as F
from _digest import finish
from e3nn import o3
from e3nn.nn import FullyConnectedNet, Gate

torch.manual_seed(0)


class Convolution(torch.nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.sphere = o3.Irreps.spherical_harmonics(2)
        self.product = o3.FullyConnectedTensorProduct(before, self.sphere, after, shared_weights=False)
        self.radial = FullyConnectedNet([6, 16, self.product.weight_numel], F.silu)

    def forward(self, x, places):
        offsets = places[None] - places[:, None]
        keep = ~torch.eye(len(places), dtype=torch.bool)
        pairs, sender = offsets[keep], keep.nonzero()[:, 1]
        lengths = pairs.norm(dim=-1, keepdim=True)
        weights = self.radial(torch.exp(-(lengths - torch.linspace(0.5, 3, 6)).square()))
        messages = self.product(x[sender], o3.spherical_harmonics(self.sphere, pairs, True, "component"), weights)
        return messages.view(len(places), -1, messages.shape[-1]).mean(1)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate("8x0e", [torch.tanh], "4x0e", [torch.sigmoid], "4x1o")
        self.first = Convolution("1x0e", self.gate.irreps_in)
        self.second = Convolution(self.gate.irreps_out, "3x0e")

    def forward(self, places):
        x = self.gate(self.first(torch.ones(len(places), 1), places))
        return self.second(x, places).mean(0)


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
shapes = torch.randn(3, 6, 3)
losses = []
for _ in range(40):
    total = 0
    for kind in range(3):
        cloud = shapes[kind] @ o3.rand_matrix().T + 0.05 * torch.randn(6, 3)
        total = total + F.cross_entropy(model(cloud), torch.tensor(kind)) / 3
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    losses.append(total.item())
finish(losses, model)
