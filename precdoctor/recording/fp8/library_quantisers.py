"""Quantisers of libraries whose casts bypass torch's dispatcher: their input, and the scales in their result.

Covered, from their source: Transformer Engine 2.18 (``Quantizer.quantize`` and ``update_quantized``), MS-AMP 0.4.0
(``TypeCast.cast_to_fp8``), and of torchao 0.18 the casts to FP4 and FP6 by integer arithmetic (``to_mx``,
``nvfp4_quantize``). The functions are replaced by wrappers that read their arguments and results.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from precdoctor.numerics.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2, Format
from precdoctor.recording import kernels
from precdoctor.recording.fp8 import engine_scales
from precdoctor.recording.fp8.fp8_casts import Casts
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.recorder.hook_guard import guarded


@dataclass(frozen=True)
class Quantisation:
    """One call of a quantiser.

    Attributes:
        given: the input tensor.
        fmt: the format of the elements.
        multipliers: scales that multiplied the elements, float32: one, or one per row or block.
        grid: shape in which to view ``given`` so that ``factors`` multiply it; None for its own shape.
        factors: the multipliers in a shape that broadcasts to it. Not a scalar: its products would not be float32.
    """

    given: Tensor
    fmt: Format
    multipliers: Tensor
    grid: tuple[int, ...] | None
    factors: Tensor


#: Reads a call from its arguments and its result; returns None if it cannot.
Reader = Callable[[tuple[Any, ...], dict[str, Any], Any], Quantisation | None]


class LibraryQuantisers:
    """Replaces the quantisers of every imported library, once each, at the beginning of sampled steps."""

    def __init__(self, recorder: Recorder, casts: Casts) -> None:
        self._recorder, self._casts = recorder, casts
        self._replaced: set[str] = set()
        #: Modules for which an operand of this role was observed.
        self._roles: dict[str, set[Place]] = {"input": set(), "weight": set(), "grad_output": set()}
        self._inside = threading.local()

    def install(self) -> None:
        """Patch the casts of torch; search for libraries at every sampled step, because scripts import them late."""
        self._casts.install()
        takes = self._recorder.options.takes
        if takes("fp8_operand") or takes("subbyte_operand"):
            self._recorder.when_closing.append(guarded(self._recorder)(self._warn_of_unseen))
            look = guarded(self._recorder)(self._replace_quantisers)
            self._recorder.when_step_begins.append(lambda: look() if self._recorder.live else None)

    def _replace_quantisers(self) -> None:
        """Replace the quantisers of libraries imported since the last call."""
        for name, places in _LIBRARIES.items():
            if name in self._replaced or (module := sys.modules.get(name)) is None:
                continue
            self._replaced.add(name)
            for owner, function, read in places(module):
                original = static.members(owner).get(function) if isinstance(owner, type) else vars(owner).get(function)
                plain = original.__func__ if isinstance(original, staticmethod) else original
                if callable(plain):
                    wrapper = self._wrapper(plain, read)
                    setattr(owner, function, staticmethod(wrapper) if plain is not original else wrapper)

    def _wrapper(self, original: Callable[..., Any], read: Reader) -> Callable[..., Any]:
        """Return a wrapper of a quantiser; calls inside another wrapped call are not read."""
        recorder, record, inside = self._recorder, guarded(self._recorder)(self._record), self._inside

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not recorder.live or getattr(inside, "call", False):
                return original(*args, **kwargs)
            inside.call = True
            try:
                result = original(*args, **kwargs)
            finally:
                inside.call = False
            record(read, args, kwargs, result)
            return result

        return wrapper

    def _record(self, read: Reader, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record one call of a quantiser, if a mode observes this code."""
        observer = self._casts.observer_of_library()
        if observer is None:
            return
        with kernels.apart_from_user_modes():
            found = read(args, kwargs, result)
            if found is None or tensor_leaves.plain(found.given) is None:
                return
            x = found.given.detach()
            scaled = ((x if found.grid is None else x.reshape(found.grid)) * found.factors).reshape(x.shape)
        if (seen := observer.quantised(found.given, scaled, found.fmt, found.multipliers)) is not None:
            self._roles[seen[1]].add(seen[0])

    def _warn_of_unseen(self) -> None:
        """Warn about operands of Transformer Engine modules with FP8 scales that were cast only inside its kernels."""
        recorder = self._recorder
        places = {}
        for root in recorder.names.roots.values():
            for module in static.modules(top) if (top := root.module()) is not None else ():
                place = recorder.names.find(module) if engine_scales.quantises(module) else None
                if place is not None and recorder.wants(place):
                    places[place] = place.module_class
        missing = []
        for role, word in (("input", "inputs"), ("weight", "weights"), ("grad_output", "gradients")):
            if kinds := {kind for place, kind in places.items() if place not in self._roles[role]}:
                missing.append(f"{word} ({', '.join(sorted(kinds))})")
        if missing:
            message = f"casts inside kernels of Transformer Engine; there are no rows of {', '.join(missing)}"
            recorder.event("warning", data={"what": "unseen", "message": message})


