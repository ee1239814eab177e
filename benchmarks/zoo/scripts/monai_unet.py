"""MONAI: a 3-D U-Net segments balls with Dice and cross entropy.

library: monai
"""

import _torchvision  # noqa: F401
import torch
from _digest import finish
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from monai.utils import set_determinism

set_determinism(0)
model = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
objective = DiceCELoss(to_onehot_y=True, softmax=True)
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
grid = torch.stack(torch.meshgrid(*[torch.arange(16.0)] * 3, indexing="ij"))
losses = []
for _ in range(30):
    centre = torch.rand(2, 3) * 8 + 4
    labels = ((grid - centre[:, :, None, None, None]).square().sum(1, keepdim=True) < 16).float()
    loss = objective(model(labels + 0.3 * torch.randn_like(labels)), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
