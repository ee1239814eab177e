"""A main task and an auxiliary one that weighs 1e-4, in FP16 with a scaler: scaled, both have gradients in range."""

import torch
import torch.nn.functional as F
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(16, 48), nn.GELU())
        self.main, self.aux = nn.Linear(48, 4), nn.Linear(48, 8)

    def forward(self, x):
        h = self.trunk(x)
        return self.main(h), self.aux(h)


torch.manual_seed(3231)
centres, to_aux = torch.randn(4, 16), torch.randn(16, 8) / 4
model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(60):
    y = torch.randint(0, 4, (64,))
    x = centres[y] + 0.7 * torch.randn(64, 16)
    with torch.autocast("cpu", dtype=torch.float16):
        logits, aux = model(x)
    main_term, aux_term = F.cross_entropy(logits.float(), y), F.mse_loss(aux.float(), x @ to_aux)
    optimizer.zero_grad()
    scaler.scale(main_term + 1e-4 * aux_term).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 6 == 0:
        loss = main_term + aux_term
        print(f"step {step} loss {loss.item():.4f}")
