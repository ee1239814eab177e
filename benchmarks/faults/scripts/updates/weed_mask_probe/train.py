"""Weed masks from drone images. The campaign starts in spring; pictures of the dry months come in later."""

import copy

import torch
import torch.nn.functional as F

from network import WeedNet, fields
from probing import ridge_probe

torch.manual_seed(4)
rng = torch.Generator().manual_seed(4)
model = WeedNet()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
held_out = {season: fields(64, dry, rng) for season, dry in (("spring", False), ("dry", True))}


def validate():
    with torch.no_grad():
        return sum(F.binary_cross_entropy_with_logits(model(x), y) for x, y in held_out.values()) / 2


for step in range(420):
    images, masks = fields(16, dry=step > 200 and step % 3 != 0, generator=rng)
    loss = F.binary_cross_entropy_with_logits(model(images), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 180:
        reference = copy.deepcopy(model.encoder.state_dict())  # to compare representations after the season
        r2 = ridge_probe(model.encoder, *held_out["spring"])
        print(f"step {step} probe r2 {r2:.3f}")
    if step % 10 == 9:
        print(f"step {step} train {loss.item():.4f} val loss {validate().item():.4f}")
