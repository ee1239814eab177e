"""Car masks with RMSprop, mixed precision and clipping."""

import torch
import torch.nn.functional as F
from dice import dice_loss
from unet import UNet

torch.manual_seed(470)
SIZE, gradient_clipping = 12, 1.0


def cars(n):
    grid = torch.arange(SIZE).float()
    cx, cy, w, h = (torch.rand(n, 1, 1) * s + o for s, o in ((6, 3), (6, 3), (3, 2), (2, 1.5)))
    mask = (((grid[None, None] - cx) / w) ** 2 + ((grid[None, :, None] - cy) / h) ** 2 < 1).float()
    colour = torch.rand(n, 3, 1, 1)
    return colour * mask[:, None] + 0.3 * torch.randn(n, 3, SIZE, SIZE), mask


model = UNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.5)
grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
for step in range(60):
    images, masks = cars(8)
    with torch.autocast("cpu", dtype=torch.float16):
        predicted = model(images).squeeze(1)
    loss = F.binary_cross_entropy_with_logits(predicted.float(), masks)
    loss = loss + dice_loss(torch.sigmoid(predicted.float()), masks)
    optimizer.zero_grad(set_to_none=True)
    grad_scaler.scale(loss).backward()
    grad_scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
    grad_scaler.step(optimizer)
    grad_scaler.update()
    print(f"step {step} loss {loss.item():.4f}")
