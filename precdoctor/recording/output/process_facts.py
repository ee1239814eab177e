"""Facts of the process for rank.json: module trees, optimizers, scalers, torch's numeric flags, versions, devices."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from precdoctor._version import __version__
from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import LONGEST_NAME, Names, Root
from precdoctor.recording.model.optimizer_contents import groups_of, parameters_in, steps_made
from precdoctor.recording.ops.tensor_facts import dtype_name
from precdoctor.recording.output.parallel_layout import LayoutReader
from precdoctor.recording.process import attach
from precdoctor.recording.slots.deferred import defer, is_capturing, read
from precdoctor.runlog.caps import shortened
from precdoctor.runlog.files import SCHEMA_VERSION

#: Maximum number of a group's unused parameters whose shapes are listed.
_MAX_UNUSED = 64
#: Maximum number of products of float8 tensors in the report; a model has a few kinds per layer.
_MAX_PRODUCTS = 4096
_SCALER_SETTINGS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


class Facts:
    """Collects facts of the process and has rank.json rewritten when there are new ones."""

    def __init__(self, write: Callable[[Mapping[str, Any]], None], names: Names) -> None:
        self._write = write
        self._names = names
        self._optimizers: dict[str, dict[str, Any]] = {}
        #: By name: the optimizer, and the ids of its parameters that had no gradient at its first step.
        self._living: dict[str, tuple[weakref.ref[torch.optim.Optimizer], frozenset[int]]] = {}
        self._scalers: dict[int, dict[str, Any]] = {}
        self._autocast: set[str] = set()
        #: By the facts of a product: these facts and the longest sum.
        self._fp8_products: dict[str, tuple[dict[str, Any], int]] = {}
        self._layout = LayoutReader()
        #: Number of facts noted, and the state at the last write.
        self._noted, self._last_state = 0, (-1, -1)

    def optimizer(self, name: str, optimizer: torch.optim.Optimizer, intended_update: str) -> None:
        """Note an optimizer at its first step; ``intended_update`` is ``exact`` or ``gradient``."""
        if name in self._optimizers:
            return
        own = groups_of(optimizer)
        idle = frozenset(id(p) for group in own for p in parameters_in(group) if p.grad is None)
        self._living[name] = weakref.ref(optimizer), idle
        self._noted += 1
        before = None if is_capturing() else defer(steps_made(optimizer), by_drain=True)
        kind, package = type(optimizer), static.text(type(optimizer).__module__).partition(".")[0]
        self._optimizers[name] = {"name": name, "class": static.text(kind.__name__), "package": package,
                                  "intended_update": intended_update, "groups": [_group(g) for g in own],
                                  "steps_before": before}  # fmt: skip

    def more_groups(self, name: str, groups: Sequence[dict[str, Any]]) -> None:
        """Note the groups of an optimizer that are new since it was noted (``add_param_group``)."""
        noted = self._optimizers.get(name)
        if noted is not None and len(groups) > len(noted["groups"]):
            noted["groups"] += [_group(g) for g in groups[len(noted["groups"]) :]]
            self._noted += 1

    def scaler(self, scaler: torch.amp.GradScaler) -> None:
        if id(scaler) not in self._scalers:
            self._noted += 1
            self._scalers[id(scaler)] = {
                "class": type(scaler).__name__,
                "enabled": bool(static.plain(static.attribute(scaler, "_enabled"))),
                **{name: static.plain(static.attribute(scaler, f"_{name}")) for name in _SCALER_SETTINGS},
            }

    def autocast(self, device: str, dtype: str) -> None:
        if (found := f"{device}:{dtype}") not in self._autocast:
            self._noted += 1
            self._autocast.add(found)

    def fp8_product(self, what: dict[str, Any], *, terms: int) -> None:
        """Note a product of float8 tensors.

        Args:
            what: ``root``, ``module``, ``backward``, ``operands`` (names of their ``fp8_operand`` rows, None for an
                operand without one), ``dtypes``, ``fast_accum``.
            terms: products per sum, the inner dimension K.
        """
        key = json.dumps(what)
        noted = self._fp8_products.get(key)
        if noted is None and len(self._fp8_products) >= _MAX_PRODUCTS:
            return
        if noted is None or noted[1] < terms:
            self._noted += 1
            self._fp8_products[key] = what, terms

    def write_if_changed(self) -> None:
        """Rewrite rank.json if there are new facts since the last write."""
        if (state := (self._names.version, self._noted)) != self._last_state:
            self._last_state = state
            self._write(self._collect())

    def _collect(self) -> dict[str, Any]:
        roots = list(self._names.roots.values())
        models = [m for root in roots if (m := root.called()) is not None]
        layout, placements = self._layout.read(models)
        held = self._holders()
        return {
            "schema_version": SCHEMA_VERSION,
            "pid": os.getpid(),
            **({"layout": layout} if layout is not None else {}),
            "roots": [_root(root, self._names, placements, held) for root in roots],
            "optimizers": self._with_unused(models),
            "scalers": list(self._scalers.values()),
            "autocast": sorted(self._autocast),
            "fp8_products": [{**what, "terms": terms} for what, terms in list(self._fp8_products.values())],
            "flags": flags(),
            "versions": {
                "precdoctor": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "cuda": torch.version.cuda,
            },
            "device": _device(),
        }

    def _holders(self) -> dict[int, list[int]]:
        """Return the numbers of the optimizer and of its group that hold a parameter, by the parameter's id."""
        held: dict[int, list[int]] = {}
        for number, name in enumerate(self._optimizers):
            optimizer = self._living[name][0]()
            for group, own in enumerate(groups_of(optimizer) if optimizer is not None else ()):
                for parameter in parameters_in(own):
                    held.setdefault(id(parameter), [number, group])
        return held

    def _with_unused(self, models: list[nn.Module]) -> list[dict[str, Any]]:
        """Return the optimizers' facts, with the shapes of parameters in no model that had no gradient at first."""
        used = {id(p) for model in models for p in static.parameters(model)}
        found = []
        for name, facts in self._optimizers.items():
            optimizer, idle = self._living[name][0](), self._living[name][1] - used
            groups = facts["groups"]
            if optimizer is not None and idle:
                unused = [[p for p in parameters_in(g) if id(p) in idle] for g in groups_of(optimizer)]
                shapes = [[_shape(p) for p in own[:_MAX_UNUSED]] for own in unused]
                groups = [{**g, "unused": own} if own else g for g, own in itertools.zip_longest(groups, shapes) if g]
            found.append({**facts, "groups": groups})
        return found


