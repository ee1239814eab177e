"""Recipes: a format, and how tensors are scaled into it. Built from ``--format`` and ``--scaling``, or by a ladder."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.errors import UsageError
from precdoctor.numerics import blocks
from precdoctor.numerics.arrays import Bools, Floats
from precdoctor.numerics.blocks import BlockFormat, ScaleRule
from precdoctor.numerics.formats import BF16, E4M3FN, E5M2, E8M0, FP16, FP32, INT4, INT8, SCALE_FORMATS, Format, Kind
from precdoctor.numerics.group_prediction import GROUPINGS
from precdoctor.numerics.names import find_format

_WIDE_BITS = 16
#: How much lower the limit of the smaller elements' SQNR is, in dB: the smaller nine tenths of a Gaussian have 2.0 dB
#: less than the whole.
_BULK_ALLOWANCE = 3.0
#: The values of ``--scaling``; ``none`` is a multiplier of 1.
SCALINGS = ("none", "tensor", "tile128", "block32", "block16", *GROUPINGS, "tile128x128")
#: Kinds of tensors that inference caches for later tokens.
CACHED = ("kv_key", "kv_value")
#: Kinds of tensors whose groups can share a scale, by grouping.
GROUPED_KINDS = {
    "token": ("input", "output", *CACHED),
    "channel": ("weight", "input", "output", *CACHED),
    "head": CACHED,
    "group128": ("weight", "input", "output", *CACHED),
}
_GROUP_WORDS = {"group128": "a scale for every 128 features"}
#: Bits of the scale of a token or of 128 features; kernels keep it in FP16.
SCALE_BITS = 16
#: Kinds whose values are multiplied by the loss scale.
LOSS_SCALED = ("loss", "grad_output", "weight_grad")

_NO_TILES = "amax per 128x128 tile is not recorded"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A format, and the scale that multiplies a tensor before it is cast.

    Attributes:
        format: of the elements.
        scaling: one of ``none, tensor, fixed, tile128, block32, block16``, or of ``token, channel, head, group128``.
            ``tensor`` is current scaling: at each step the tensor's amax is scaled to the format's maximum. The last
            four do the same for groups of elements.
        block: the block format of ``tile128``, ``block32`` and ``block16``; else None.
        rule: how a block's scale is computed from its amax; None without blocks.
        scale: the multiplier of ``fixed``.
        loss_scale: the loss scale to assume for gradients; None means the recorded one.
    """

    format: Format
    scaling: str
    block: BlockFormat | None = None
    rule: ScaleRule | None = None
    scale: float | None = None
    loss_scale: float | None = None

    @property
    def name(self) -> str:
        """The name of the block format, or else of the format: ``MXFP8_E4M3``, ``E5M2``, ``BF16``."""
        return self.block.name if self.block is not None else self.format.name

    @property
    def bits_per_element(self) -> float:
        """Memory per element in bits, with its share of the scale of a block or of 128 features.

        Scales per tensor, channel or head are negligible; a scale per token depends on the token's size. Both are left
        out.
        """
        if self.block is not None:
            return self.block.bits_per_element
        return self.format.bits + (SCALE_BITS / 128 if self.scaling == "group128" else 0.0)

    @property
    def grouping(self) -> str | None:
        """The group that shares a scale: ``token``, ``channel``, ``head`` or ``group128``; None for other scalings."""
        return self.scaling if self.scaling in GROUPINGS else None

    def applies_to(self, kind: str) -> bool:
        """Return whether tensors of this kind have the groups that share a scale: weights have no tokens."""
        return self.grouping is None or kind in GROUPED_KINDS[self.grouping]

    @property
    def clips_by_design(self) -> bool:
        """Whether block scales are rounded down, so that the largest elements of a block may be clipped a little."""
        return self.rule is ScaleRule.FLOOR

    def limits(self, target: Target) -> Target:
        """Return the target with the limits that the recipe breaks by design removed.

        Floor block scales may clip. Integers may flush: the step size follows the largest elements, so the SQNR of
        the smaller ones gets a limit instead.
        """
        target = replace(target, max_saturated=math.inf) if self.clips_by_design else target
        if self.format.kind is not Kind.INTEGER:
            return target
        return replace(target, max_flushed=math.inf, min_bulk_db=target.min_sqnr_db - _BULK_ALLOWANCE)

    @property
    def block_size(self) -> int | None:
        """Elements per block; None without blocks."""
        return self.block.block[1] if self.block is not None else None

    def describe(self) -> str:
        """Return the scaling in words: ``amax scaling per tensor at each step``."""
        if self.block is not None:
            assert self.rule is not None
            scale = f"{self.block.scale.name} scale, rule {self.rule.value}"
            tensor = f", {self.block.tensor_scale.name} scale per tensor" if self.block.tensor_scale else ""
            return f"blocks of 1x{self.block_size}, {scale}{tensor}"
        if self.scaling == "tensor":
            return "amax scaling per tensor at each step"
        if self.grouping is not None:
            return _GROUP_WORDS.get(self.grouping, f"a scale for each {self.grouping}")
        return "no scale" if self.scaling == "none" else f"scale {self.scale:g}"

    def short(self) -> str:
        """Return name and scaling for a table cell: ``E4M3FN per tensor``, ``INT4 per 128``, ``MXFP8_E4M3``."""
        shared = "128" if self.scaling == "group128" else self.scaling
        return f"{self.name} per {shared}" if self.scaling in ("tensor", *GROUPINGS) else self.name

    def multipliers(self, amax: Floats, recorded: Floats, *, loss_scaled: Bools, quantised: Bools) -> Floats:
        """Return the factor from each row's stored elements to the elements that are cast, shape ``(rows,)``.

        For recipes with one scale per tensor; blocks and groups have scales of their own.

        Args:
            amax: of the stored elements, shape ``(rows,)``; NaN or 0 without a non-zero element.
            recorded: the recorded scale that the stored elements were multiplied by; NaN for none.
            loss_scaled: mask of the rows whose scale is the loss scale.
            quantised: mask of the rows of FP8 operands: their scale is divided out first.
        """
        known = np.where(np.isfinite(recorded) & (recorded > 0.0), recorded, 1.0)
        base = np.where(quantised, 1.0 / known, 1.0)
        if self.loss_scale is not None:
            base = np.where(loss_scaled, self.loss_scale / known, base)
        if self.scaling == "fixed":
            assert self.scale is not None
            return base * self.scale
        if self.scaling != "tensor":
            return base
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            filling = np.minimum(self.format.max / amax, np.finfo(np.float64).max)
        return np.where(amax > 0.0, filling, 1.0)


