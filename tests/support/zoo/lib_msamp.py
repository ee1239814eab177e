"""Stand-ins for MS-AMP 0.4.0, which needs a GPU and a build of its own.

Classes, attributes and the order of casts follow the library's source at tag v0.4.0 (``msamp/common/tensor/``,
``msamp/nn/linear.py``, ``msamp/nn/functional.py``, ``msamp/optim/adamw_base.py``): weights in FP16 with a scaling
factor, gradients of weights in E4M3, the first moment in E4M3 and the second in FP16, each with a factor of its own.
Casts to FP8 run in numpy, where no hook of torch's reaches, as the library's run in C++.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import defaultdict
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import Trained, fit, specimen

STEPS = 12


@dataclasses.dataclass(frozen=True)
class QType:
    name: str


E4M3, E5M2, FP16, FP32 = map(QType, ("kFloat8E4M3", "kFloat8E5M2", "kFloat16", "kFloat32"))
LARGEST = {E4M3: 448.0, E5M2: 57344.0, FP16: 65504.0}
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}


class ScalingMeta:
    def __init__(self, qtype: QType) -> None:
        self.qtype = qtype
        self.scale, self.scale_inv, self.amax = torch.ones(()), torch.ones(()), torch.zeros(1)

    def reset_scaling_factor(self) -> None:
        """The largest power of two that keeps amax in range."""
        if self.amax[0] > 0:
            self.scale.copy_(torch.exp2(torch.floor(torch.log2(LARGEST[self.qtype] / self.amax[0]))))


class TypeCast:
    @staticmethod
    def cast_to_fp8(input, meta, sync=False, fuse_transpose=False):  # noqa: A002 - the library's names
        meta.amax[0] = input.detach().abs().max()
        meta.reset_scaling_factor()
        meta.scale_inv.copy_(1.0 / meta.scale)
        scaled = (input.detach().float() * meta.scale).numpy()
        return torch.from_numpy(scaled.astype(NUMPY[meta.qtype]).view(np.uint8))

    @staticmethod
    def cast_to_fp16(input, meta, sync=False):  # noqa: A002 - the library's names
        meta.amax[0] = input.detach().abs().max()
        meta.reset_scaling_factor()
        meta.scale_inv.copy_(1.0 / meta.scale)
        return (input * meta.scale.view((1,))).to(torch.float16)


class ScalingTensor:
    """No tensor of torch's."""

    def __init__(self, value: Tensor, meta: ScalingMeta) -> None:
        self.value, self.meta, self._grad, self._requires_grad = value, meta, None, False

    @property
    def grad(self):
        return self._grad

    @grad.setter
    def grad(self, grad) -> None:
        self._grad = grad

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    def float(self) -> Tensor:
        value = self.value
        if self.meta.qtype in NUMPY:
            value = torch.from_numpy(value.numpy().view(NUMPY[self.meta.qtype]).astype(np.float32))
        return value.float() * self.meta.scale_inv

    def copy_(self, source: ScalingTensor) -> None:
        self.value.copy_(source.value)
        self.meta.scale.copy_(source.meta.scale)
        self.meta.scale_inv.copy_(source.meta.scale_inv)


class ScalingParameter(ScalingTensor):
    def __init__(self, tensor: ScalingTensor) -> None:
        super().__init__(tensor.value, tensor.meta)
        self._is_param, self._requires_grad = True, True


def cast(x: Tensor, qtype: QType, meta: ScalingMeta | None = None) -> ScalingTensor:
    """``Tensor.cast`` of the library."""
    meta = ScalingMeta(qtype) if meta is None else meta
    return ScalingTensor((TypeCast.cast_to_fp8 if qtype in NUMPY else TypeCast.cast_to_fp16)(x, meta), meta)


