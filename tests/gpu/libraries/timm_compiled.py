"""A compiled ViT under BF16 autocast; with `CUDA_GRAPHS` in the environment its steps are replays of CUDA graphs."""

import os

import timm
import torch
from common import DEVICE, tell
from torch.nn import functional as F

model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10, depth=2).to(DEVICE)
run = torch.compile(model, mode="reduce-overhead" if "CUDA_GRAPHS" in os.environ else "default")
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
images, labels = torch.randn(8, 3, 64, 64, device=DEVICE), torch.randint(10, (8,), device=DEVICE)
for _ in range(20):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = F.cross_entropy(run(images), labels, label_smoothing=0.1)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
tell(model)