# --- reading a call ---------------------------------------------------------------------------------------------------


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _tensor(owner: Any, name: str) -> Tensor | None:
    found = static.attribute(owner, name)
    return found.detach() if type(found) is Tensor else None


def _by_blocks(x: Tensor, scales: Tensor, columns: int, rows: int) -> Tensor:
    """Return the scale of each element of ``x``, from one per block of ``rows`` x ``columns`` elements."""
    width = x.shape[-1]
    height = x.numel() // width
    wide = scales.repeat_interleave(columns, -1)[:, :width].repeat_interleave(rows, 0)[:height]
    return wide.reshape(x.shape)


def _powers(exponents: Tensor) -> Tensor:
    """Return the multipliers of E8M0 scales, which are divisors: ``2 ** (127 - e)``, NaN for 255."""
    e = exponents.view(torch.uint8).float()
    return torch.where(e == 255, torch.nan, torch.exp2(127.0 - e))


def _row_major(scales: Tensor) -> Tensor:
    """Bring scales from the order of a matrix unit (tiles of 128 x 4, inside 32 x 4 x 4) to rows and columns."""
    rows, columns = scales.shape
    tiles = scales.reshape(rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def _scalar(x: Tensor, fmt: Format, multiplier: Tensor) -> Quantisation:
    return Quantisation(x, fmt, multiplier.reshape(1), None, multiplier.reshape(1))


def _blocks(x: Tensor, fmt: Format, scales: Tensor, columns: int, rows: int = 1) -> Quantisation | None:
    """Return a quantisation by blocks; ``scales`` may be padded to more rows and columns. None if they are too few."""
    if x.dim() == 0 or not x.numel():
        return None
    width, height = x.shape[-1], x.numel() // x.shape[-1]
    high, wide = -(-height // rows), -(-width // columns)
    if scales.dim() != 2 or scales.shape[0] < high or scales.shape[1] < wide:
        return None
    scales = scales[:high, :wide]
    if height % rows == 0 and width % columns == 0:  # no copy of the scales as large as the tensor
        return Quantisation(x, fmt, scales, (high, rows, wide, columns), scales[:, None, :, None])
    return Quantisation(x, fmt, scales, None, _by_blocks(x, scales, columns, rows))


# --- torchao ----------------------------------------------------------------------------------------------------------

_ELEMENTS: Final = {"float4_e2m1fn_x2": E2M1, "fp6_e2m3": E2M3, "fp6_e3m2": E3M2}


def _to_mx(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Quantisation | None:
    """Read ``to_mx(data_hp, elem_dtype, block_size, ...)``; its casts to FP8 go through the dispatcher instead."""
    x, block = _argument(args, kwargs, 0, "data_hp"), _argument(args, kwargs, 2, "block_size")
    fmt = _ELEMENTS.get(str(_argument(args, kwargs, 1, "elem_dtype")).removeprefix("torch."))
    scales = result[0] if type(result) is tuple else None
    swizzled = _argument(args, kwargs, 4, "is_swizzled_scales")
    if fmt is None or type(scales) is not Tensor or type(block) is not int or swizzled:
        return None
    return _blocks(x, fmt, _powers(scales).reshape(-1, scales.shape[-1]), block)


def _nvfp4(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Quantisation | None:
    """Read ``nvfp4_quantize(data_hp, block_size, per_tensor_scale)``."""
    x, outer = _argument(args, kwargs, 0, "data_hp"), _argument(args, kwargs, 2, "per_tensor_scale")
    scales = result[0] if type(result) is tuple else None
    if type(scales) is not Tensor or (outer is not None and (type(outer) is not Tensor or outer.numel() != 1)):
        return None
    divisors = scales.float() if outer is None else scales.float() * outer.detach().float().reshape(())
    return _blocks(x, E2M1, divisors.reciprocal().reshape(-1, scales.shape[-1]), 16)


# --- Transformer Engine -----------------------------------------------------------------------------------------------

_ENGINE_FORMATS: Final = {"kFloat8E4M3": E4M3FN, "kFloat8E5M2": E5M2, "kFloat4E2M1": E2M1}


def _engine_format(result: Any) -> Format | None:
    """Return the element format of a Transformer Engine tensor; None if unknown."""
    for name in ("_fp8_dtype", "_fp4_dtype"):
        dtype = static.attribute(result, name)
        # a Python enumeration, and one of pybind11's in older releases
        name_of_dtype = static.attribute(dtype, "_name_") or (
            str(dtype).rpartition(".")[2] if type(type(dtype)).__name__ == "pybind11_type" else None
        )
        if name_of_dtype in _ENGINE_FORMATS:
            return _ENGINE_FORMATS[name_of_dtype]
    return None


def _engine_quantised(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Quantisation | None:
    """Read ``quantizer.quantize(tensor, ...)``, or ``quantizer.update_quantized(src, dst, ...)``.

    It reads the row-wise copy of the result; a tensor with only the transposed copy has no row.
    """
    x = _argument(args, kwargs, 1, "tensor")
    x = kwargs.get("src") if x is None else x
    fmt = _engine_format(result)
    if fmt is None or x is None or not issubclass(type(x), Tensor) or kwargs.get("noop_flag") is not None:
        return None
    single, scales = _tensor(result, "_scale_inv"), _tensor(result, "_rowwise_scale_inv")
    if single is not None and single.numel() == 1:
        return _scalar(x, fmt, single.float().reciprocal())
    if scales is None or scales.dim() != 2:
        return None
    if (square := static.attribute(result, "_is_2D_scaled")) is not None:
        # Float8BlockQuantizer: one scale per 128 x 128 elements, or per 128 in a row, the latter stored transposed
        divisors, rows = (scales, 128) if square is True else (scales.t(), 1)
        return _blocks(x, fmt, divisors.reciprocal(), 128, rows)
    if static.attribute(result, "_with_gemm_swizzled_scales") is True:
        if scales.shape[0] % 128 or scales.shape[1] % 4:
            return None
        scales = _row_major(scales)
    if fmt is E2M1:
        return _engine_nvfp4(x, scales, result)
    return _blocks(x, fmt, _powers(scales), 32)


def _engine_nvfp4(x: Tensor, scales: Tensor, result: Any) -> Quantisation | None:
    """Read NVFP4: one E4M3 scale per 16 elements, times the amax of tensor or row over 6 times the largest scale."""
    amax = _tensor(result, "_amax_rowwise")
    largest = static.number(static.attribute(result, "_nvfp4_e4m3_max"))
    if amax is None:
        return None
    outer = amax.float().reshape(-1, 1) / (E2M1.max * (largest or E4M3FN.max))
    divisors = scales.view(torch.float8_e4m3fn).float()
    height = x.numel() // x.shape[-1] if x.dim() and x.numel() else 0
    if outer.numel() not in (1, height):
        return None
    return _blocks(x, E2M1, (divisors[:height] * outer).reciprocal(), 16)


def _engine(module: Any) -> Iterator[tuple[Any, str, Reader]]:
    """Yield the quantising methods of every subclass of Transformer Engine's ``Quantizer``."""
    base = vars(module).get("Quantizer")
    waiting = [base] if isinstance(base, type) else []
    while waiting:
        kind = waiting.pop()
        waiting += type.__subclasses__(kind)
        for name in ("quantize", "update_quantized"):
            if name in static.members(kind):
                yield kind, name, _engine_quantised


# --- MS-AMP -----------------------------------------------------------------------------------------------------------


def _msamp_cast(args: tuple[Any, ...], kwargs: dict[str, Any], _result: Any) -> Quantisation | None:
    """Read ``TypeCast.cast_to_fp8(input, meta, ...)``, which has written the current scale to ``meta.scale``."""
    x, meta = _argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "meta")
    fmt = _ENGINE_FORMATS.get(static.text(static.attribute(static.attribute(meta, "qtype"), "name")))
    scale = _tensor(meta, "scale")
    if fmt is None or scale is None or scale.numel() != 1 or not issubclass(type(x), Tensor):
        return None
    return _scalar(x, fmt, scale.float())


def _msamp(module: Any) -> Iterator[tuple[Any, str, Reader]]:
    if isinstance(owner := vars(module).get("TypeCast"), type):
        yield owner, "cast_to_fp8", _msamp_cast


#: By module: yields the functions to replace in it, as owner, name, and the reader of its calls.
_LIBRARIES: Final[dict[str, Callable[[Any], Iterator[tuple[Any, str, Reader]]]]] = {
    "torchao.prototype.mx_formats.mx_tensor": lambda module: iter(((module, "to_mx", _to_mx),)),
    "torchao.prototype.mx_formats.nvfp4_tensor": lambda module: iter(((module, "nvfp4_quantize", _nvfp4),)),
    "transformer_engine.pytorch.quantized_tensor": _engine,
    "transformer_engine.pytorch.tensor.quantized_tensor": _engine,  # up to release 2.9
    "msamp.common.tensor.cast": _msamp,
}
