"""Stand-ins for Transformer Engine 2.18, which needs a GPU: its quantisers, their results, and modules that use them.

Classes, methods, attributes, layouts of scales and the order of calls follow the library's source at
tag v2.18 (``transformer_engine/pytorch``: ``quantized_tensor.py``, ``tensor/*.py``, ``module/linear.py``,
``ops/op.py``). The casts run in numpy, where no hook of torch's reaches, as the library's run in C++.
"""

from __future__ import annotations

import enum
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import Trained, fit, specimen

STEPS = 12


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


E4M3, E5M2, E2M1 = DType.kFloat8E4M3, DType.kFloat8E5M2, DType.kFloat4E2M1
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2, E2M1: ml_dtypes.float4_e2m1fn}
LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}


class Storage:
    """What a quantiser returns; ``values`` is what the products use, and nothing that the library has."""

    def __init__(self, values: Tensor, **held: Any) -> None:
        self.values = values
        vars(self).update(held)


class Quantizer:
    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def __call__(self, tensor: Tensor) -> Storage:
        return self.quantize(tensor)

    def quantize(self, tensor: Tensor, *, out: Storage | None = None, dtype: Any = None) -> Storage:
        return self.quantize_impl(tensor) if out is None else self.update_quantized(tensor, out)

    def update_quantized(self, src: Tensor, dst: Storage, *, noop_flag: Any = None) -> Storage:
        vars(dst).update(vars(self.quantize_impl(src)))
        return dst

    def _rounded(self, x: Tensor, by: Tensor) -> Tensor:
        scaled = (x.detach().float() * by).numpy().clip(-LARGEST[self.dtype], LARGEST[self.dtype])
        return torch.from_numpy(scaled.astype(NUMPY[self.dtype]).astype(np.float32)) / by


class Float8Quantizer(Quantizer):
    """Delayed scaling: the scale is kept elsewhere, and the amax is left there."""

    def __init__(self, scale: Tensor, amax: Tensor, dtype: DType) -> None:
        super().__init__(dtype)
        self.scale, self.amax = scale, amax

    def quantize_impl(self, x: Tensor) -> Storage:
        self.amax.copy_(x.detach().abs().amax().reshape(1))
        values = self._rounded(x, self.scale)
        return Storage(values, _scale_inv=(1.0 / self.scale).reshape(1), _fp8_dtype=self.dtype)


class Float8CurrentScalingQuantizer(Quantizer):
    def quantize_impl(self, x: Tensor) -> Storage:
        scale = LARGEST[self.dtype] / x.detach().abs().amax().float()
        return Storage(self._rounded(x, scale), _scale_inv=(1.0 / scale).reshape(1), _fp8_dtype=self.dtype)


def blocks_of(x: Tensor, columns: int, rows: int = 1) -> Tensor:
    """amax of each block, as rows and columns."""
    flat = x.detach().float().reshape(-1, x.shape[-1])
    high, wide = math.ceil(flat.shape[0] / rows), math.ceil(flat.shape[1] / columns)
    padded = F.pad(flat, (0, wide * columns - flat.shape[1], 0, high * rows - flat.shape[0]))
    return padded.reshape(high, rows, wide, columns).abs().amax(dim=(1, 3))


def spread(by: Tensor, x: Tensor, columns: int, rows: int = 1) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    wide = by.repeat_interleave(rows, 0)[: flat.shape[0]].repeat_interleave(columns, 1)[:, : flat.shape[1]]
    return wide.reshape(x.shape)


def padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Up to multiples of so many, with what the library leaves uninitialised."""
    return F.pad(scales, (0, -scales.shape[1] % columns, 0, -scales.shape[0] % rows), value=77)


class Float8BlockQuantizer(Quantizer):
    def __init__(self, dtype: DType, *, block_scaling_dim: int = 2, too_large: float = 1.0) -> None:
        super().__init__(dtype)
        self.block_len, self.block_scaling_dim, self.too_large = 128, block_scaling_dim, too_large

    def quantize_impl(self, x: Tensor) -> Storage:
        rows = 128 if self.block_scaling_dim == 2 else 1
        scale = torch.exp2(torch.floor(torch.log2(LARGEST[self.dtype] / blocks_of(x, 128, rows)))) * self.too_large
        inverse = 1.0 / scale
        kept = padded(inverse, 1, 4) if rows == 128 else padded(inverse.t(), 1, 4)
        return Storage(
            self._rounded(x, spread(scale, x, 128, rows)),
            _rowwise_scale_inv=kept, _is_2D_scaled=rows == 128, _fp8_dtype=self.dtype,
        )  # fmt: skip


def swizzled(scales: Tensor) -> Tensor:
    """In the order in which a matrix unit reads them, element by element as its manual has it."""
    rows, columns = scales.shape
    found = torch.empty_like(scales).reshape(-1)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * (columns // 4) + c // 4
            found[tile * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scales[r, c]
    return found.reshape(rows, columns)


class MXFP8Quantizer(Quantizer):
    def __init__(self, dtype: DType, *, optimize_for_gemm: bool = False) -> None:
        super().__init__(dtype)
        self.optimize_for_gemm = optimize_for_gemm

    def quantize_impl(self, x: Tensor) -> Storage:
        exponent = torch.ceil(torch.log2(blocks_of(x, 32) / LARGEST[self.dtype])).clamp(-127, 127)
        kept = padded((exponent + 127).to(torch.uint8), 128, 4)
        return Storage(
            self._rounded(x, spread(torch.exp2(-exponent), x, 32)),
            _rowwise_scale_inv=swizzled(kept) if self.optimize_for_gemm else kept,
            _with_gemm_swizzled_scales=self.optimize_for_gemm, _fp8_dtype=self.dtype,
        )  # fmt: skip


class NVFP4Quantizer(Quantizer):
    def quantize_impl(self, x: Tensor) -> Storage:
        amax = x.detach().abs().amax().float()
        outer = amax / (6.0 * 448.0)
        scales = (blocks_of(x, 16) / 6.0 / outer).numpy().astype(ml_dtypes.float8_e4m3fn)
        divisors = torch.from_numpy(scales.astype(np.float32)) * outer
        return Storage(
            self._rounded(x, spread(1.0 / divisors, x, 16)),
            _rowwise_scale_inv=padded(torch.from_numpy(scales.view(np.uint8)), 128, 4),
            _amax_rowwise=amax.reshape(1), _with_gemm_swizzled_scales=False, _nvfp4_e4m3_max=448, _fp4_dtype=self.dtype,
        )  # fmt: skip


class CurrentScalingQuantizerRef(Quantizer):
    """Of a custom recipe, as ``custom_recipes/quantization_ref_current_scaling.py``: torch casts, nothing is fused."""

    def quantize(self, tensor: Tensor, **_: Any) -> Storage:
        return self.quantize_impl(tensor)

    def quantize_impl(self, tensor: Tensor) -> Storage:
        dtype = torch.float8_e5m2 if self.dtype is E5M2 else torch.float8_e4m3fn
        amax = torch.amax(torch.abs(tensor.detach())).view(1).to(torch.float32)
        scale = LARGEST[self.dtype] / amax
        data = (tensor.detach().float() * scale).to(dtype)
        return Storage(data.float() / scale, data=data, scale=1.0 / scale, quant_dtype=dtype)


#: Where the recorder looks for the base class: ``transformer_engine.pytorch.quantized_tensor``.
_package = types.ModuleType("transformer_engine.pytorch.quantized_tensor")
_package.Quantizer = Quantizer
sys.modules[_package.__name__] = _package


# --- modules ----------------------------------------------------------------------------------------------------------

Role = Callable[[str], Quantizer]


class _Product(torch.autograd.Function):
    """The order of calls of ``module/linear.py``; a weight's copy is made once, and updated from then on."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        inputs = layer.quantizers["input"](x)
        if layer.workspace is None:
            layer.workspace = layer.quantizers["weight"].quantize(weight)
        else:
            layer.quantizers["weight"].update_quantized(weight, layer.workspace)
        ctx.save_for_backward(inputs.values, layer.workspace.values.clone())
        ctx.layer = layer
        return inputs.values @ layer.workspace.values.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        narrow = ctx.layer.quantizers["grad_output"](gradient.contiguous()).values
        return narrow @ weight, narrow.t() @ x, None


class EngineLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, quantizer: Role) -> None:
        super().__init__(inputs, outputs)
        self.quantizers = {role: quantizer(role) for role in ("input", "weight", "grad_output")}
        self.workspace = None

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight, self) + self.bias


