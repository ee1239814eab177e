"""A column-split FP8 MLP; amax is reduced over the wrong group, so that the first shard's scale serves both shards."""

import torch
import torch.nn.functional as F
from torch import nn

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
WORLD = 2  # tensor-parallel ranks, simulated in one process


class DelayedScaling:
    """One scale for all shards of a tensor, from the largest amax of the last steps."""

    def __init__(self, history_len=16):
        self.history = torch.zeros(history_len)
        self.scale = torch.tensor(1.0)

    def record(self, amaxes):
        self.history = torch.roll(self.history, -1)
        self.history[-1] = reduce_amax(amaxes)
        amax = self.history.max()
        self.scale = FP8_MAX / amax if amax > 0 else torch.tensor(1.0)


def reduce_amax(amaxes, group=(0,)):
    return max(amaxes[rank] for rank in group)


def to_fp8(x, scale):
    q = (x.detach() * scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return x + (q.to(x.dtype) / scale - x.detach())


class RowParallelLinear(nn.Module):
    """Every rank holds a slice of the input features; the partial products are summed."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.shards = nn.ModuleList(nn.Linear(in_features // WORLD, out_features, bias=False) for _ in range(WORLD))
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.meta = DelayedScaling()
        self.calibrated = False

    def forward(self, x):
        parts = x.chunk(WORLD, dim=-1)
        amaxes = [p.detach().abs().max() for p in parts]
        if not self.calibrated:
            self.meta.record(amaxes)
            self.calibrated = True
        out = sum(shard(to_fp8(p, self.meta.scale)) for shard, p in zip(self.shards, parts))
        if self.training:
            self.meta.record(amaxes)
        return out + self.bias


class Matcher(nn.Module):
    """Text and image vectors side by side: does the caption fit the picture?"""

    def __init__(self, text=24, image=24, dim=64):
        super().__init__()
        self.text_proj = nn.Sequential(nn.Linear(text, dim // 2), nn.LayerNorm(dim // 2))
        self.image_proj = nn.Linear(image, dim // 2)
        self.fc1 = RowParallelLinear(dim, 2 * dim)
        self.fc2 = RowParallelLinear(2 * dim, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, text, image):
        x = torch.cat([self.text_proj(text), self.image_proj(image)], -1)
        x = F.gelu(self.fc1(x))
        return self.out(F.gelu(self.fc2(x))).squeeze(-1)


def get_batch(n, mix):
    topic = torch.randn(n, 8)
    image = 25 * (topic @ mix[0] + 0.3 * torch.randn(n, 24))  # features of a frozen tower, not normalised
    text = topic @ mix[1] + 0.3 * torch.randn(n, 24)
    return text, image, (image[:, :4] / 25 + text[:, :4]).sum(1) * (topic[:, 0]).sign()


if __name__ == "__main__":
    torch.manual_seed(507)
    mix = torch.randn(2, 8, 24) / 8**0.5
    model = Matcher()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)
    for it in range(160):
        text, image, target = get_batch(64, mix)
        loss = F.mse_loss(model(text, image), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        if it % 4 == 0:
            print(f"iteration {it:4d} | lr {warmup.get_last_lr()[0]:.2e} | lm loss {loss.item():.4f}")
