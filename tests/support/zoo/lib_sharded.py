"""Stand-ins for the optimizers of DeepSpeed 0.19.8 and Megatron-core 0.16.1; `make stacks` trains with the libraries.

Classes, attributes and the order of what a step does follow their source: ``deepspeed/runtime/zero/stage_1_and_2.py``,
``stage3.py``, ``runtime/fp16/loss_scaler.py``, ``utils/tensor_fragment.py``; ``megatron/core/optimizer/optimizer.py``,
``distrib_optimizer.py``, ``grad_scaler.py``. Each is the first of two ranks: it holds half of the FP32 copies,
and nothing is communicated.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor, nn

from tests.support.zoo import Trained, specimen

STEPS, RANKS = 12, 2


def library(name: str, *classes: type) -> None:
    """A module that is loaded, with these classes and stubs for those that it also has."""
    module = sys.modules.setdefault(name, ModuleType(name))
    for kind in classes:
        setattr(module, kind.__name__, kind)


class DynamicLossScaler:
    """DeepSpeed's, with a hysteresis of one."""

    def __init__(self, scale: float) -> None:
        self.cur_scale, self.cur_iter, self.last_overflow_iter = scale, 0, -1
        self.scale_factor, self.scale_window, self.min_scale = 2.0, 4, 1.0

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        elif (stable := self.cur_iter - self.last_overflow_iter - 1) > 0 and stable % self.scale_window == 0:
            self.cur_scale *= self.scale_factor
        self.cur_iter += 1


class LossScaler:
    """DeepSpeed's static one."""

    def __init__(self, scale: float) -> None:
        self.cur_scale = scale

    def update_scale(self, overflow: bool) -> None:
        pass


class DeepSpeedZeroOptimizer:
    """Stages 1 and 2: a flat FP32 partition per parameter group; the optimizer inside is stepped once per group."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: DynamicLossScaler | LossScaler) -> None:
        self.optimizer, self.loss_scaler = optimizer, scaler
        self.custom_loss_scaler, self.overflow, self._global_grad_norm = False, False, 0.0
        self.bit16_groups, self.single_partition_of_fp32_groups = [], []
        for group in optimizer.param_groups:
            weights = list(group["params"])
            whole = torch.cat([w.detach().reshape(-1) for w in weights])
            flat = whole[: whole.numel() // RANKS].clone().float().detach()
            start = 0
            for weight in weights:
                numel = max(0, min(weight.numel(), flat.numel() - start))
                address = SimpleNamespace(numel=numel, start=start)
                fragment = SimpleNamespace(hp_fragment=flat.narrow(0, start, numel), hp_fragment_address=address)
                weight._hp_mapping = fragment if numel else None
                start += numel
            flat.requires_grad = True
            group["params"] = [flat]
            self.bit16_groups.append(weights)
            self.single_partition_of_fp32_groups.append(flat)

    def step(self) -> None:
        gradients = [torch.cat([w.grad.reshape(-1) for w in group]) for group in self.bit16_groups]
        self.overflow = not all(bool(g.isfinite().all()) for g in gradients)
        scale = self.loss_scaler.cur_scale
        self.loss_scaler.update_scale(self.overflow)
        if not self.overflow:
            self._global_grad_norm = float(torch.cat(gradients).float().norm()) / scale
            for i, (flat, gradient) in enumerate(zip(self.single_partition_of_fp32_groups, gradients, strict=True)):
                flat.grad = gradient[: flat.numel()].float() / scale
                self._optimizer_step(i)
                flat.grad = None
                for weight in self.bit16_groups[i]:
                    if weight._hp_mapping is not None:
                        fragment = weight._hp_mapping.hp_fragment.detach()
                        weight.detach().view(-1)[: fragment.numel()].copy_(fragment)
        for group in self.bit16_groups:
            for weight in group:
                weight.grad = None

    def _optimizer_step(self, group: int) -> None:
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [groups[group]]
        self.optimizer.step()
        self.optimizer.param_groups = groups


class DeepSpeedEngine(nn.Module):
    """The wrapper."""

    def __init__(self, model: nn.Module, optimizer: DeepSpeedZeroOptimizer) -> None:
        super().__init__()
        self.module, self.optimizer = model, optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def backward(self, loss: Tensor) -> None:
        (loss * self.optimizer.loss_scaler.cur_scale).backward()

    def step(self) -> None:
        self.optimizer.step()


class DynamicGradScaler:
    """Megatron's, with a hysteresis of one."""

    def __init__(self, scale: float) -> None:
        self._scale, self._growth_tracker, self.growth_interval = torch.tensor([scale]), 0, 4

    def update(self, found_inf: bool) -> None:
        self._growth_tracker = 0 if found_inf else self._growth_tracker + 1
        if found_inf:
            self._scale = self._scale * 0.5
        elif self._growth_tracker == self.growth_interval:
            self._growth_tracker, self._scale = 0, self._scale * 2.0


