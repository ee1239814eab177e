"""Reads and checks the plan file of ``whatif --plan -o``, which a person may have edited."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from precdoctor.diagnosis.offline.whatif.plan import PRECISIONS, WIDE
from precdoctor.diagnosis.offline.whatif.recipe import Recipe, ask
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.errors import UsageError
from precdoctor.numerics.narrow_cast import ROLES, NarrowCast, casts_in_words
from precdoctor.runlog.changes import Change
from precdoctor.runlog.toml import read_toml

SCHEMA_VERSION = 1
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Figures:
    """The plan's prediction: likely flushed and saturated share of the finite non-zero elements, SQNR in dB."""

    flushed: float
    saturated: float
    sqnr_db: float


@dataclass(frozen=True)
class PlannedCast:
    """One operand of a module, and its planned cast.

    Attributes:
        role: one of :data:`~precdoctor.numerics.narrow_cast.ROLES`.
        recipe: the cast, for predictions.
        cast: the same cast, to be applied in a training.
        figures: the plan's prediction; None if the file's recipe is not the planned one.
    """

    root: str
    module: str
    role: str
    recipe: Recipe
    cast: NarrowCast
    figures: Figures | None


@dataclass(frozen=True)
class PlanFile:
    """A plan that a trial can apply.

    Attributes:
        run: path of the run that the plan was made from.
        casts: the casts of all modules that do not stay wide.
    """

    run: str
    target: Target
    casts: tuple[PlannedCast, ...]

    @property
    def modules(self) -> tuple[tuple[str, str], ...]:
        """Root and name of each module with a cast."""
        return tuple(dict.fromkeys((c.root, c.module) for c in self.casts))

    @property
    def changes(self) -> tuple[Change, ...]:
        """One change per module."""
        by_module = {
            place: {c.role: c.cast for c in self.casts if (c.root, c.module) == place} for place in self.modules
        }
        return tuple(
            Change("module.casts", casts_in_words(casts), root=root, module=module)
            for (root, module), casts in by_module.items()
        )


def load(file: Path) -> PlanFile:
    """Read a plan from a TOML file, or from a JSON file by its suffix.

    Raises:
        UsageError: the file cannot be read, is no plan, changes no module, or has a cast that cannot be applied.
    """
    try:
        document = _json(file) if file.suffix == ".json" else read_toml(file, MAX_BYTES)
    except FileNotFoundError:
        raise UsageError(
            f"there is no plan {file}; write one with: precdoctor whatif RUN --plan -o plan.toml"
        ) from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}; name a plan that can") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None
    modules = document.get("modules")
    if document.get("schema_version") != SCHEMA_VERSION or not isinstance(modules, list):
        raise UsageError(f"{file} is not a plan; write one with: precdoctor whatif RUN --plan -o {file}")
    plan = document.get("plan")
    if isinstance(plan, Mapping) and plan.get("of") == "inference":
        raise UsageError(f"{file} is a plan for inference; trial runs a training, so make a plan of a run that trains")
    casts = [cast for module in modules for cast in _module(module, str(file))]
    if not casts:
        raise UsageError(f"{file} keeps every module wide: there is nothing to try")
    if len({(c.root, c.module, c.role) for c in casts}) < len(casts):
        raise UsageError(f"{file} has a module twice; take one out")
    run = document.get("run")
    target = plan.get("target") if isinstance(plan, Mapping) else None
    return PlanFile(
        run=str(run.get("path", "")) if isinstance(run, Mapping) else "",
        target=Target(**_target(target, str(file))) if isinstance(target, Mapping) else Target(),
        casts=tuple(casts),
    )


def _json(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    document = json.loads(content) if len(content) <= MAX_BYTES else None
    return document if isinstance(document, dict) else {}


def _target(table: Mapping[str, Any], origin: str) -> dict[str, float]:
    found = {}
    for key in ("max_flushed", "max_saturated", "min_sqnr_db"):
        if key in table:
            value = _number(table[key])
            if value is None:
                raise UsageError(f"{origin}: {key} of the target is a number, got {table[key]!r}")
            found[key] = value
    return found


def _module(raw: Any, origin: str) -> list[PlannedCast]:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("module"), str) or not isinstance(raw.get("root"), str):
        raise UsageError(f"{origin}: each of the modules is a table with root and module")
    place = f"{origin}: {raw['module'] or raw['root']}"
    if raw.get("precision") == WIDE:
        return []
    operands = raw.get("operands", raw)  # in JSON the operands are in a table of their own
    found = [_cast(raw, role, operands[role], f"{place} {role}") for role in ROLES if role in operands]
    if not found:
        raise UsageError(f'{place} has no operand to cast; write precision = "wide", or {", ".join(ROLES)} tables')
    return found


def _cast(module: Mapping[str, Any], role: str, raw: Any, origin: str) -> PlannedCast:
    if not isinstance(raw, Mapping) or not isinstance(raw.get("format"), str):
        raise UsageError(f"{origin}: an operand is a table with format and scaling")
    scaling, scale = raw.get("scaling"), _number(raw.get("scale"))
    try:
        fixed = scaling == "fixed" or (scaling is None and scale is not None)
        recipe = ask(
            raw["format"],
            scaling=None if fixed or scaling is None else str(scaling),
            scale=(scale or 0.0) if fixed else None,
            rule=raw.get("scale_rule"),
        )
        applied = NarrowCast.of(recipe.name, _scaling(recipe))
    except (UsageError, ValueError) as error:
        raise UsageError(f"{origin}: {error}") from None
    planned = PRECISIONS.get(str(module.get("precision")), {}).get(role)
    shares = (raw.get(name) for name in ("flushed", "saturated", "sqnr_db"))
    figures = [_number(share.get("estimate")) if isinstance(share, Mapping) else None for share in shares]
    known = Figures(*figures) if planned == recipe and None not in figures else None  # type: ignore[arg-type]
    return PlannedCast(module["root"], module["module"], role, recipe, applied, known)


def _scaling(recipe: Recipe) -> str:
    if recipe.rule is not None:
        return recipe.rule.value
    return repr(recipe.scale) if recipe.scaling == "fixed" else recipe.scaling


def _number(raw: Any) -> float | None:
    """Convert a number, or ``"Infinity"``, to a float; None for anything else and for NaN."""
    if isinstance(raw, str) and raw in ("Infinity", "-Infinity"):
        return float(raw)
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        return None
    try:
        value = float(raw)
    except OverflowError:  # JSON has integers of any length
        return None
    return None if math.isnan(value) else value
