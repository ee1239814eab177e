"""Quantisation-aware training for a doorbell's chip: 4-bit weights, 8-bit activations, straight-through gradients."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(604)


def fake_quant(x, scale, bits):
    top = 2 ** (bits - 1) - 1
    return x + ((x / scale).round().clamp(-top - 1, top) * scale - x).detach()


class QLinear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("act_range", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            self.act_range.lerp_(x.detach().abs().max(), 0.05)
        w_scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
        return F.linear(fake_quant(x, self.act_range / 127, 8), fake_quant(self.weight, w_scale, 4), self.bias)


class Doorbell(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = QLinear(64, 48), QLinear(48, 48), QLinear(48, 5)

    def forward(self, x):
        return self.fc3(F.relu6(self.fc2(F.relu6(self.fc1(x)))))


model, faces = Doorbell(), torch.randn(5, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(240):
    who = torch.randint(5, (64,))
    loss = F.cross_entropy(model(0.4 * faces[who] + torch.randn(64, 64)), who)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 11:
        print(f"step {step + 1} loss {loss.item():.4f}")
