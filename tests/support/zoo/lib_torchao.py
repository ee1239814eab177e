"""Training with torchao, for real (0.18 on a CPU): FP8, MX formats, quantised optimizer state, fake quantisation.

What needs a GPU's matrix unit is emulated, by the library's own options. Its optimizers compile their step; the eager
backend of ``torch.compile`` runs the same ops here without a C++ compiler.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torchao.float8.float8_utils
import torchao.optim
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.prototype.qat.mx import MXFakeQuantizeConfig, MXFakeQuantizedLinear
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup, PerTensor, quantize_
from torchao.quantization.qat import Float8FakeQuantizeConfig, QATConfig
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from tests.support.zoo import Trained, fit, specimen

#: More than any step of a warm-up, and a step after which state is recorded (8).
STEPS = 12


def classifier(linear: Callable[[int, int], nn.Module] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        linear(64, 128), nn.GELU(), nn.LayerNorm(128), linear(128, 64), nn.GELU(), nn.Linear(64, 16)
    )  # fmt: skip


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **how) -> Trained:
    prototypes = torch.randn(16, 64)

    def loss() -> Tensor:
        targets = torch.randint(0, 16, (32,))
        return F.cross_entropy(model(prototypes[targets] + 0.3 * torch.randn(32, 64)), targets)

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3) if optimizer is None else optimizer
    return Trained(fit(model, optimizer, loss, steps=STEPS, **how), [model])


# --- FP8 -------------------------------------------------------------------------------------------------------------


def float8(recipe: str) -> nn.Module:
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return convert_to_float8_training(classifier(), config=config, module_filter_fn=lambda _, name: name != "5")


@specimen
def torchao_float8_tensorwise() -> Trained:
    return trained(float8("tensorwise"))


@specimen
def torchao_float8_rowwise() -> Trained:
    return trained(float8("rowwise"))


@specimen
def torchao_float8_scaled_mm() -> Trained:
    """Not emulated: the CPU has a kernel for it."""
    return trained(convert_to_float8_training(classifier(), module_filter_fn=lambda _, name: name != "5"))


def with_wrong_scale(factor: float, train: Callable[[], Trained]) -> Trained:
    utilities = torchao.float8.float8_utils
    right = utilities.amax_to_scale
    utilities.amax_to_scale = lambda *args, **kwargs: right(*args, **kwargs) * factor
    try:
        return train()
    finally:
        utilities.amax_to_scale = right


@specimen
def torchao_float8_scale_too_large() -> Trained:
    return with_wrong_scale(2.0**4, lambda: trained(float8("tensorwise")))


@specimen
def torchao_float8_rowwise_scale_too_small() -> Trained:
    return with_wrong_scale(2.0**-14, lambda: trained(float8("rowwise")))


# --- MX --------------------------------------------------------------------------------------------------------------


class MXLinear(nn.Linear):
    """Every operand of the three products in MXFP8; the library's own linear layer casts one of them on a GPU only."""

    def forward(self, x: Tensor) -> Tensor:
        kernels = MXFP8Dim0CastKernelChoice.TORCH, MXFP8Dim1CastKernelChoice.TORCH
        formats = (torch.float8_e4m3fn,) * 3
        how = *formats, 32, KernelPreference.EMULATED, *kernels, ScaleCalculationMode.RCEIL, False
        return mx_mm.apply(x, self.weight, *how) + self.bias


@specimen
def torchao_mxfp8() -> Trained:
    return trained(classifier(MXLinear))


@specimen
def torchao_mxfp4() -> Trained:
    config = MXFakeQuantizeConfig(dtype=torch.float4_e2m1fn_x2)
    return trained(classifier(lambda i, o: MXFakeQuantizedLinear(i, o, True, config, config)))


class NVFP4Linear(nn.Linear):
    """Operands rounded to NVFP4 and back, with a scale per tensor and one per 16 elements; gradients pass."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self._rounded(x), self._rounded(self.weight), self.bias)

    @staticmethod
    def _rounded(x: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(x.detach().abs().amax())
        return x + (NVFP4Tensor.to_nvfp4(x.detach(), per_tensor_scale=scale).dequantize() - x).detach()


@specimen
def torchao_nvfp4() -> Trained:
    return trained(classifier(NVFP4Linear))


# --- optimizers ------------------------------------------------------------------------------------------------------


def with_optimizer(kind: type, before_step: Callable[[torch.optim.Optimizer], None] | None = None) -> Trained:
    compiled = torch.compile
    torch.compile = functools.partial(torch.compile, backend="eager")
    try:
        model = classifier()
        optimizer = kind(model.parameters(), 1e-3)
        how = {} if before_step is None else {"before_step": lambda _: before_step(optimizer)}
        return trained(model, optimizer, **how)
    finally:
        torch.compile = compiled


@specimen
def torchao_adamw8bit() -> Trained:
    return with_optimizer(torchao.optim.AdamW8bit)


@specimen
def torchao_adamw4bit() -> Trained:
    return with_optimizer(torchao.optim.AdamW4bit)


@specimen
def torchao_adamwfp8() -> Trained:
    return with_optimizer(torchao.optim.AdamWFp8)


@specimen
def torchao_adamwfp8_outliers() -> Trained:
    """One element of every block has a gradient 1e5 times as large: the squares of the others become zero."""

    def spike(optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.numel() >= 4096:
                parameter.grad.view(-1)[::256] *= 1e5

    return with_optimizer(torchao.optim.AdamWFp8, spike)


# --- fake quantisation -----------------------------------------------------------------------------------------------


@specimen
def torchao_qat_int4() -> Trained:
    model = classifier()
    config = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))
    quantize_(model, QATConfig(config, step="prepare"))
    return trained(model)


@specimen
def torchao_qat_float8() -> Trained:
    """In 0.18 the gradient goes back through the cast, without a scale: it is all zero in E4M3."""
    model = classifier()
    config = Float8FakeQuantizeConfig(granularity=PerTensor())
    quantize_(model, QATConfig(activation_config=config, weight_config=config, step="prepare"))
    return trained(model)