def ask(
    name: str,
    *,
    scaling: str | None = None,
    scale: float | None = None,
    loss_scale: float | None = None,
    rule: str | None = None,
) -> Recipe:
    """Return the recipe that a user's options name.

    Args:
        name: a format's name, for :func:`~precdoctor.numerics.names.find_format`.
        scaling: one of :data:`SCALINGS`; by default that of the format: blocks for MX and NVFP4, ``none`` from 16 bits,
            ``tensor`` for narrower formats.
        scale: a fixed multiplier, instead of ``scaling``.
        loss_scale: see :class:`Recipe`.
        rule: ``floor``, ``up`` or ``amax``, for block formats.

    Raises:
        UsageError: an unknown name, a scaling that is never recorded or does not fit the format, or a scale that is no
            finite positive number.
    """
    fmt = find_format(name)
    for option, value in (("--scale", scale), ("--loss-scale", loss_scale)):
        if value is not None and not 0.0 < value < math.inf:
            raise UsageError(f"{option} {value:g}: a scale is a finite number above zero, such as 1024 or 2^10")
    if scaling == "tile128x128" or fmt is blocks.TILE_128X128:
        raise UsageError(
            f"{_NO_TILES}; recorded are whole tensors, 1x128 and 1x32 blocks: --scaling tensor|tile128|block32"
        )
    if isinstance(fmt, Format) and fmt.name in SCALE_FORMATS:
        raise UsageError(f"{fmt.name} holds the scales of blocks, not elements; ask for mxfp8 or another format")
    if isinstance(fmt, BlockFormat):
        if scaling is not None and scaling != _scaling_of(fmt):
            raise UsageError(
                f"{fmt.name} implies --scaling {_scaling_of(fmt)}; leave it out, or name an element format"
            )
        recipe = _block_recipe(fmt)
    elif scaling in ("tile128", "block32", "block16"):
        recipe = _block_recipe(_block_format(fmt, scaling))
    else:
        if scaling in GROUPINGS and fmt.bits >= _WIDE_BITS:
            raise UsageError(f"{fmt.name} is not used with a scale per {scaling}; leave --scaling out")
        wide = fmt.kind is Kind.FLOAT and fmt.bits >= _WIDE_BITS
        recipe = Recipe(format=fmt, scaling=scaling or ("none" if wide else "tensor"))
    if rule is not None:
        if recipe.block is None:
            raise UsageError(f"--scale-rule {rule} is for block scales, and {recipe.name} is not a block format")
        recipe = replace(recipe, rule=ScaleRule(rule))
    if scale is not None:
        if recipe.block is not None or scaling is not None:
            raise UsageError(f"--scale {scale:g} is one multiplier for whole tensors; it does not go with --scaling")
        recipe = replace(recipe, scaling="fixed", scale=scale)
    return replace(recipe, loss_scale=loss_scale)


