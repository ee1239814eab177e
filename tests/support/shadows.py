"""Small trainings to be compared with FP32: healthy ones, and one per way of asking too much of a format.

``python -m tests.support.shadows DIR`` records each into ``DIR/<name>``, one after the other in one process.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32
BF16, FP16 = torch.bfloat16, torch.float16


class Norm(nn.Module):
    """E[x^2] - E[x]^2, in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.gain = dtype, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + 6.0).to(self.dtype)
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance.clamp(min=0.0) + 1e-3) * self.gain.to(self.dtype)


class Attention(nn.Module):
    """Written out, so that scores are tensors; ``sharpness`` multiplies them."""

    def __init__(self, sharpness: float = 1.0) -> None:
        super().__init__()
        self.qkv, self.proj, self.sharpness = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), sharpness
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) * (self.sharpness / WIDTH**0.5)
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        return self.drop(self.proj(scores.masked_fill(mask, -torch.inf).softmax(-1) @ v))


class Running(nn.Linear):
    """A product that is summed up in BF16, term by term onto a bias beside which the terms are small."""

    def forward(self, x: Tensor) -> Tensor:
        total = (self.bias + 8.0).expand(*x.shape[:-1], -1).to(torch.bfloat16)
        for k in range(self.in_features):
            total = total + (x[..., k : k + 1] * self.weight[:, k].abs()).to(total.dtype) * 0.25
        return total - 8.0


class Difference(nn.Module):
    """Two paths that hardly differ, subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.other.weight.copy_(self.one.weight * 1.002)
            self.other.bias.copy_(self.one.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x) - self.other(x)) * 500.0


class Block(nn.Module):
    def __init__(self, norm: nn.Module | None = None, attn: nn.Module | None = None, mlp: nn.Module | None = None):
        super().__init__()
        self.norm1, self.attn = norm or nn.LayerNorm(WIDTH), attn or Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = mlp or nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@dataclasses.dataclass
class Answer:
    logits: Tensor
    hidden: Tensor


class Tiny(nn.Module):
    """A transformer called with keywords, which answers with a dataclass."""

    def __init__(self, middle: Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(Block(), middle, Block())
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, *, tokens: Tensor) -> Answer:
        hidden = self.blocks(self.embed(tokens))
        return Answer(self.head(hidden), hidden)


class Straight(torch.autograd.Function):
    """The identity, written by hand."""

    @staticmethod
    def forward(_ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx, grad: Tensor) -> Tensor:
        return grad.clone()


class Vision(nn.Module):
    """Batch norm behind biased convolutions (whose gradient is zero but for rounding), in-place ReLU, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm1(self.stem(x)))
        x = self.relu(self.norm2(self.conv(x)) + x)
        return self.head(Straight.apply(x.mean((2, 3))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(8, WIDTH, 2, batch_first=True, dropout=0.1), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        # Without AVX-512 oneDNN refuses an LSTM in 16 bits, which torch's own kernel takes.
        with torch.backends.mkldnn.flags(enabled=torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            y, _ = self.lstm(x)
        h = torch.zeros(x.shape[0], WIDTH, dtype=y.dtype)
        for t in range(y.shape[1]):
            h = self.cell(y[:, t], h)
        return self.head(h)


class Noisy(nn.Module):
    """Draws from a generator that nobody else knows of."""

    _generator = torch.Generator().manual_seed(0)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.randn(x.shape, generator=Noisy._generator))


def train(
    model: nn.Module, loss_of: Callable[[], Tensor], dtype: torch.dtype | None = BF16, *, scaled: bool = False
) -> None:
    """Two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10)
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype or BF16, enabled=dtype is not None):
            loss = loss_of()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def language(dtype: torch.dtype | None = BF16, *, scaled: bool = False, **middle: nn.Module) -> None:
    """The small transformer; ``middle``: parts of its block in the middle."""
    model = Tiny(Block(**middle))

    def loss() -> Tensor:
        tokens = torch.randint(0, 16, (8, 12))
        answer = model(tokens=tokens)
        return F.cross_entropy(answer.logits.flatten(0, 1).float(), tokens.flatten()) + 1e-3 * answer.hidden.mean()

    train(model, loss, dtype, scaled=scaled)


def classified(model: nn.Module, *shape: int, dtype: torch.dtype | None = BF16) -> None:
    """Four classes of noise."""

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(16, *shape)).float(), torch.randint(0, 4, (16,)))

    train(model, loss, dtype, scaled=dtype is FP16)


def gan() -> None:
    """Two models, two optimizers, and a loss module: four top-level modules in a step."""
    make = nn.Sequential(nn.Linear(8, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(True), nn.Linear(WIDTH, 8))
    judge = nn.Sequential(nn.Linear(8, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1))
    optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (make, judge)]
    criterion = nn.BCEWithLogitsLoss()
    for step in range(4):
        with torch.autocast("cpu", dtype=BF16):
            fake = make(torch.randn(16, 8))
            wrong = judge(fake if step % 2 == 0 else fake.detach())
            loss = criterion(wrong.float(), torch.full_like(wrong, 1.0 - step % 2, dtype=torch.float32))
        optimizers[step % 2].zero_grad()
        loss.backward()
        optimizers[step % 2].step()


def pure() -> None:
    """Weights and activations in BF16, no autocast."""
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)).bfloat16()
    train(model, lambda: model(torch.randn(16, 8, dtype=BF16)).float().square().mean(), None)


def tiny_gradients() -> None:
    """FP16 without a loss scale, and a loss so small that gradients are subnormal."""
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
    train(model, lambda: 1e-3 * model(torch.randn(16, 8)).float().square().mean(), FP16)


def closure() -> None:
    model = nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def again() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8, dtype=BF16)).float().square().mean()
        loss.backward()
        return loss

    optimizer.step(again)


CASES: dict[str, Callable[[], None]] = {
    "gpt-bf16": language,
    "gpt-fp16": lambda: language(FP16, scaled=True),
    "cnn": lambda: classified(Vision(), 3, 8, 8),
    "cnn-fp16": lambda: classified(Vision(), 3, 8, 8, dtype=FP16),
    "lstm": lambda: classified(Recurrent(), 3, 8),
    "gan": gan,
    "pure-bf16": pure,
    "one-pass-bf16": lambda: language(norm=Norm(BF16)),
    "one-pass-fp16": lambda: language(FP16, scaled=True, norm=Norm(FP16)),
    "sharp-softmax": lambda: language(attn=Attention(150.0)),
    "running-sum": lambda: language(mlp=nn.Sequential(nn.Linear(WIDTH, 64), nn.Sigmoid(), Running(64, WIDTH))),
    "difference": lambda: language(mlp=Difference()),
    "tiny-gradients": tiny_gradients,
    "fp32": lambda: classified(Vision(), 3, 8, 8, dtype=None),
    "generator": lambda: classified(Noisy(), 8),
    "closure": closure,
}


def main(directory: Path) -> None:
    import precdoctor

    torch.set_num_threads(1)
    for name, run in CASES.items():
        torch.manual_seed(0)
        with precdoctor.record(directory / name, every=1, deep_scan=0, shadow="fp32", shadow_every=1):
            run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