def _group(group: dict[str, Any]) -> dict[str, Any]:
    plain = {k: static.plain(v) for k, v in static.items(group) if k != "params"}
    return {**plain, "parameters": len(parameters_in(group))}


def with_device_numbers(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts with numbers read from devices (drain thread only)."""
    optimizers = [{**o, "steps_before": _integer(read(o["steps_before"]))} for o in facts.get("optimizers", ())]
    return {**facts, "optimizers": optimizers}


def _integer(number: float | None) -> int | None:
    return int(number) if number is not None and math.isfinite(number) else None


def _shape(parameter: torch.Tensor) -> list[int] | None:
    """Return a parameter's shape; None for a lazy one, which has none until it is first used."""
    lazy: bool = torch.nn.parameter.is_lazy(parameter)
    return None if lazy else [int(n) for n in parameter.shape]


def _root(root: Root, names: Names, placements: Mapping[int, int], held: Mapping[int, list[int]]) -> dict[str, Any]:
    module, called = root.module(), root.called()
    parameters = []
    tied = _tied(module, names) if module is not None else {}
    evaluating = _evaluating(called) if called is not None else frozenset()
    for parameter in static.parameters(called) if called is not None else ():
        found = names.parameter(parameter)
        if found is None:
            continue
        parameters.append(
            {
                "name": found[1],
                "module": found[0].module,
                "shape": _shape(parameter),
                "dtype": str(parameter.dtype).removeprefix("torch."),
                "requires_grad": parameter.requires_grad,
                **({"tied": tied[id(parameter)]} if id(parameter) in tied else {}),
                **({"placement": placements[id(parameter)]} if id(parameter) in placements else {}),
                **({"group": held[id(parameter)]} if id(parameter) in held else {}),
                **({"evaluating": True} if id(parameter) in evaluating else {}),
            }
        )
    modules = [{"name": name, "class": kind} for name, kind in root.modules]
    facts = {"name": root.name, "class": root.name.rpartition("#")[0], "modules": modules, "parameters": parameters}
    outer = root.outer() if root.outer is not None else None
    reduced = reduction(outer, module) if module is not None else None
    return facts if reduced is None else {**facts, "reduction": reduced}


def _evaluating(module: torch.nn.Module) -> frozenset[int]:
    """Return the ids of the parameters whose own module is in evaluation mode."""
    owners = [m for m in static.modules(module) if static.attribute(m, "training") is False]
    return frozenset(id(p) for m in owners for p in static.held(m, "_parameters").values() if p is not None)


def _tied(module: torch.nn.Module, names: Names) -> dict[int, list[str]]:
    """Return the other names of parameters that several modules own, by id: ``lm_head.weight`` of ``wte.weight``."""
    others: dict[int, list[str]] = {}
    for owner in static.modules(module):
        place = names.find(owner)
        for whole, parameter in static.held(owner, "_parameters").items():
            name = shortened(whole, LONGEST_NAME)
            first = names.parameter(parameter) if parameter is not None else None
            if place is None or first is None or (first[0].module, first[1]) == (place.module, name):
                continue
            others.setdefault(id(parameter), []).append(f"{place.module}.{name}" if place.module else name)
    return others


def _device() -> dict[str, Any]:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "type": "cuda",
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory": properties.total_memory,
            "count": torch.cuda.device_count(),
        }
    return {"type": "cpu", "name": platform.machine(), "capability": torch.backends.cpu.get_cpu_capability()}