for _kind, _module in (
    (TypeCast, "msamp.common.tensor.cast"), (ScalingTensor, "msamp.common.tensor.tensor"),
    (ScalingParameter, "msamp.nn.parameter"),
):  # fmt: skip
    _kind.__module__ = _module
    sys.modules[_module] = types.ModuleType(_module)
    setattr(sys.modules[_module], _kind.__name__, _kind)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, holder, layer):
        metas = layer.scaling_metas
        narrow = cast(x, E4M3, metas["input"]).float()
        weight = cast(layer.weight.float(), E4M3).float()
        ctx.save_for_backward(narrow, weight)
        ctx.layer = layer
        return narrow @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        metas = ctx.layer.scaling_metas
        narrow = cast(gradient.contiguous(), E5M2, metas["ograd"]).float()
        ctx.layer.weight.grad = cast(narrow.t() @ x, E4M3, metas["wgrad"])
        return narrow @ weight, None, None


class FP8Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        made = nn.Linear(inputs, outputs)
        self.weight = ScalingParameter(cast(made.weight.detach(), FP16))
        self.bias = nn.Parameter(made.bias.detach().clone())
        self.scaling_metas = {"input": ScalingMeta(E4M3), "wgrad": ScalingMeta(E4M3), "ograd": ScalingMeta(E5M2)}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ScalingParameter):
            self._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, torch.zeros((), requires_grad=True), self) + self.bias


class LBAdamW(torch.optim.Optimizer):
    def __init__(self, params, lr: float, *, exp_avg: QType = E4M3, exp_avg_sq: QType = FP16) -> None:
        self.qtypes = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self.param_groups, self.state = [], defaultdict(dict)
        torch.optim.Optimizer.__init__(
            self, [torch.zeros(1)], {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        )
        self.param_groups[0]["params"] = list(params)

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            param, grad = p.float(), p.grad.float()
            if not state:
                state["step"] = 0
                for key, qtype in self.qtypes.items():
                    state[key] = cast(torch.zeros_like(param), qtype)
            state["step"] += 1
            first, second = state["exp_avg"].float(), state["exp_avg_sq"].float()
            first.mul_(beta1).add_(grad, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = (second.sqrt() / (1 - beta2 ** state["step"]) ** 0.5).add_(group["eps"])
            new = param.addcdiv(first, denominator, value=-group["lr"] / (1 - beta1 ** state["step"]))
            if isinstance(p, ScalingParameter):
                p.copy_(cast(new, FP16))
            else:
                p.copy_(new)
            for key, value in (("exp_avg", first), ("exp_avg_sq", second)):
                state[key].copy_(cast(value, self.qtypes[key]))


def trained(columns: float = 1.0, **qtypes: QType) -> Trained:
    """A classifier; the first feature of its batches is ``columns`` times as large as the others."""
    torch.manual_seed(0)
    model = nn.Sequential(FP8Linear(128, 64), nn.GELU(), nn.LayerNorm(64), FP8Linear(64, 16))
    optimizer = LBAdamW(model.parameters(), 1e-3, **qtypes)
    prototypes = torch.randn(16, 128)
    large = torch.ones(128)
    large[0] = columns

    def loss() -> Tensor:
        targets = torch.randint(0, 16, (64,))
        return F.cross_entropy(model((prototypes[targets] + 0.3 * torch.randn(64, 128)) * large), targets)

    losses = fit(model, optimizer, loss, steps=STEPS)
    end = nn.Module()
    for i, p in enumerate(model.parameters()):
        end.register_buffer(f"p{i}", p.float().detach().clone())
        for key in ("exp_avg", "exp_avg_sq"):
            end.register_buffer(f"{key}{i}", optimizer.state[p][key].float())
    return Trained(losses, [end])


@specimen
def msamp_o2() -> Trained:
    return trained()


@specimen
def msamp_lost_state() -> Trained:
    """The second moment in E4M3, under a feature whose gradients are thousands of times as large."""
    return trained(columns=4000.0, exp_avg_sq=E4M3)
