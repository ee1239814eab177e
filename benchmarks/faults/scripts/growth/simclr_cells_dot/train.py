"""Self-supervised pretraining on cell features, contrasting two augmented views."""

import torch
import torch.nn.functional as F

from augment import cells, view
from model import SimCLR

BATCH, STEPS, LR = 96, 240, 3e-3

torch.manual_seed(61)
generator = torch.Generator().manual_seed(61)
data, _ = cells(2048, generator)
held_out, _ = cells(BATCH, generator)
model = SimCLR()
optimizer = torch.optim.Adam(model.parameters(), lr=LR, weight_decay=1e-6)
positives = torch.cat([torch.arange(BATCH) + BATCH, torch.arange(BATCH)])


def nt_xent(x, generator):
    logits = model(view(x, generator), view(x, generator))
    return F.cross_entropy(logits, positives), (logits.argmax(1) == positives).float().mean().item()


for step in range(STEPS):
    contrast, _ = nt_xent(data[torch.randint(len(data), (BATCH,), generator=generator)], generator)
    optimizer.zero_grad()
    contrast.backward()
    optimizer.step()
    if step % 12 == 11:
        model.eval()
        with torch.no_grad():
            val, top1 = nt_xent(held_out, torch.Generator().manual_seed(1))
        model.train()
        print(f"step {step + 1} contrast {contrast.item():.3f} val loss {val.item():.4f} top1 {top1:.3f}")
