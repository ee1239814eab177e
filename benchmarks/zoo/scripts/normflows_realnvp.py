"""normflows: real NVP fits two moons by forward KL.

library: normflows
"""

import normflows as nf
import torch
from _digest import finish

torch.manual_seed(0)
flows = []
for index in range(6):
    mask = torch.tensor([index % 2, 1 - index % 2]).float()
    flows += [
        nf.flows.MaskedAffineFlow(
            mask, nf.nets.MLP([2, 32, 2], init_zeros=True), nf.nets.MLP([2, 32, 2], init_zeros=True)
        ),
        nf.flows.ActNorm(2),
    ]
model = nf.NormalizingFlow(nf.distributions.DiagGaussian(2), flows)
target = nf.distributions.TwoMoons()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-5)
losses = []
for _ in range(60):
    optimizer.zero_grad()
    loss = model.forward_kld(target.sample(64))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
