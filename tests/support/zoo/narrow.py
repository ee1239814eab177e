"""Training with casts to float8: by hand, delayed and current scaling, straight through and with FP8 gradients."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.zoo import Trained, fit, specimen, specimen_if

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Witness:
    """Keeps what one step casts, in the script's own copy: what the rows are compared with."""

    def __init__(self, step: int) -> None:
        self.step, self._wanted, self._arrays = 0, step, {}

    def saw(self, name: str, x: Tensor, scale: Tensor) -> None:
        if self.step == self._wanted:
            self._arrays[name] = np.array((x * scale).detach().tolist(), np.float64)
            self._arrays[f"{name} scale"] = np.array(scale.item())

    def save(self, model: str) -> None:
        if directory := os.environ.get("ZOO_ORACLE"):
            np.savez(Path(directory) / f"{model}.npz", **self._arrays)


WITNESS = Witness(step=2)


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The idiom: scale, clamp, cast."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype)


class _FP8Product(torch.autograd.Function):
    """``x @ w.T`` of quantised operands; the gradient is quantised on its way back."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        scale_x, scale_w = layer.scale("input", x), layer.scale("weight", weight)
        WITNESS.saw(f"{layer.name} input", x, scale_x)
        WITNESS.saw(f"{layer.name} weight", weight, scale_w)
        x8, w8 = quantise(x, scale_x, E4M3), quantise(weight, scale_w, E4M3)
        ctx.save_for_backward(x8, w8, scale_x, scale_w)
        ctx.layer = layer
        return (x8.float() / scale_x) @ (w8.float() / scale_w).t()

    @staticmethod
    def backward(ctx, gradient):
        x8, w8, scale_x, scale_w = ctx.saved_tensors
        scale = ctx.layer.scale("grad_output", gradient)
        WITNESS.saw(f"{ctx.layer.name} grad_output", gradient, scale)
        narrow = quantise(gradient, scale, E5M2).float() / scale
        flat = narrow.flatten(0, -2)
        return narrow @ (w8.float() / scale_w), flat.t() @ (x8.float() / scale_x).flatten(0, -2), None


class DelayedLinear(nn.Module):
    """FP8 with the scales of the steps before (delayed scaling): a history of amax per operand."""

    def __init__(self, name: str, inputs: int, outputs: int, length: int = 4) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        for operand in ("input", "weight", "grad_output"):
            self.register_buffer(f"{operand}_amax_history", torch.zeros(length))

    def scale(self, operand: str, x: Tensor) -> Tensor:
        history = getattr(self, f"{operand}_amax_history")
        largest = torch.finfo(E5M2 if operand == "grad_output" else E4M3).max
        amax = history.amax()
        history.copy_(history.roll(1))
        history[0] = x.detach().abs().amax()
        return torch.where(amax > 0, largest / amax, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return _FP8Product.apply(x, self.weight, self)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = DelayedLinear("up", 16, 32), nn.LayerNorm(32), DelayedLinear("down", 32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


@specimen
def fp8_delayed() -> Trained:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss() -> Tensor:
        spread = 40.0 if WITNESS.step == 2 else 1.0  # the scale is stale: it clips
        return F.cross_entropy(model(torch.randn(64, 16) * spread), torch.randint(0, 8, (64,)))

    def next_step(step: int) -> None:
        WITNESS.step = step + 1

    losses = fit(model, optimizer, loss, steps=4, before_step=next_step)
    WITNESS.save("fp8_delayed")
    return Trained(losses, [model])


class StraightThrough(nn.Module):
    """Quantise and back with the scale of this very tensor; the gradient passes."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = 448.0 / x.abs().amax().float().clamp_min(1e-12)
            seen = quantise(x.float(), scale, E4M3).to(torch.float32) / scale
        return x + (seen.to(x.dtype) - x).detach()


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quantise, self.linear = StraightThrough(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.quantise(x)))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Mixer() for _ in range(2)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@specimen
def fp8_checkpointed() -> Trained:
    """Current scaling in BF16 autocast, recomputed, over two micro-steps."""
    torch.manual_seed(0)
    model = Checkpointed()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randn(32, 16)).float(), torch.randint(0, 4, (32,)))

    return Trained(fit(model, optimizer, loss, accumulate=2, autocast=torch.bfloat16, clip=1.0), [model])


def multiplies_float8() -> bool:
    """Whether this torch multiplies float8 matrices on a CPU; 2.6 does not."""
    x, one = torch.ones(16, 16).to(E4M3), torch.ones(())
    try:
        torch._scaled_mm(x, x.t(), one, one, out_dtype=torch.float32)
    except NotImplementedError:
        return False
    return True