def _scaling_of(fmt: BlockFormat) -> str:
    return {128: "tile128", 32: "block32", 16: "block16"}[fmt.block[1]]


def _block_recipe(fmt: BlockFormat) -> Recipe:
    return Recipe(format=fmt.element, scaling=_scaling_of(fmt), block=fmt, rule=fmt.rule)


def _block_format(fmt: Format, scaling: str) -> BlockFormat:
    """Return the known block format with these elements, or a new one: FP32 scales for tiles, E8M0 scales for blocks.

    A format of 16 bits or more is a UsageError.
    """
    if fmt.bits >= 16:
        raise UsageError(f"{fmt.name} is not used with block scales; leave --scaling out, or take 8 bits or fewer")
    for known in blocks.BLOCK_FORMATS.values():
        if known.element is fmt and known.block[0] == 1 and _scaling_of(known) == scaling:
            return known
    size = {"tile128": 128, "block32": 32, "block16": 16}[scaling]
    tiled = scaling == "tile128"
    return BlockFormat(
        name=f"{fmt.name}_1X{size}",
        element=fmt,
        scale=FP32 if tiled else E8M0,
        block=(1, size),
        rule=ScaleRule.AMAX if tiled else ScaleRule.FLOOR,
        source="as TILE_1X128" if tiled else "as OCP MX 1.0",
    )


#: Recipes to try for a tensor if the recipe of the question fails, by bits per element.
LADDER = tuple(
    sorted(
        [
            *(Recipe(format=f, scaling="tensor") for f in (E4M3FN, E5M2)),
            *(_block_recipe(b) for b in blocks.BLOCK_FORMATS.values() if b.block[0] == 1),
            *(Recipe(format=f, scaling="none") for f in (BF16, FP16, FP32)),
            Recipe(format=FP16, scaling="tensor"),
        ],
        key=lambda r: r.bits_per_element,
    )
)


#: The same for inference, where groups are recorded; of equal width the simplest scaling comes first.
INFERENCE_LADDER = tuple(
    sorted(
        [
            *(
                Recipe(format=f, scaling=s)
                for f in (INT4, INT8, E4M3FN)
                for s in ("tensor", "head", "channel", "group128", "token")
            ),
            *(r for r in LADDER if r.scaling in ("none", "block16")),
        ],
        key=lambda r: r.bits_per_element,
    )
)


def wider_than(asked: Recipe) -> Iterator[Recipe]:
    """Yield the recipes of the ladder whose elements have at least as many bits, cheapest first; same loss scale.

    Narrower formats are left out, because the hardware of a question about 8 bits may not support 6. Integers and
    groups have a ladder of their own.
    """
    of_inference = asked.format.kind is Kind.INTEGER or asked.grouping is not None
    for recipe in INFERENCE_LADDER if of_inference else LADDER:
        same = (recipe.name, recipe.scaling) == (asked.name, asked.scaling)
        if recipe.format.bits >= asked.format.bits and not same:
            yield replace(recipe, loss_scale=asked.loss_scale)
