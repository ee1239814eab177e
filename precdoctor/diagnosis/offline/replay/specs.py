"""Parses the command line's spelling of a loss scaler, an FP8 recipe and an accumulator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from difflib import get_close_matches

from precdoctor.errors import UsageError
from precdoctor.numerics.accumulation import Accumulator
from precdoctor.numerics.blocks import BlockFormat
from precdoctor.numerics.formats import Format, Kind
from precdoctor.numerics.fp8_scaling import Amax, CurrentScaling, DelayedScaling, Recipe
from precdoctor.numerics.loss_scaling import ScalerPolicy
from precdoctor.numerics.names import find_element_format, find_format

#: Keys of a loss scaler and the fields they set; the names of torch's arguments are also accepted.
_POLICY_KEYS = {
    **{name: name for name in ("init", "growth", "backoff", "interval")},
    "min": "min_scale",
    "max": "max_scale",
    "min_scale": "min_scale",
    "max_scale": "max_scale",
    "init_scale": "init",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
    "growth_interval": "interval",
}
_POLICY_HELP = "init=65536,growth=2,interval=2000,backoff=0.5,min=1, any of them, or best, used or static=1024"
_RECIPE_HELP = (
    "current[:MARGIN], delayed[:HISTORY[:max|recent[:MARGIN]]], a block format such as mxfp8 or tile128, or best"
)


def parse_policy(raw: str) -> ScalerPolicy | str:
    """Parse ``init=65536,interval=2000`` (missing keys have torch's defaults) or ``static=1024``.

    ``best`` and ``used`` are returned as they are.

    Raises:
        UsageError: an unknown key, or a value that makes no scaler.
    """
    spec = raw.strip().lower()
    if spec in ("best", "used"):
        return spec
    values: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in spec.split(","))):
        key, equals, value = (x.strip() for x in part.partition("="))
        if not equals:
            raise UsageError(f"--loss-scaler {raw!r}: {part!r} is not KEY=VALUE; write {_POLICY_HELP}")
        if key not in _POLICY_KEYS and key != "static":
            near = get_close_matches(key, [*_POLICY_KEYS, "static"], n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"--loss-scaler has no key {key!r}; {hint}write {_POLICY_HELP}")
        values[_POLICY_KEYS.get(key, key)] = _scale_value(f"--loss-scaler {key}", value)
    if not values:
        raise UsageError(f"--loss-scaler {raw!r} says nothing; write {_POLICY_HELP}")
    return _policy(raw, values)


def _policy(raw: str, values: dict[str, float]) -> ScalerPolicy:
    if "static" in values and len(values) > 1:
        raise UsageError(f"--loss-scaler {raw!r}: a static scale never changes, so no other key goes with it")
    interval = values.pop("interval", float(ScalerPolicy.interval))
    if not interval.is_integer():
        raise UsageError(f"--loss-scaler {raw!r}: the growth interval is a whole number of steps, not {interval:g}")
    try:
        if "static" in values:
            return ScalerPolicy.static(values["static"])
        return ScalerPolicy(**values, interval=int(interval))
    except ValueError as error:
        raise UsageError(f"--loss-scaler {raw!r}: {error}") from None


def spell_policy(policy: ScalerPolicy) -> str:
    """Spell a policy for :func:`parse_policy`; ``min`` and ``max`` are left out if they are the defaults."""
    if policy == ScalerPolicy.static(policy.init):
        return f"static={_spell_scale(policy.init)}"
    words = [f"init={_spell_scale(policy.init)}", f"growth={policy.growth:g}", f"interval={policy.interval}"]
    words.append(f"backoff={policy.backoff:g}")
    for key, name in (("min", "min_scale"), ("max", "max_scale")):
        if getattr(policy, name) != getattr(ScalerPolicy, name):
            words.append(f"{key}={_spell_scale(getattr(policy, name))}")
    return ",".join(words)


def _spell_scale(scale: float) -> str:
    """Return the shortest exact spelling of a scale: ``65536``, ``2^40``."""
    mantissa, exponent = math.frexp(scale)
    if mantissa == 0.5 and not 0 <= exponent - 1 <= 16:
        return f"2^{exponent - 1}"
    return f"{scale:g}" if float(f"{scale:g}") == scale else repr(scale)


def parse_recipe(raw: str) -> Recipe | BlockFormat | str:
    """Parse ``current``, ``delayed:1024:max``, ``delayed:16:recent:1`` or a block format such as ``mxfp8``.

    ``best`` is returned as it is.

    Raises:
        UsageError: the spelling is none of these.
    """
    head, *rest = raw.strip().lower().split(":")
    if head == "best" and not rest:
        return "best"
    try:
        if head == "current" and len(rest) <= 1:
            return CurrentScaling(*map(_whole, rest))
        if head == "delayed" and len(rest) <= 3:
            return _delayed_scaling(rest)
    except ValueError as error:
        raise UsageError(f"--recipe {raw!r}: {error}; write {_RECIPE_HELP}") from None
    try:
        found = find_format("mxfp8" if head == "mx" else head)
    except UsageError:
        found = None
    if rest or not isinstance(found, BlockFormat):
        near = get_close_matches(head, ["current", "delayed", "best", "mxfp8", "mxfp4", "nvfp4", "tile128"], n=1)
        hint = f"did you mean {near[0]!r}? " if near and near[0] != head else ""
        raise UsageError(f"--recipe {raw!r} is not a scaling recipe; {hint}write {_RECIPE_HELP}")
    return found


def _delayed_scaling(parts: list[str]) -> DelayedScaling:
    history = _whole(parts[0]) if parts else DelayedScaling.history
    rule = Amax.MAX
    if len(parts) > 1:
        if parts[1] not in {a.value for a in Amax}:
            raise ValueError(f"{parts[1]!r} is neither max nor recent")
        rule = Amax(parts[1])
    return DelayedScaling(history, rule, _whole(parts[2]) if len(parts) > 2 else 0)


def _whole(raw: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,9}", raw):
        raise ValueError(f"{raw!r} is not a whole number")
    return int(raw)


def parse_operand_format(raw: str) -> Callable[[str], Format]:
    """Parse ``e4m3``, ``e5m2`` ... or ``hybrid`` (E4M3 forward, E5M2 for gradients); returns the format by kind.

    Raises:
        UsageError: an unknown format, or one that is not replayed with one scale per tensor.
    """
    from precdoctor.diagnosis.offline.replay.fp8 import hybrid

    if raw.strip().lower() == "hybrid":
        return hybrid
    fmt = find_element_format(raw)
    if fmt.kind is not Kind.FLOAT:
        raise UsageError(f"{fmt.name} is an integer format; scaling recipes are replayed for floating-point formats")
    return lambda _kind: fmt


def parse_accumulator(raw: str) -> Accumulator:
    """Parse ``14`` (bits), or ``14:128`` for promotion to FP32 every 128 terms.

    Raises:
        UsageError: the spelling is neither.
    """
    bits, _, promote = raw.strip().partition(":")
    try:
        return Accumulator(_whole(bits), _whole(promote) if promote else None)
    except ValueError as error:
        raise UsageError(f"--accumulator {raw!r}: {error}; write BITS or BITS:PROMOTE, such as 14 or 14:128") from None


def _scale_value(option: str, raw: str) -> float:
    """Parse ``1024``, ``0.5`` or ``2^13``; ``option`` is for the error message."""
    power = re.fullmatch(r"2(?:\^|\*\*)([+-]?\d{1,4})", raw)
    try:
        return 2.0 ** int(power[1]) if power else float(raw)
    except (ValueError, OverflowError):
        raise UsageError(f"{option}={raw} is not a number, such as 1024, 0.5 or 2^10") from None