class DelayedState:
    """``DelayedScalingRecipeState``."""

    def __init__(self, number: int) -> None:
        self.scale, self.amax_history = torch.ones(number), torch.zeros(16, number)

    def quantizer(self, i: int, dtype: DType) -> Float8Quantizer:
        return Float8Quantizer(self.scale[i], self.amax_history[0][i].reshape((1,)), dtype)

    def update(self, dtype: DType) -> None:
        amax = self.amax_history.amax(0)
        self.scale.copy_(torch.where(amax > 0, LARGEST[dtype] / amax, self.scale))
        self.amax_history.copy_(self.amax_history.roll(1, 0))
        self.amax_history[0] = 0.0


class DelayedOp(EngineLinear):
    """``ops.BasicLinear`` under delayed scaling: its states are in ``_fp8_metas``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        forward, backward = DelayedState(2), DelayedState(1)
        made = {
            "input": forward.quantizer(0, E4M3), "weight": forward.quantizer(1, E4M3),
            "grad_output": backward.quantizer(0, E5M2),
        }  # fmt: skip
        super().__init__(inputs, outputs, made.__getitem__)
        self._fp8_metas = {"forward": {"scaling_fwd": forward}, "backward": {"scaling_bwd": backward}}

    def update(self) -> None:
        self._fp8_metas["forward"]["scaling_fwd"].update(E4M3)
        self._fp8_metas["backward"]["scaling_bwd"].update(E5M2)


def trained(linear: Callable[[int, int], nn.Module], jump: float = 1.0, **how: Any) -> Trained:
    """A classifier; with ``jump``, batches are so many times as large on every third step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        linear(128, 256), nn.GELU(), nn.LayerNorm(256), linear(256, 128), nn.GELU(), nn.Linear(128, 16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    prototypes, step = torch.randn(16, 128), 0

    def loss() -> Tensor:
        nonlocal step
        step += 1
        targets = torch.randint(0, 16, (128,))
        x = prototypes[targets] + 0.3 * torch.randn(128, 128)
        return F.cross_entropy(model(x * (jump ** (step // 3) if step % 3 == 0 else 1.0)), targets)

    def update(_step: int) -> None:
        for layer in model:
            if isinstance(layer, DelayedOp):
                layer.update()

    return Trained(fit(model, optimizer, loss, steps=STEPS, before_step=update, **how), [model])


def with_quantizer(forward: Callable[[], Quantizer], backward: Callable[[], Quantizer] | None = None) -> Trained:
    backward = forward if backward is None else backward
    role: Role = lambda name: backward() if name == "grad_output" else forward()  # noqa: E731
    return trained(lambda i, o: EngineLinear(i, o, role))


@specimen
def te_current() -> Trained:
    return with_quantizer(lambda: Float8CurrentScalingQuantizer(E4M3), lambda: Float8CurrentScalingQuantizer(E5M2))


@specimen
def te_custom() -> Trained:
    return with_quantizer(lambda: CurrentScalingQuantizerRef(E4M3), lambda: CurrentScalingQuantizerRef(E5M2))


@specimen
def te_delayed_ops() -> Trained:
    return trained(DelayedOp)


class FusedLinear(DelayedOp):
    """As ``LayerNormLinear``: kernels cast the normalised input and the gradient; no Python sees it."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.quantizers["weight"](self.weight).values
        return F.linear(F.layer_norm(x, x.shape[-1:]), self.weight + (weight - self.weight).detach(), self.bias)


@specimen
def te_fused() -> Trained:
    return trained(FusedLinear)


@specimen
def te_delayed_ops_stale() -> Trained:
    """Every third batch is 16 times as large as the one of that kind before: no history knows it."""
    return trained(DelayedOp, jump=16.0)


@specimen
def te_blocks() -> Trained:
    return with_quantizer(lambda: Float8BlockQuantizer(E4M3), lambda: Float8BlockQuantizer(E4M3, block_scaling_dim=1))


@specimen
def te_blocks_saturated() -> Trained:
    return with_quantizer(lambda: Float8BlockQuantizer(E4M3, too_large=16.0))


@specimen
def te_mxfp8() -> Trained:
    return with_quantizer(lambda: MXFP8Quantizer(E4M3))


@specimen
def te_mxfp8_swizzled() -> Trained:
    return with_quantizer(lambda: MXFP8Quantizer(E4M3, optimize_for_gemm=True))


@specimen
def te_nvfp4() -> Trained:
    return with_quantizer(lambda: NVFP4Quantizer(E2M1))
