"""A small training that stands for a team's smoke test, its healthy variations, and the regressions put into it.

Three recipes: ``fp32``, ``bf16`` (autocast) and ``fp16`` (autocast with a loss scaler). The model is a two-layer
transformer over patches of temperatures in kelvin, which nobody centred: the first norm does. Norms and softmax are
written out in FP32, so that a regression can change how they are computed without changing what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, PATCHES, POINTS, CLASSES, BATCH, STEPS = 64, 4, 2, 16, 48, 10, 16, 20
RECIPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Norm(nn.Module):
    """Layer normalisation in FP32, whatever autocast does around it."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            centred = x - x.mean(-1, keepdim=True)
            variance = centred.square().mean(-1, keepdim=True)
            return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class HalfNorm(Norm):
    """The same in half precision: parameters cast, statistics and result too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.half()
            return F.layer_norm(x, self.weight.shape, self.weight.half(), self.bias.half(), self.eps).float()


class OnePassNorm(Norm):
    """Variance as E[x^2] - E[x]^2."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            mean = x.mean(-1, keepdim=True)
            variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0.0)
            return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.softmax_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5).to(self.softmax_dtype)
        with torch.autocast("cpu", enabled=False):
            weights = torch.softmax(scores, -1).to(v.dtype)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, time, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = Norm(), Attention()
        self.norm2 = Norm()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre, self.patches = Norm(POINTS), nn.Linear(POINTS, WIDTH)
        self.position = nn.Parameter(torch.randn(PATCHES, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, CLASSES)

    def forward(self, fields: Tensor) -> Tensor:
        x = self.patches(self.centre(fields)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class NarrowLinear(nn.Linear):
    """A linear layer whose product is computed in another way."""

    how: Callable[[Tensor, Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, self.weight.to(x.dtype)) + self.bias.to(x.dtype)


def _tf32(x: Tensor, weight: Tensor) -> Tensor:
    """Operands rounded to ten mantissa bits, to nearest, as TF32 units take them."""

    def rounded(t: Tensor) -> Tensor:
        bits = t.detach().float().contiguous().view(torch.int32)
        bits = (bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF
        return t + (bits.view(torch.float32) - t.detach()).to(t.dtype)

    return F.linear(rounded(x), rounded(weight))


def _bf16_accumulation(x: Tensor, weight: Tensor) -> Tensor:
    """One term at a time, the running sum kept in BF16."""
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.bfloat16)
    for at in range(x.shape[-1]):
        total = (total.float() + x[..., at : at + 1].float() * weight[:, at].float()).bfloat16()
    return total.to(x.dtype)


class _E4M3Gradient(torch.autograd.Function):
    """Passes its input on; the gradient goes through E4M3 with the tensor's own scale."""

    @staticmethod
    def forward(_ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx, gradient: Tensor) -> Tensor:
        scale = 448.0 / gradient.float().abs().amax().clamp_min(1e-30)
        return ((gradient.float() * scale).to(torch.float8_e4m3fn).float() / scale).to(gradient.dtype)


def _e4m3_gradients(linear: nn.Linear) -> None:
    plain = linear.forward
    linear.forward = lambda x: _E4M3Gradient.apply(plain(x))  # what arrives at the layer's own gradients is E4M3


@dataclass(frozen=True)
class Regression:
    """One change that a pull request could bring.

    Attributes:
        apply: changes a module of the model; None: the change is in the scaler.
        modules: those it may be put into; the seed chooses.
        recipes: where it is a change at all.
    """

    name: str
    apply: Callable[[nn.Module], None] | None
    modules: Callable[[Net], list[str]]
    recipes: tuple[str, ...] = ("fp32", "bf16", "fp16")


def _of_class(kind: type[nn.Module]) -> Callable[[Net], list[str]]:
    return lambda net: [name for name, module in net.named_modules() if isinstance(module, kind)]


def _forward_of(kind: type[nn.Module]) -> Callable[[nn.Module], None]:
    def apply(module: nn.Module) -> None:
        module.forward = kind.forward.__get__(module)

    return apply


def _setting(name: str, value: object) -> Callable[[nn.Module], None]:
    return lambda module: setattr(module, name, value)


def _linear_with(how: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def apply(module: nn.Module) -> None:
        module.how = how
        module.forward = NarrowLinear.forward.__get__(module)

    return apply


REGRESSIONS = (
    Regression("LayerNorm in half", _forward_of(HalfNorm), _of_class(Norm)),
    Regression("eps 1e-5 to 1e-8", _setting("eps", 1e-8), _of_class(Norm)),
    Regression("softmax in BF16", _setting("softmax_dtype", torch.bfloat16), _of_class(Attention), ("fp32", "fp16")),
    Regression("loss scale from 2^24", None, lambda _: [""], ("fp16",)),
    Regression("variance E[x^2] - E[x]^2", _forward_of(OnePassNorm), lambda _: ["centre"]),
    Regression("accumulation in BF16", _linear_with(_bf16_accumulation), _of_class(nn.Linear)),
    Regression("E4M3 gradients", _e4m3_gradients, _of_class(nn.Linear)),
    Regression("TF32 rounding of one matmul", _linear_with(_tf32), _of_class(nn.Linear), ("fp32",)),
)


class FusedNorm(Norm):
    """The same norm by torch's own kernel."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)


class FusedAttention(Attention):
    """The same attention by torch's own kernel."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, time, WIDTH))


def _everywhere(old: type[nn.Module], new: type[nn.Module]) -> Callable[[nn.Module], None]:
    def apply(net: nn.Module) -> None:
        for module in net.modules():
            if isinstance(module, old):
                module.forward = new.forward.__get__(module)

    return apply


#: Healthy changes of code, everywhere at once: what a gate must not be red for.
REWRITES = (
    Regression("norms by F.layer_norm", _everywhere(Norm, FusedNorm), lambda _: [""]),
    Regression("attention by scaled_dot_product_attention", _everywhere(Attention, FusedAttention), lambda _: [""]),
)


def fields(seed: int) -> tuple[Tensor, Tensor]:
    """Patches of temperatures around 285 K that differ by a few kelvin, with a pattern per class."""
    world = torch.Generator().manual_seed(1234)
    patterns = torch.randn(CLASSES, PATCHES, POINTS, generator=world)
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (STEPS * BATCH,), generator=random)
    noise = torch.randn(STEPS * BATCH, PATCHES, POINTS, generator=random)
    return 285.0 + 2.0 * patterns[labels] + noise, labels


def train(recipe: str, seed: int, regression: Regression | None = None, steps: int = STEPS) -> tuple[Net, str]:
    """Train from ``seed``; returns the model and the module a regression changed."""
    torch.manual_seed(seed)
    net, changed = Net(), ""
    if regression is not None and regression.apply is not None:
        names = regression.modules(net)
        changed = names[seed % len(names)]
        regression.apply(net.get_submodule(changed))
    dtype = RECIPES[recipe]
    scale = 2.0**24 if regression is not None and regression.apply is None else 2.0**12
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=recipe == "fp16")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    inputs, labels = fields(seed)
    for step in range(steps):
        part = slice(step * BATCH, (step + 1) * BATCH)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = F.cross_entropy(net(inputs[part]).float(), labels[part])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return net, changed


@contextlib.contextmanager
def healthy_variation(number: int) -> Iterator[str]:
    """What may differ between two machines of a CI pool: threads, and which library multiplies matrices."""
    threads, mkldnn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1 + number % 2)
    torch.backends.mkldnn.enabled = number // 2 % 2 == 0
    try:
        yield f"{1 + number % 2} threads, oneDNN {'on' if number // 2 % 2 == 0 else 'off'}"
    finally:
        torch.set_num_threads(threads)
        torch.backends.mkldnn.enabled = mkldnn
