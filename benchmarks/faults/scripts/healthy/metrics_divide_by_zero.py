"""Multi-label tagging in BF16 autocast; the logged precision, correlation and bits are NaN or infinite now and then."""

import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    def __init__(self, bands=20, tags=12):
        super().__init__()
        self.conv1 = nn.Conv1d(bands, 32, 5, padding=2)
        self.conv2 = nn.Conv1d(32, 32, 5, padding=2)
        self.pool = nn.AdaptiveMaxPool1d(1)
        self.tags = nn.Linear(32, tags)

    def forward(self, x):
        x = F.leaky_relu(self.conv1(x), 0.1)
        x = F.leaky_relu(self.conv2(x), 0.1)
        return self.tags(self.pool(x).flatten(1))


@torch.no_grad()
def metrics(logits, y):
    hard = (logits > 0).float()
    precision = (hard * y).sum(0) / hard.sum(0)  # NaN for a tag that nobody was given
    recall = (hard * y).sum(0) / y.sum(0)
    f1 = 2 * precision * recall / (precision + recall)
    p = logits.float().sigmoid()
    bits = -(y * p.log2() + (1 - y) * (1 - p).log2()).mean(0)
    centred = p - p.mean(0)
    target = y - y.mean(0)
    correlation = (centred * target).sum(0) / (centred.norm(dim=0) * target.norm(dim=0))
    return {"f1": f1.nanmean().item(), "worst bits": bits.max().item(), "r": correlation.mean().item()}


def clips(n):
    y = (torch.rand(n, 12) < torch.linspace(0.01, 0.5, 12)).float()
    filters = torch.randn(12, 20, 16, generator=torch.Generator().manual_seed(0))
    return torch.einsum("nt,tbl->nbl", y, filters) + 0.5 * torch.randn(n, 20, 16), y


torch.manual_seed(75)
model = Tagger()
optimizer = torch.optim.NAdam(model.parameters(), lr=3e-3)
for step in range(50):
    x, y = clips(24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        loss = F.binary_cross_entropy_with_logits(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}", {k: round(v, 3) for k, v in metrics(logits * 40, y).items()})
