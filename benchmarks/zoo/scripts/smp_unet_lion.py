"""segmentation-models-pytorch: a U-Net on a ResNet, Dice loss, the Lion optimizer.

library: segmentation-models-pytorch
"""

import _torchvision  # noqa: F401
import segmentation_models_pytorch as smp
import torch
from _digest import finish
from lion_pytorch import Lion

torch.manual_seed(0)
model = smp.Unet(
    "resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(32, 16, 8), in_channels=1, classes=1
)
objective = smp.losses.DiceLoss("binary")
optimizer = Lion(model.parameters(), lr=3e-4, weight_decay=1e-2)
grid = torch.stack(torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij"))
losses = []
for _ in range(25):
    centre = torch.rand(4, 2) * 20 + 6
    mask = ((grid - centre[:, :, None, None]).square().sum(1, keepdim=True) < 40).float()
    loss = objective(model(mask + 0.5 * torch.randn_like(mask)), mask)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
