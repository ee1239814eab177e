"""OpenCLIP: contrastive training of a small pair of towers, the logit scale clamped.

library: open-clip-torch
"""

import math

import _torchvision  # noqa: F401
import torch
from _digest import finish
from open_clip.loss import ClipLoss
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

torch.manual_seed(0)
model = CLIP(
    embed_dim=32,
    vision_cfg=CLIPVisionCfg(layers=2, width=64, head_width=16, patch_size=8, image_size=32),
    text_cfg=CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=2),
    output_dict=True,
)
objective = ClipLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
images, texts = torch.randn(16, 3, 32, 32), torch.randint(1, 63, (16, 12))
texts[:, -1] = 63
losses = []
for _ in range(40):
    rows = torch.randperm(16)[:8]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(images[rows] + 0.3 * torch.randn(8, 3, 32, 32), texts[rows])
        loss = objective(**out)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    losses.append(loss.item())
finish(losses, model)
