"""Diffusers: a small U-Net learns to remove noise; EMA of weights.

library: diffusers
"""

import _torchvision  # noqa: F401
import torch
import torch.nn.functional as F
from _digest import finish
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(16, 32),
    norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
average = EMAModel(model.parameters(), decay=0.99)
noising = DDPMScheduler(num_train_timesteps=1000, beta_schedule="squaredcos_cap_v2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, 5, 40)
losses = []
for _ in range(40):
    centre = torch.rand(8, 2) * 12 + 2
    grid = torch.stack(torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij"))
    clean = torch.exp(-(grid - centre[:, :, None, None]).square().sum(1, keepdim=True) / 8) * 2 - 1
    noise = torch.randn_like(clean)
    times = torch.randint(0, 1000, (8,))
    loss = F.mse_loss(model(noising.add_noise(clean, noise, times), times, return_dict=False)[0], noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    average.step(model.parameters())
    losses.append(loss.item())
finish(losses, model)
