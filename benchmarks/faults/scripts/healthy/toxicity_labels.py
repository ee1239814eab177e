"""Multi-task toxicity: most labels were never measured and are NaN. The loss counts the measured ones only."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Fingerprint(nn.Module):
    def __init__(self, bits=64, tasks=6):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(bits, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, tasks)
        )

    def forward(self, x):
        return self.net(x)


def masked_bce(logits, labels):
    measured = ~torch.isnan(labels)
    per_label = F.binary_cross_entropy_with_logits(logits, torch.nan_to_num(labels), reduction="none")
    return (per_label * measured).sum() / measured.sum().clamp(min=1)


def assays(n, seed):
    rng = np.random.default_rng(seed)
    bits = (rng.random((n, 64)) < 0.2).astype(np.float32)
    truth = (bits @ rng.standard_normal((64, 6)) > 0).astype(np.float32)
    truth[rng.random(truth.shape) < 0.8] = np.nan
    return torch.from_numpy(bits), torch.from_numpy(truth)


def main():
    torch.manual_seed(3)
    model = Fingerprint()
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    x, y = assays(384, seed=9)
    print(f"{torch.isnan(y).float().mean().item():.0%} of the labels are missing")
    for epoch in range(4):
        for batch in torch.randperm(len(x)).split(32):
            loss = masked_bce(model(x[batch]), y[batch])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            wrong = ((model(x) > 0).float() - y).abs()
        print(f"epoch {epoch} loss {loss.item():.4f} error per task {[round(v, 3) for v in wrong.nanmean(0).tolist()]}")


if __name__ == "__main__":
    main()
