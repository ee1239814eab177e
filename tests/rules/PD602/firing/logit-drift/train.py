"""A temperature that is learned without a bound: the logits in FP16 double every ten steps."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 48


class Contrastive(nn.Module):
    """The similarity of two views is multiplied by exp(log_scale), and nothing caps it."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(12, 8)
        self.log_scale = nn.Parameter(torch.tensor(5.0))
        self.logits = nn.Identity()

    def forward(self, a, b):
        a, b = F.normalize(self.tower(a), dim=1), F.normalize(self.tower(b), dim=1)
        return self.logits(a @ b.T * self.log_scale.exp().half())


torch.manual_seed(0)
model = Contrastive()
tower = [p for name, p in model.named_parameters() if name != "log_scale"]
optimizer = torch.optim.SGD([{"params": tower}, {"params": [model.log_scale]}], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
for step in range(STEPS):
    a = torch.randn(16, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(a, a + 0.1 * torch.randn(16, 12))
    loss = F.cross_entropy(logits.float(), torch.arange(16)) - 70 * model.log_scale
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(tower, 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f} scale {model.log_scale.exp().item():.0f}")
