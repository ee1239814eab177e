"""accelerate launch: two processes, BF16, accumulation, clipping.

library: accelerate
launch: accelerate 2
"""

import torch
import torch.nn.functional as F
from _digest import finish
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
set_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 40)
targets = torch.randint(0, 8, (512,))
inputs = torch.randn(8, 32)[targets] + torch.randn(512, 32)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=8, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.item())
finish(losses, accelerator.unwrap_model(model))
accelerator.end_training()
