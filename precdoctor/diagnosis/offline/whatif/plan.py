"""Precision plans for training: for each module the narrowest formats that meet the target at every recorded step, and
with amax extrapolated to a later one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from precdoctor.diagnosis.offline.whatif.forecast import forecast_of, predicted
from precdoctor.diagnosis.offline.whatif.gather import FEW_STEPS, Gathered, Seen, Selection, gather
from precdoctor.diagnosis.offline.whatif.operands import Operands, modules_with_operands
from precdoctor.diagnosis.offline.whatif.recipe import Recipe, ask
from precdoctor.diagnosis.offline.whatif.target import Target
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.errors import UsageError
from precdoctor.numerics.prediction import Prediction
from precdoctor.runlog.shell import quoted_path

if TYPE_CHECKING:
    from precdoctor.runlog.reader import Run

_E4M3, _E5M2, _MXFP8, _BF16 = (ask(name) for name in ("e4m3", "e5m2", "mxfp8", "bf16"))
_RECIPES = (_E4M3, _E5M2, _MXFP8, _BF16)
#: The precisions, the narrowest first, and the recipe of each operand in them. With a scale per tensor FP8 gradients
#: need E5M2, with block scales they do not (arXiv:2209.05433, section 3; OCP MX 1.0).
PRECISIONS: dict[str, dict[str, Recipe]] = {
    "fp8": {"weight": _E4M3, "input": _E4M3, "grad_output": _E5M2},
    "mxfp8": dict.fromkeys(("weight", "input", "grad_output"), _MXFP8),
    "bf16": dict.fromkeys(("weight", "input", "grad_output"), _BF16),
}
#: The precision of a module that stays as it was recorded.
WIDE = "wide"
#: A plan from steps before this one carries a warning. Chosen empirically: outlier channels emerge over thousands of
#: steps (Dettmers et al., LLM.int8(), arXiv:2208.07339, section 3).
EARLY_STEPS = 1000
#: Most binades of extrapolated growth, because a line through a steep start cannot be trusted.
_MOST_GROWTH = 32.0
#: Returns the binades that a tensor's largest elements gain until the horizon, under a recipe.
_Growth = Callable[[Seen, Recipe], float]
_KINDS = ("batch", "input", "output", "weight", "grad_output")


@dataclass(frozen=True)
class OperandPlan:
    """One operand in the chosen precision.

    Attributes:
        source: module and kind of the recorded tensor.
        step: its worst step.
        growth: binades that amax (without a scale) or amax over the geometric mean (with one) gains until the horizon.
        prediction: at the worst step, growth included.
    """

    role: str
    source: str
    recipe: Recipe
    step: int
    growth: float
    prediction: Prediction


@dataclass(frozen=True)
class ModulePlan:
    """The plan of one module; ``precision`` is a key of :data:`PRECISIONS` or :data:`WIDE`.

    Attributes:
        reason: why the next narrower precision fails; empty for the narrowest.
        operands: the recorded operands in that precision; empty if wide.
        not_recorded: roles of the operands without rows.
    """

    root: str
    module: str
    module_class: str
    precision: str
    reason: str
    operands: tuple[OperandPlan, ...]
    not_recorded: tuple[str, ...]
    weight_elements: int


@dataclass(frozen=True)
class Memory:
    """Bytes that the planned modules' matrix products read: now and under the plan.

    Attributes:
        weights: copies of the weights for the products; master weights are not included.
        inputs: inputs saved for the backward pass of one micro-step.
    """

    weights: tuple[int, int] = (0, 0)
    inputs: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Plan:
    """A precision plan.

    Attributes:
        steps: the recorded steps it is based on, ascending.
        horizon: the step to which amax is extrapolated.
    """

    target: Target
    modules: tuple[ModulePlan, ...]
    steps: tuple[int, ...]
    horizon: int
    memory: Memory
    warnings: tuple[str, ...]

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        return tuple(dict.fromkeys(o.recipe for m in self.modules for o in m.operands if m.precision != WIDE))


def make_plan(
    run: Run,
    target: Target,
    *,
    module: str | None = None,
    steps: tuple[int | None, int | None] = (None, None),
    horizon: int | None = None,
) -> Plan:
    """Plan every module with a weight matrix.

    Args:
        module: a glob over module names; None means all.
        steps: half-open range of the steps to base the plan on.
        horizon: the step to extrapolate to; by default as far beyond the last step as the first one is before it.

    Raises:
        UsageError: there is no such module, or the horizon lies before the last step.
        RunUnreadableError: the log is damaged.
    """
    gathered = gather(run, Selection(lambda _key: True, _KINDS, steps), _RECIPES, target)
    modules = [m for m in modules_with_operands(gathered.seen, run) if module is None or fnmatchcase(m.module, module)]
    if not modules or not gathered.steps:
        among = f"matching {module!r} " if module is not None else ""
        hint = f"`precdoctor show {quoted_path(run.path)}` lists what is there"
        raise UsageError(f"no module {among}has a recorded weight matrix to plan for; {hint}")
    first, last = gathered.steps[0], gathered.steps[-1]
    goal = 2 * last - first + 1 if horizon is None else horizon
    if goal < last:
        raise UsageError(f"--horizon {goal} lies before the last recorded step, {last}")
    numbers = {s.key: i for i, s in enumerate(gathered.seen)}

    def growth(seen: Seen, recipe: Recipe) -> float:
        peak, crest = gathered.trends.slopes(numbers[seen.key])
        slope = peak if recipe.scaling == "none" else crest if recipe.scaling == "tensor" else 0.0
        return min(max(slope, 0.0) * (goal - last), _MOST_GROWTH)

    plans = tuple(_module_plan(m, target, growth) for m in modules)
    autocast = any(rank.facts.get("autocast") for rank in run.ranks)
    memory = _memory(modules, plans, autocast=autocast)
    return Plan(target, plans, tuple(gathered.steps), goal, memory, tuple(_warnings(gathered)))


def _module_plan(module: Operands, target: Target, growth: _Growth) -> ModulePlan:
    """Choose the narrowest precision in which all recorded operands of a module meet the target, or :data:`WIDE`."""
    lacking = tuple(role for role in ("weight", "input", "grad_output") if role not in dict(module.recorded))
    made: tuple[OperandPlan, ...] = ()
    precision, reason = WIDE, module.keep and f"{module.keep}: kept wide whatever the numbers say"
    if not reason and module.input is None:
        reason = "input: not recorded, and not another module's output"
    if not reason:
        for name, recipes in PRECISIONS.items():
            made, why = _operands(module, recipes, target, growth)
            if not why:
                precision = name
                break
            reason = why
        else:
            made = ()
    elements = math.prod(module.weight.shape)
    return ModulePlan(module.root, module.module, module.module_class, precision, reason, made, lacking, elements)


def _operands(
    module: Operands, recipes: Mapping[str, Recipe], target: Target, growth: _Growth
) -> tuple[tuple[OperandPlan, ...], str]:
    """Plan each operand in one precision; also returns why the precision fails, empty if it does not."""
    made = []
    for role, seen in module.recorded:
        recipe = recipes[role]
        now = forecast_of(seen, recipe, target)
        row = seen.worst[recipe]
        if row is None or now.prediction is None or now.step is None:
            return (), f"{role}: {now.unknown}"
        grows = growth(seen, recipe)
        later = predicted(row, seen.key, recipe, growth=grows) if recipe.scaling == "tensor" else now.prediction
        source = f"{seen.key.module or seen.key.root} {seen.key.kind}"
        made.append(OperandPlan(role, source, recipe, now.step, grows, later))
        flushed = max(now.flushed, later.flushed.estimate)
        misses = list(recipe.limits(target).misses(later, flushed))
        if recipe.scaling == "none" and now.prediction.headroom_binades.estimate < grows:
            misses.append("headroom")
        if misses:
            return (), _failure_words(role, recipe, now.step, misses, later, flushed, grows, first=now.misses)
    return tuple(made), ""


def _failure_words(
    role: str,
    recipe: Recipe,
    step: int,
    misses: Sequence[str],
    later: Prediction,
    flushed: float,
    grows: float,
    *,
    first: Sequence[str],
) -> str:
    """Return why an operand fails: ``grad_output in E5M2 at step 12: 1.3 % flushed``."""
    words = {
        "flushed": f"{100 * flushed:.2g} % flushed",
        "saturated": f"{100 * later.saturated.estimate:.2g} % saturated",
        "sqnr": f"SQNR {later.sqnr_db.estimate:.1f} dB",
        "headroom": f"amax growing by {grows:.1f} binades overflows",
    }
    when = f"at step {step}" if first else f"once amax has grown by {grows:.1f} binades"
    return f"{role} in {recipe.name} {when}: {', '.join(words[m] for m in misses)}"


def _memory(modules: Sequence[Operands], plans: Sequence[ModulePlan], *, autocast: bool) -> Memory:
    """Compute the memory from recorded dtypes and shapes; under autocast products read 16-bit copies now."""
    weights, inputs = [0.0, 0.0], [0.0, 0.0]
    for module, plan in zip(modules, plans, strict=True):
        recipes = PRECISIONS.get(plan.precision)
        if module.keep == "embedding":
            continue  # its weight is looked up, not multiplied
        for role, seen, sums in (("weight", module.weight, weights), ("input", module.input, inputs)):
            if seen is None:
                continue
            bits = min(seen.bits, 16.0) if autocast else seen.bits
            count = math.prod(seen.shape)
            sums[0] += count * bits / 8
            sums[1] += count * min(bits, recipes[role].bits_per_element if recipes else bits) / 8
    return Memory((round(weights[0]), round(weights[1])), (round(inputs[0]), round(inputs[1])))


def _warnings(gathered: Gathered) -> Iterator[str]:
    first, last, count = gathered.steps[0], gathered.steps[-1], len(gathered.steps)
    window = f"steps {first} to {last}" if first != last else f"step {first}"
    rests = f"Rests on {count} recorded step{'s' if count != 1 else ''} ({window})"
    if last < EARLY_STEPS:
        yield (
            f"{rests}, early in training: outliers emerge late, so plan again from a window beyond step "
            f"{EARLY_STEPS:,} before relying on it."
        )
    elif count < FEW_STEPS:
        yield f"{rests} only: rare outliers may lie between them."


def finite_steps(
    view: RunView, steps: tuple[int | None, int | None]
) -> tuple[tuple[int | None, int | None], str | None]:
    """Cut the half-open range ``steps`` before the step from which the run is non-finite to its end.

    Also returns a sentence about that; None if the range needs no cut.
    """
    ends = []
    for timeline in view.timeline.values():
        masks, bad = min((facts.non_finite for facts in timeline), default=0), None  # weights with masks
        for facts in timeline:
            if facts.skipped or not (facts.loss_is_bad or facts.non_finite > masks):
                bad = None
            elif bad is None:
                bad = facts.step
        ends += [] if bad is None else [bad]
    if not ends or (steps[1] is not None and steps[1] <= min(ends)):
        return steps, None
    first, since = steps[0] or 0, min(ends)
    gone = f"The run is non-finite from step {since} to its end"
    if not any(first <= f.step < since for timeline in view.timeline.values() for f in timeline if f.sampled):
        return steps, f"{gone}, and the plan rests on those steps: it says nothing of a healthy run."
    return (steps[0], since), f"{gone}: the plan rests on the steps before."
