"""Lookup of a number format by any of its usual names."""

from __future__ import annotations

import re
from difflib import get_close_matches

from precdoctor.errors import UsageError
from precdoctor.numerics.blocks import BLOCK_FORMATS, BlockFormat
from precdoctor.numerics.formats import FORMATS, SCALE_FORMATS, Format

#: Other spellings, lower case and without separators. "e4m3" without more is OCP's, as in every training framework.
_SPELLINGS = {
    "FP64": ("double", "f64", "binary64"),
    "FP32": ("float", "single", "f32", "binary32"),
    "TF32": ("tensorfloat32",),
    "BF16": ("brainfloat", "brainfloat16"),
    "FP16": ("half", "f16", "binary16"),
    "E4M3FN": ("e4m3", "fp8e4m3", "f8e4m3"),
    "E3M2": ("fp6e3m2", "float6e3m2"),
    "E2M3": ("fp6e2m3", "float6e2m3"),
    "E2M1": ("fp4", "fp4e2m1", "float4e2m1", "float4e2m1fnx2"),
    "INT8": ("i8", "s8"),
    "INT4": ("i4", "s4"),
    "E8M0": ("ue8m0", "fp8e8m0"),
    "MXFP8_E4M3": ("mxfp8",),
    "MXFP4": ("mxfp4e2m1",),
    "NVFP4": ("nvfp4e2m1",),
    "TILE_1X128": ("tile128", "1x128", "deepseek"),
    "TILE_128X128": ("128x128",),
}
#: Spellings that fit two formats.
_SEVERAL = {
    "fp8": ("E4M3FN", "E5M2"),
    "float8": ("E4M3FN", "E5M2"),
    "fp6": ("E3M2", "E2M3"),
    "mxfp6": ("MXFP6_E3M2", "MXFP6_E2M3"),
}
_PREFIX = re.compile(r"^(torch|numpy|np|jnp|jax\.numpy|ml_dtypes|tl)\.")


def _plain(name: str) -> str:
    """Normalise a spelling: lower case, without separators and module prefix."""
    return re.sub(r"[\s_.-]", "", _PREFIX.sub("", name.strip().lower()))


def _known() -> dict[str, Format | BlockFormat]:
    named: dict[str, Format | BlockFormat] = {**FORMATS, **SCALE_FORMATS, **BLOCK_FORMATS}
    spelled = {_plain(name): fmt for name, fmt in named.items()}
    for fmt in (*FORMATS.values(), *SCALE_FORMATS.values()):
        spelled[_plain(fmt.dtype)] = fmt
        if fmt.bits == 8 and fmt.sign_bits and fmt.exponent_bits:
            spelled.setdefault(f"fp8{_plain(fmt.name)}", fmt)
            spelled.setdefault(f"f8{_plain(fmt.name)}", fmt)
    return spelled | {spelling: named[name] for name, spellings in _SPELLINGS.items() for spelling in spellings}


_KNOWN = _known()


def find_format(name: str) -> Format | BlockFormat:
    """Return the format called ``E4M3``, ``fp8_e4m3fn``, ``torch.bfloat16``, ``half``, ``mxfp8`` ...

    Case, ``-``, ``_``, blanks and a module prefix do not matter.

    Raises:
        UsageError: no format has this name, or two have; the message suggests the nearest name.
    """
    plain = _plain(name)
    if plain in _KNOWN:
        return _KNOWN[plain]
    if plain in _SEVERAL:
        raise UsageError(f"{name!r} can be {' or '.join(_SEVERAL[plain])}; say which")
    near = get_close_matches(plain, [*_KNOWN, *_SEVERAL], n=1, cutoff=0.5)
    nearest = _KNOWN[near[0]].name if near and near[0] in _KNOWN else "E4M3FN" if near else ""
    hint = f"did you mean {nearest!r}? " if nearest else ""
    raise UsageError(
        f"no number format is called {name!r}; {hint}known: {', '.join([*FORMATS, *SCALE_FORMATS, *BLOCK_FORMATS])}"
    )


def find_element_format(name: str) -> Format:
    """:func:`find_format` restricted to formats that a tensor can be cast to without blocks.

    Raises:
        UsageError: the format is unknown, a block format or a scale format.
    """
    fmt = find_format(name)
    if isinstance(fmt, BlockFormat):
        raise UsageError(f"{fmt.name} is a block format; its elements are {fmt.element.name}")
    if fmt.name in SCALE_FORMATS:
        raise UsageError(f"{fmt.name} holds the scales of blocks, not elements")
    return fmt
