"""When a finding of one rule accounts for a finding of another, so that both are reported as one.

A rule lists the codes it explains, each with a relation that has to hold between the two findings:
``Rule(..., explains=when(same_module, "PD107", "PD206"))``. A relation is any function of ``(cause, effect)``; the
shared ones are here, the others in the file of their rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding

Relation = Callable[[Finding, Finding], bool]

#: Causes of a gradient beyond its format's range: a lower loss scale mends them.
_OUT_OF_RANGE = ("matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow", "loss-scale-overflow")


def when(relation: Relation, *codes: str) -> Mapping[str, Relation]:
    """The same relation for several codes, as an entry of ``Rule.explains``."""
    return dict.fromkeys(codes, relation)


def anywhere(_cause: Finding, _effect: Finding) -> bool:
    """Always: both findings are about the run as a whole, whatever their steps and modules."""
    return True


def covered_steps(finding: Finding) -> tuple[int, int] | None:
    """First and last step that a finding answers for; None when it is not about steps.

    It begins with the steps that a loss scaler had skipped in a row before the recorder saw one.
    """
    first = finding.location.step
    if first is None:
        return None
    last = finding.evidence.get("explains_until", finding.evidence.get("last_bad_step", first))
    skipped = int(finding.evidence.get("skips_in_a_row", 1)) - 1
    return first - skipped, max(first, int(last if last is not None else first))


def while_it_lasts(cause: Finding, effect: Finding) -> bool:
    """Whether ``effect`` begins on a step that ``cause`` covers."""
    span, begin = covered_steps(cause), effect.evidence.get("first_overflow_step", effect.location.step)
    return span is not None and begin is not None and span[0] <= int(begin) <= span[1]


def thrown_off_before(cause: Finding, effect: Finding) -> bool:
    """Whether ``cause`` is about first steps that replaced weights, and ``effect`` began behind them."""
    steps, later = cause.evidence.get("first_steps") or (), effect.location.step
    return later is not None and later > max(steps, default=later)


def grown_since(cause: Finding, effect: Finding) -> bool:
    """The same, and ``effect`` may have begun behind the first of these steps."""
    steps, later = cause.evidence.get("first_steps") or (), effect.location.step
    return later is not None and later > min(steps, default=later)


def not_thrown_off_before(cause: Finding, effect: Finding) -> bool:
    """Whether it is not the other way round: ``effect`` threw the run off before ``cause`` began."""
    return not thrown_off_before(effect, cause)


def makes_it_fall(cause: Finding, effect: Finding) -> bool:
    """Whether ``effect`` is a loss scale that falls while ``cause`` lasts, and not one that only never grows back."""
    return "clean_between_skips" not in effect.evidence and while_it_lasts(cause, effect)


def wears_the_scale_out(cause: Finding, effect: Finding) -> bool:
    """Whether ``cause`` is a loss scale that never grows back, and ``effect`` one of the overflows that lower it."""
    return "clean_between_skips" in cause.evidence and while_it_lasts(cause, effect)


def same_module(cause: Finding, effect: Finding) -> bool:
    """Whether both findings name the same module of the same root."""
    return (cause.location.root, cause.location.module) == (effect.location.root, effect.location.module)


def same_tensors(cause: Finding, effect: Finding) -> bool:
    """Whether every tensor of ``effect`` is one of ``cause``'s (``evidence["tensors"]``: FP8 operands)."""
    effects = _tensors(effect)
    return bool(effects) and set(effects) <= set(_tensors(cause))


def worst_tensor(cause: Finding, effect: Finding) -> bool:
    """Whether the worst tensor of ``effect`` is one of ``cause``'s."""
    return any(worst in _tensors(cause) for worst in _tensors(effect)[:1])


def mended_by_the_scale(cause: Finding, effect: Finding) -> bool:
    """Whether the gradient of ``effect`` overflowed within ``cause`` because of the loss scale alone."""
    return _is_mended(effect) and while_it_lasts(cause, effect)


def beyond_any_scale(cause: Finding, effect: Finding) -> bool:
    """Whether the gradient of ``cause`` overflowed for another reason than the loss scale, while ``effect`` began."""
    return not _is_mended(cause) and while_it_lasts(cause, effect)


def _is_mended(gradient: Finding) -> bool:
    """Whether it was out of range, its step was skipped, and training went on at a lower scale."""
    return bool(gradient.evidence.get("recovered")) and gradient.cause in _OUT_OF_RANGE


def modules_listed(finding: Finding, evidence: str, name: str) -> set[tuple[str | None, str]]:
    """Root and FQN of the modules in a list of the evidence; ``name="parameter"`` drops the parameter's own name."""
    listed = [str(entry.get(name)) for entry in finding.evidence.get(evidence, ())]
    modules = (n.rpartition(".")[0] if name == "parameter" else n for n in listed)
    return {(finding.location.root, m) for m in modules}


def _tensors(finding: Finding) -> list[tuple[Any, ...]]:
    """What identifies the tensors of a finding, the worst first."""
    names = ("root", "module", "kind", "name", "call")
    return [tuple(t.get(n) for n in names) for t in finding.evidence.get("tensors", ())]
