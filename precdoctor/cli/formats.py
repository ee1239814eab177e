"""``precdoctor formats``: the number formats, one of them, or one number in all of them."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from precdoctor.cli import options
from precdoctor.cli.common import Answer, write_answer
from precdoctor.cli.values import choice, read
from precdoctor.errors import UsageError

if TYPE_CHECKING:
    from precdoctor.numerics.blocks import BlockFormat
    from precdoctor.numerics.formats import Format

EXAMPLES = """\b
Examples:
  precdoctor formats
  precdoctor formats e4m3
  precdoctor formats 1e-5
  precdoctor formats 2^-24
  precdoctor formats nvfp4 --output-format json"""


def formats(
    what: Annotated[
        str | None, typer.Argument(help="A format or a number; default: list the formats.", metavar="[NAME|VALUE]")
    ] = None,
    output_format: options.FullOrJson = "full",
) -> int:
    """Show the number formats.

    With the name of one, all about it and, up to 8 bits, its code points. With a number, what becomes of it in every
    format: bits, error, neighbours, and the smallest update that sticks.
    """
    shape = read(choice("full", "json"), output_format, "--output-format")
    value = None if what is None else _number(what)
    if what is not None and what.startswith("--"):
        raise UsageError(f"no such option: {what}; see precdoctor formats --help")
    from precdoctor.numerics.bitview import bit_view
    from precdoctor.numerics.blocks import BLOCK_FORMATS, BlockFormat
    from precdoctor.numerics.formats import FORMATS, SCALE_FORMATS
    from precdoctor.numerics.names import find_format
    from precdoctor.reporting import formats_view
    from precdoctor.runlog.atomic import jsonable

    elements, blocks = [*FORMATS.values(), *SCALE_FORMATS.values()], [*BLOCK_FORMATS.values()]
    document: dict[str, Any]
    show: Any
    if what is None:
        document = {"formats": [_described(f) for f in elements], "block_formats": [_described(f) for f in blocks]}
        show = partial(formats_view.print_formats, elements, blocks)
    elif value is not None:
        views = [bit_view(value, fmt) for fmt in elements]
        document = {"value": value, "formats": views}
        show = partial(formats_view.print_number, value, views)
    else:
        fmt = find_format(what)
        document = {"format": _described(fmt, codes=True)}
        if isinstance(fmt, BlockFormat):
            show = partial(formats_view.print_block_format, fmt)
        else:
            show = partial(formats_view.print_format, fmt)
    write_answer(sys.stdout, shape, Answer(lambda: {"schema_version": 1, **jsonable(document)}, show))
    return 0


def _number(text: str) -> float | None:
    """Parse a decimal or hexadecimal number, a power such as ``2^-24``, NaN or Inf; None if ``text`` is no number.

    A number beyond the largest of FP64 is a UsageError.
    """
    try:
        base, power, exponent = text.partition("^")
        value = float.fromhex(text) if "0x" in text.lower() else float(base)
        value = math.copysign(abs(value) ** int(exponent), value) if power else value
    except ValueError:
        return None
    except (OverflowError, ZeroDivisionError):
        value = math.inf
    if math.isinf(value) and "inf" not in text.lower():
        raise UsageError(f"{text} is beyond the largest number of FP64, 1.798e+308; ask for inf if you mean infinity")
    return value


def _described(fmt: Format | BlockFormat, *, codes: bool = False) -> dict[str, Any]:
    """A format as JSON values: fields and derived numbers; with ``codes`` the value of every code, if at most 256."""
    from precdoctor.numerics.blocks import BlockFormat
    from precdoctor.numerics.casting_array import decode
    from precdoctor.runlog.atomic import jsonable

    if isinstance(fmt, BlockFormat):
        parts = {"element": fmt.element.name, "scale": fmt.scale.name}
        tensor = {"tensor_scale": fmt.tensor_scale.name if fmt.tensor_scale else None}
        block: dict[str, Any] = jsonable(fmt)
        return block | parts | tensor | {"bits_per_element": fmt.bits_per_element}
    names = (
        *("name", "dtype", "kind", "exponent_bits", "mantissa_bits", "bias", "max", "has_infinity", "nan", "stored"),
        *("source", "bits", "sign_bits", "min", "min_normal", "min_subnormal", "flush_limit", "overflow_limit"),
        *("tie_overflows", "binades", "decades", "ulp_at_one"),
    )
    described = {name: getattr(fmt, name) for name in names}
    if codes and fmt.bits <= 8:
        described["code_points"] = [decode(code, fmt) for code in range(1 << fmt.bits)]
    return described