#: Torch's communication hooks that send another format than the gradient's, by a part of their name.
_HOOKS = {"fp16_compress": "float16", "bf16_compress": "bfloat16"}


def reduction(outer: nn.Module | None, inner: nn.Module) -> dict[str, Any] | None:
    """Return ``wrapper``, ``ranks``, ``hook`` and ``dtype`` (None: that of the gradients); None without a reduction.

    Args:
        outer: the module that is called, if it is a wrapper.
        inner: the model in it.
    """
    if not attach.is_distributed():
        return None
    ranks = int(sys.modules["torch.distributed"].get_world_size())
    if outer is not None and type(outer).__name__ == "DistributedDataParallel":
        hooks = static.elements(static.attribute(outer, "_comm_hooks"))
        names = [hook[0].__qualname__ if type(hook[0]) is FunctionType else type(hook[0]).__name__ for hook in hooks]
        hook = names[-1] if names else None
        dtype = next((d for part, d in _HOOKS.items() if hook is not None and part in hook), None)
        return {"wrapper": "DistributedDataParallel", "ranks": ranks, "hook": hook, "dtype": dtype}
    if outer is not None and type(outer).__name__ == "FullyShardedDataParallel":
        return {"wrapper": "FullyShardedDataParallel", **_sharded(ranks, static.attribute(outer, "mixed_precision"))}
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not issubclass(type(inner), getattr(fsdp, "FSDPModule", ())):
        return None
    state: Any = fsdp.FSDPModule._get_fsdp_state(inner)
    return {"wrapper": "fully_shard", **_sharded(ranks, static.attribute(state, "_mp_policy"))}


def _sharded(ranks: int, policy: Any) -> dict[str, Any]:
    dtype = static.attribute(policy, "reduce_dtype")
    return {"ranks": ranks, "hook": None, "dtype": None if dtype is None else dtype_name(dtype)}


def flags() -> dict[str, Any]:
    """Return every numeric switch of this torch; None for one that cannot be read.

    Torch has two spellings for TF32 (``allow_tf32`` and ``fp32_precision``) and refuses to read the older one after
    the newer one was set.
    """
    return {name: value for name, read in _readers().items() if (value := _read(read)) is not _ABSENT}


_ABSENT = object()


def _read(read: Callable[[], Any]) -> Any:
    """Return a switch's value in plain types; ``_ABSENT`` if this torch lacks it, None if it cannot be read."""
    try:
        value = read()
    except AttributeError:
        return _ABSENT
    except RuntimeError as error:
        attach.let_through(error)
        return None
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _readers() -> Mapping[str, Callable[[], Any]]:
    backends: Any = torch.backends
    matmul = backends.cuda.matmul
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "cublas_workspace_config": lambda: os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cudnn_allow_tf32": lambda: backends.cudnn.allow_tf32,
        "cudnn_benchmark": lambda: backends.cudnn.benchmark,
        "cudnn_deterministic": lambda: backends.cudnn.deterministic,
        "num_threads": torch.get_num_threads,
        "python_flags_optimize": lambda: sys.flags.optimize,
        "matmul_allow_tf32": lambda: matmul.allow_tf32,
        "matmul_allow_fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "matmul_allow_bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "matmul_allow_fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
        # the spelling of torch 2.9 and later
        "matmul_fp32_precision": lambda: matmul.fp32_precision,
        "cudnn_conv_fp32_precision": lambda: backends.cudnn.conv.fp32_precision,
        "mkldnn_matmul_fp32_precision": lambda: backends.mkldnn.matmul.fp32_precision,
    }