class ScaledProduct(nn.Module):
    """Casts where nothing tells the scale but the product's own arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 16) / 4.0)

    def forward(self, x: Tensor) -> Tensor:
        x8 = torch.addcmul(torch.zeros(()), x.detach(), torch.full((), 4.0)).to(E4M3)
        w8 = torch.addcmul(torch.zeros(()), self.weight.detach(), torch.full((), 64.0)).to(E4M3)
        inverse = torch.tensor(1 / 4.0), torch.tensor(1 / 64.0)
        seen = torch._scaled_mm(x8, w8.t(), *inverse, out_dtype=torch.float32, use_fast_accum=True)
        exact = x @ self.weight.t()
        return exact + (seen - exact).detach()


@specimen_if(multiplies_float8())
def fp8_scaled_mm() -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(ScaledProduct(), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return Trained(fit(model, optimizer, lambda: model(torch.randn(16, 16)).square().mean()), [model])


class Products(torch.autograd.Function):
    """The three products of a linear layer in float8, the last one with fast accumulation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_product(x, weight, E4M3, fast=False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return scaled_product(grad, weight.t(), E5M2, fast=False), scaled_product(grad.t(), x.t(), E5M2, fast=True)


def scaled_product(a: Tensor, b: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """``a @ b.T``, both scaled by their amax."""
    scales = [torch.finfo(d).max / x.abs().amax() for x, d in ((a, dtype), (b, E4M3))]
    a8, b8 = (a * scales[0]).to(dtype).contiguous(), (b * scales[1]).to(E4M3).contiguous()
    inverse = (1 / s for s in scales)
    return torch._scaled_mm(a8, b8.t(), *inverse, out_dtype=torch.float32, use_fast_accum=fast)


class ThreeProducts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 48) / 7.0)

    def forward(self, x: Tensor) -> Tensor:
        return Products.apply(x, self.weight)


@specimen_if(multiplies_float8())
def fp8_three_products() -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 48), ThreeProducts(), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return Trained(fit(model, optimizer, lambda: model(torch.randn(32, 16)).square().mean()), [model])


@torch.compile(fullgraph=True, backend="aot_eager")
def _compiled_quantise(x: Tensor) -> Tensor:
    scale = 448.0 / x.abs().amax()
    return quantise(x, scale, E4M3).float() / scale


class HalfCompiled(nn.Module):
    """Casts by itself, and calls a compiled function that does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = _compiled_quantise(x) + (x * 2.0).to(E5M2).float() / 2.0
        return self.linear(x + (seen / 2 - x).detach())


@specimen
def fp8_compiled() -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(
        HalfCompiled(), nn.ReLU(), torch.compile(HalfCompiled(), backend="aot_eager"), nn.Linear(16, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return Trained(fit(model, optimizer, lambda: model(torch.randn(16, 16)).square().mean()), [model])


class Oddities(nn.Module):
    """A buffer in float8, scales per row, no scale, an unusual clamp, and an exception half of the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(16, 16), False
        self.register_buffer("cache", torch.zeros(8, 16, dtype=E4M3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.cache.copy_(x * 8.0)
            rows = (x * (448.0 / x.abs().amax(dim=1, keepdim=True))).to(E4M3)
            bare = x.type(E5M2)
            if self.fails:
                raise ValueError("half of the way")
            clipped = torch.minimum(torch.maximum(x * 1000.0, torch.tensor(-448.0)), torch.tensor(448.0)).to(E4M3)
            seen = self.cache.float() / 8.0 + bare.float() + (rows.float() + clipped.float()) * 0.0
        return self.linear(x + (seen / 2 - x).detach())


@specimen
def fp8_oddities() -> Trained:
    """Also with casts outside of all modules, before and after training."""
    torch.manual_seed(0)
    model = Oddities()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def loss() -> Tensor:
        model.fails = True
        with contextlib.suppress(ValueError):
            model(torch.randn(8, 16))
        model.fails = False
        x = torch.randn(8, 16)
        return model((x * 16.0).to(E4M3).float() / 16.0).square().mean()

    losses = fit(model, optimizer, loss)
    with torch.no_grad():
        exported = model.linear.weight.to(E4M3)
    assert exported.dtype == E4M3
    return Trained(losses, [model])


class Cached(nn.Module):
    """Casts by copying into a float8 buffer, and in no other way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("cache", torch.zeros(16, 16, dtype=E5M2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.cache.copy_(self.linear.weight * 4.0)
            seen = self.cache.float() / 4.0
        return F.linear(x, self.linear.weight + (seen - self.linear.weight).detach())


@specimen
def fp8_cached() -> Trained:
    torch.manual_seed(0)
    model = Cached()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return Trained(fit(model, optimizer, lambda: model(torch.randn(8, 16)).square().mean()), [model])


class State:
    """As Transformer Engine's delayed scaling has it: per operand a scale, and a column of the history."""

    def __init__(self, operands: int) -> None:
        self.scale, self.amax_history = torch.ones(operands), torch.zeros(4, operands)


class EngineLinear(nn.Linear):
    """Stands in for ``transformer_engine.pytorch.Linear``, whose casts happen where no hook reaches."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.fp8_meta = {"scaling_fwd": State(3), "scaling_bwd": State(2), "recipe": object()}

    def forward(self, x: Tensor) -> Tensor:
        state = self.fp8_meta["scaling_fwd"]
        state.amax_history[0, :2] = torch.stack([x.detach().abs().amax(), self.weight.detach().abs().amax()])
        state.scale[:2] = 448.0 / state.amax_history[0, :2]
        return super().forward(x)


@specimen
def engines() -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(EngineLinear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trained(fit(model, optimizer, lambda: model(torch.randn(32, 16)).square().mean()), [model])