class MixedPrecisionOptimizer:
    """With the shards of Megatron's DistributedOptimizer: none of them says that it needs a gradient."""

    def __init__(self, optimizer: torch.optim.Optimizer, grad_scaler: DynamicGradScaler) -> None:
        self.optimizer, self.grad_scaler = optimizer, grad_scaler
        self.weights = [w for group in optimizer.param_groups for w in group["params"]]
        left = sum(w.numel() for w in self.weights) // RANKS
        for weight in self.weights:
            own = min(weight.numel(), left)
            left -= own
            weight.main_param = weight.detach().view(-1)[:own].clone().float() if own else None
            weight.main_param_sharded = True
        self.held = [w for w in self.weights if w.main_param is not None]
        optimizer.param_groups[0]["params"] = [w.main_param for w in self.held]

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.grad_scaler._scale * loss

    def step(self) -> tuple[bool, float | None, int | None]:
        for weight in self.held:
            gradient = weight.grad.reshape(-1)[: weight.main_param.numel()]
            weight.main_param.grad = gradient.float() / self.grad_scaler._scale
        found_inf = not all(bool(w.main_param.grad.isfinite().all()) for w in self.held)
        self.grad_scaler.update(found_inf)
        if found_inf:
            return False, None, None
        norm = float(torch.cat([w.main_param.grad for w in self.held]).norm())
        self.optimizer.step()
        for weight in self.held:
            weight.detach().view(-1)[: weight.main_param.numel()].copy_(weight.main_param)
        return True, norm, 0


class FP32Optimizer:
    """Is there, and does nothing here."""


class ChainedOptimizer:
    """Steps what it chains as one."""

    def __init__(self, chained: list[MixedPrecisionOptimizer]) -> None:
        self.chained_optimizers = chained

    def step(self) -> tuple[bool, float | None, int | None]:
        return [each.step() for each in self.chained_optimizers][-1]


library("deepspeed.runtime.zero.stage_1_and_2", DeepSpeedZeroOptimizer)
library("megatron.core.optimizer.optimizer", MixedPrecisionOptimizer, FP32Optimizer, ChainedOptimizer)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    return nn.Sequential(*layers).half()


def batches():
    draws = torch.Generator().manual_seed(1)
    truth = torch.randn(32, 8, generator=draws)
    for _ in range(STEPS):
        x = torch.randn(32, 32, generator=draws)
        yield x.half(), (x @ truth).argmax(-1)


def zero(scaler: DynamicLossScaler | LossScaler) -> Trained:
    model = net()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=3e-3)
    engine = DeepSpeedEngine(model, DeepSpeedZeroOptimizer(optimizer, scaler))
    losses = []
    for x, y in batches():
        loss = nn.functional.cross_entropy(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def sharded_zero() -> Trained:
    return zero(DynamicLossScaler(2.0**12))


@specimen
def sharded_zero_overflows() -> Trained:
    return zero(LossScaler(2.0**30))


@specimen
def sharded_megatron() -> Trained:
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = ChainedOptimizer([MixedPrecisionOptimizer(inner, DynamicGradScaler(2.0**19))])
    losses = []
    for x, y in batches():
        loss = nn.functional.cross_entropy(model(x).float(), y)
        optimizer.chained_optimizers[0].scale_loss(loss).backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [model])
