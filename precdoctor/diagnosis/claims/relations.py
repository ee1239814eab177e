"""Relations between two findings: if the relation holds, one explains the other, and both are reported as one.

A rule lists the codes it explains, each with the relation that has to hold between the two findings:
``Rule(..., explains=when(same_module, "PD107", "PD206"))``. A relation is a function of ``(cause, effect)``; the shared
ones are here, the others in the file of their rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from precdoctor.diagnosis.claims.finding import Finding

Relation = Callable[[Finding, Finding], bool]

#: Causes of gradients beyond their format's range, which a lower loss scale prevents.
_OUT_OF_RANGE = ("matmul-overflow", "reduction-overflow", "square-overflow", "cast-overflow", "loss-scale-overflow")


def when(relation: Relation, *codes: str) -> Mapping[str, Relation]:
    """Return the entries of ``Rule.explains`` for several codes with the same relation."""
    return dict.fromkeys(codes, relation)


def anywhere(_cause: Finding, _effect: Finding) -> bool:
    """Always True: for findings about the run as a whole, whatever their steps and modules."""
    return True


def covered_steps(finding: Finding) -> tuple[int, int] | None:
    """Return the first and last step that a finding covers; None if it is not about steps.

    The steps that the loss scaler had skipped in a row up to the finding's own are covered as well.
    """
    first = finding.location.step
    if first is None:
        return None
    last = finding.evidence.get("explains_until", finding.evidence.get("last_bad_step", first))
    skipped = int(finding.evidence.get("skips_in_a_row", 1)) - 1
    return first - skipped, max(first, int(last if last is not None else first))


def while_it_lasts(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` begins on a step that ``cause`` covers."""
    span, begin = covered_steps(cause), effect.evidence.get("first_overflow_step", effect.location.step)
    return span is not None and begin is not None and span[0] <= int(begin) <= span[1]


def thrown_off_before(cause: Finding, effect: Finding) -> bool:
    """Return whether the run's first updates replaced weights (``cause``), and ``effect`` began after all of them."""
    steps, later = cause.evidence.get("first_steps") or (), effect.location.step
    return later is not None and later > max(steps, default=later)


def grown_since(cause: Finding, effect: Finding) -> bool:
    """Return whether the run's first updates replaced weights (``cause``), and ``effect`` began after the first one."""
    steps, later = cause.evidence.get("first_steps") or (), effect.location.step
    return later is not None and later > min(steps, default=later)


def not_thrown_off_before(cause: Finding, effect: Finding) -> bool:
    """Return False if the run's first updates replaced weights (``effect``) before ``cause`` began, else True."""
    return not thrown_off_before(effect, cause)


def makes_it_fall(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect``, a falling loss scale, begins while ``cause`` lasts.

    False for a scale that falls because it never grows back between the skipped steps.
    """
    return "clean_between_skips" not in effect.evidence and while_it_lasts(cause, effect)


def wears_the_scale_out(cause: Finding, effect: Finding) -> bool:
    """Return whether ``cause`` is a loss scale that never grows back, and ``effect`` an overflow that lowers it."""
    return "clean_between_skips" in cause.evidence and while_it_lasts(cause, effect)


def same_module(cause: Finding, effect: Finding) -> bool:
    """Return whether both findings are about the same module of the same root."""
    return (cause.location.root, cause.location.module) == (effect.location.root, effect.location.module)


def same_tensors(cause: Finding, effect: Finding) -> bool:
    """Return whether ``cause`` lists every tensor of ``effect`` (``evidence["tensors"]``: FP8 operands)."""
    effects = _tensors(effect)
    return bool(effects) and set(effects) <= set(_tensors(cause))


def worst_tensor(cause: Finding, effect: Finding) -> bool:
    """Return whether ``cause`` lists the worst tensor of ``effect``."""
    return any(worst in _tensors(cause) for worst in _tensors(effect)[:1])


def mended_by_the_scale(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` began while ``cause`` lasts, and is a gradient overflow that a lower scale cured."""
    return _is_mended(effect) and while_it_lasts(cause, effect)


def beyond_any_scale(cause: Finding, effect: Finding) -> bool:
    """Return whether ``effect`` began while ``cause`` lasts, and no lower loss scale cured ``cause``."""
    return not _is_mended(cause) and while_it_lasts(cause, effect)


def _is_mended(gradient: Finding) -> bool:
    """Return whether a gradient was out of range, but the step was skipped and training recovered."""
    return bool(gradient.evidence.get("recovered")) and gradient.cause in _OUT_OF_RANGE


def modules_listed(finding: Finding, evidence: str, name: str) -> set[tuple[str | None, str]]:
    """Return root and FQN of the modules in a list of the evidence.

    Args:
        evidence: key of the list.
        name: key of the module in an entry; for ``parameter`` the parameter's own name is cut off.
    """
    listed = [str(entry.get(name)) for entry in finding.evidence.get(evidence, ())]
    modules = (n.rpartition(".")[0] if name == "parameter" else n for n in listed)
    return {(finding.location.root, m) for m in modules}


def _tensors(finding: Finding) -> list[tuple[Any, ...]]:
    """Return the identities of the tensors of a finding, the worst first."""
    names = ("root", "module", "kind", "name", "call")
    return [tuple(t.get(n) for n in names) for t in finding.evidence.get("tensors", ())]
