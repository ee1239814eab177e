"""Load class of a quay crane from its sway: the head alone for 80 steps, then everything.

The backbone would come from the simulator's checkpoint; without one it starts as initialised.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from data import batch
from model import LoadClassifier, set_trainable

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--checkpoint", type=Path, default=Path("simulator.pt"))
parser.add_argument("--steps", type=int, default=320)
parser.add_argument("--unfreeze-at", type=int, default=80)
parser.add_argument("--lr", type=float, default=2e-3)
args = parser.parse_args()

torch.manual_seed(11)
generator = torch.Generator().manual_seed(12)
model = LoadClassifier()
if args.checkpoint.exists():
    model.backbone.load_state_dict(torch.load(args.checkpoint, weights_only=True))
before = {k: v.clone() for k, v in model.backbone.named_parameters()}

set_trainable(model.backbone, False)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=args.lr, weight_decay=1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)

for step in range(args.steps):
    if step == args.unfreeze_at:
        set_trainable(model.backbone, True)
        print("backbone unfrozen")
    x, y = batch(64, generator)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f} lr {scheduler.get_last_lr()[0]:.1e}")
