"""Words, evidence and prescription for the root of a divergence, for the rules that report one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from precdoctor.diagnosis.advice.stable_rate import rounded_down, stable_rate
from precdoctor.diagnosis.claims import snippets
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.divergence import missing_zero_grad
from precdoctor.diagnosis.divergence.learning_rates import jump_before, rise_at
from precdoctor.diagnosis.divergence.onset import REPLACED, Divergence, clip_level
from precdoctor.diagnosis.divergence.updates_by_step import updates_before
from precdoctor.diagnosis.survey.rows import text
from precdoctor.diagnosis.survey.step_facts import StepFacts, norms_of
from precdoctor.diagnosis.survey.view import Process, RunView

#: RMS of an update over RMS of its weight that a proposed rate aims at, large but usual: the ``target`` of PD504.
_BRISK = 0.02
#: Most steps between the rewriting of a weight and a rise that it explains; its effect takes a step or two.
_RECENT = 4
#: Fewest norms before the root that show which norm is usual.
_HEALTHY = 4
#: Classes of optimizers whose update is proportional to the gradient, so that clipping the gradient clips the update.
_PROPORTIONAL = frozenset({"SGD", "ASGD", ""})


def root_words(view: RunView, divergence: Divergence) -> str:
    """Return the root in words, as the beginning of a title."""
    root, first = divergence.root, divergence.links[0] if divergence.links else None
    if divergence.kind == "learning-rate" and (words := _rate_words(divergence.steps, divergence.at)):
        return words
    if divergence.kind == "rewritten" and first is not None:
        return _writing_words(first.what.split("`")[1], first.value, root)
    if divergence.kind == "unzeroed":
        return f"gradients add up from step {root} on, because `zero_grad()` is missing"
    if divergence.kind == "unbounded":
        return f"the loss falls without bound from step {root} on"
    if divergence.kind == "multiplied" and first is not None:
        return f"each step multiplies every weight matrix by {first.value:.3g}, from step {root} on"
    if divergence.kind == "initial" and first is not None:
        place = first.what.split("`")[1]
        return f"before any update, `{place}` makes {first.value:.3g} of a batch of {first.usual:.3g}"
    if divergence.kind == "batch" and first is not None:
        times = first.value / (first.usual or math.inf)
        return f"the batch of step {root} is {times:.3g} times larger than any before"
    if divergence.kind == "gradient":
        return f"the gradient of step {root} exploded{_norm_words(divergence)}"
    rate = divergence.first.lr
    at_rate = f" at a learning rate of {rate:.3g}" if rate and not _is_proportional(view, divergence) else ""
    if divergence.kind == "updates" and divergence.ratio is not None:
        size = f"{divergence.ratio:.2g} times the size of `{divergence.parameter}`"
        return f"updates{at_rate} reach {size} from step {root} on"
    return f"the run diverges from step {root} on{at_rate}"


def root_of_rise(view: RunView, process: Process, steps: Sequence[StepFacts], at: int) -> str:
    """Return the cause of a rise of loss or gradient norm at ``steps[at]`` in words; empty if it is unknown.

    Causes are a jump of the learning rate, or a weight that something other than the optimizer wrote.
    """
    jump = jump_before(steps, at + 1)
    if jump is not None and (words := _rate_words(steps, jump)):
        return words
    before = max(0, at - _RECENT)
    written = updates_before(view, process, steps[at].step).rewritten(steps[before].step, steps[at].step)
    return "" if written is None else _writing_words(written[1], written[2], written[0])


def _rate_words(steps: Sequence[StepFacts], at: int) -> str:
    """Return the rise of the learning rate at ``steps[at]``; empty if it did not rise there."""
    rise = rise_at(steps, at)
    return (
        "" if rise is None else f"the {rise.what} rose from {rise.before:.3g} to {rise.to:.3g} at step {steps[at].step}"
    )


def _writing_words(parameter: str, times: float, step: int) -> str:
    return f"something other than the optimizer multiplied `{parameter}` by {times:.3g} after step {step}"


def chain_words(divergence: Divergence, step: int, ended: str) -> str:
    """Return the links in words, one sentence per step; ``ended`` describes the incident at ``step``."""
    events = [(link.step, link.words) for link in divergence.links] + [(step, ended)]
    steps = dict.fromkeys(s for s, _ in events)
    return f"{'. '.join(f'Step {at}: ' + ', '.join(w for s, w in events if s == at) for at in steps)}."


def root_evidence(divergence: Divergence) -> dict[str, Any]:
    """Return the evidence of a finding: the step at which training diverged, the root and the links."""
    return {
        "left_its_course_at": divergence.root,
        "root": {
            "kind": divergence.kind,
            "step": divergence.root,
            "optimizer": divergence.first.optimizer,
            "update_to_weight": divergence.ratio,
            "parameter": divergence.parameter or None,
        },
        "chain": [link.as_evidence() for link in divergence.links],
        "confidence_reason": "rates, updates, norms and losses were recorded on the way",
    }


def root_cure(view: RunView, divergence: Divergence) -> Prescription:
    """Prescribe the one change that removes the cause; its numbers come from the steps before the root."""
    if divergence.kind == "rewritten":
        return _find_writer(divergence)
    if divergence.kind == "learning-rate" and (rise := rise_at(divergence.steps, divergence.at)) is not None:
        return _keep_rate(divergence, rise.before, rise.to)
    if divergence.kind == "unzeroed" and (kept := missing_zero_grad.unzeroed(view, 0.0)) is not None:
        return missing_zero_grad.cure(divergence.steps, kept)
    if divergence.kind == "unbounded":
        return _bound_objective(divergence)
    if divergence.kind == "multiplied":
        return _find_growth(divergence)
    if divergence.kind == "initial":
        return _begin_smaller(divergence)
    if not _is_proportional(view, divergence) or _clips(divergence):
        return _lower_rate(view, divergence)
    slower = stable_rate(view, divergence.steps) if divergence.at == 0 else None
    if slower is not None:
        return slower.prescription
    return _clip_norm(divergence) if _is_bounded_by_clipping(divergence) else _lower_rate(view, divergence)


def _keep_rate(divergence: Divergence, usual: float, present: float) -> Prescription:
    predicted: dict[str, Any] = {"lr": {"from": present, "to": usual}}
    if divergence.ratio is not None and divergence.usual_ratio is not None:
        predicted = {"update_to_weight": {"from": divergence.ratio, "to": divergence.usual_ratio}}
    return Prescription(
        title=f"keep the learning rate at {usual:.3g} at step {divergence.root} (it rose to {present:.3g}), or warm "
        "it up slowly",
        change={"lr": {"from": present, "to": usual}},
        predicted=predicted,
        snippet=snippets.group_option("lr", repr(usual)),
    )


def _lower_rate(view: RunView, divergence: Divergence) -> Prescription:
    """Prescribe a learning rate at which the update is :data:`_BRISK` times its weight, at most a tenth of the rate.

    If updates are proportional to the gradient, only the root's own update counts: it enlarges those after it, and no
    warm-up helps.
    """
    ratio, rate = divergence.ratio, divergence.first.lr
    follows = _is_proportional(view, divergence) and not _clips(divergence)
    ratio = divergence.own_ratio or ratio if follows else ratio
    factor = rounded_down(min(0.1, _BRISK / ratio)) if ratio else 0.1
    one = sum(len(o.get("groups") or ()) for o in view.optimizers) == 1
    rates = f" ({rate:.3g} -> {rate * factor:.3g})" if rate and one else ""
    warm_up = ", or a warm-up that begins there" if divergence.at < 4 and not follows else ""
    predicted: Mapping[str, Any] = {} if ratio is None else {"update_to_weight": {"from": ratio, "to": ratio * factor}}
    return Prescription(
        title=f"learning rate x {factor:g}{rates}{warm_up}",
        change={"lr_factor": factor},
        predicted=predicted,
        snippet=snippets.lower_rate(factor),
    )


def _clip_norm(divergence: Divergence) -> Prescription:
    """Prescribe to clip the gradient norm at twice its usual value before the root."""
    before = norms_of(divergence.steps[: divergence.at])
    norms = norms_of(divergence.steps[divergence.at :])
    level, peak = clip_level(before), norms[0] if norms else None
    healthy = len(before) >= _HEALTHY
    source = (
        f"twice the usual {median(before[-32:]):.2g} before step {divergence.root}"
        if healthy
        else "the usual choice; no healthy norm was recorded"
    )
    batch = f", and inspect the batch of step {divergence.root}" if divergence.kind == "batch" else ""
    return Prescription(
        title=f"clip the gradient norm at {level:.2g} ({source}){batch}",
        change={"clip_norm": {"from": divergence.first.clip_norm, "to": level}},
        predicted={"norm_at_the_root": {"from": peak, "to": min(level, peak) if peak is not None else level}},
        snippet=snippets.clip_norm(level),
    )


def _bound_objective(divergence: Divergence) -> Prescription:
    first = next((s.loss for s in divergence.steps if s.loss is not None), None)
    return Prescription(
        title="give the objective a lower bound: clamp the exponent or the score that it rewards, or penalise a "
        "critic's gradient",
        change={"objective": {"from": "unbounded", "to": "bounded"}},
        predicted={"smallest_loss": {"from": divergence.steps[-1].loss, "to": first}},
        snippet=(
            "import torch\n\n"
            "ratio = torch.exp((new_logp - old_logp).clamp(-5.0, 5.0))  # a critic: spectral_norm(layer)\n"
        ),
    )


def _find_writer(divergence: Divergence) -> Prescription:
    first = divergence.links[0]
    name = first.what.split("`")[1]
    return Prescription(
        title=f"find the code that writes to `{name}` between steps {divergence.root} and {divergence.root + 1}: "
        "loading weights, swapping in averages, rescaling by hand",
        change={"weights_written": {"parameter": name, "after_step": divergence.root}},
        predicted={"weight_per_step": {"from": first.value, "to": 1.0}},
        snippet=(
            "for name, p in model.named_parameters():  # before and after the suspect line\n"
            "    print(name, float(p.detach().float().norm()))\n"
        ),
    )


def _find_growth(divergence: Divergence) -> Prescription:
    """Prescribe to find the code that multiplies the weights, such as weight decay with the wrong sign."""
    factor = divergence.links[0].value
    return Prescription(
        title="find the code that adds a share of every weight to it, such as weight decay with the wrong sign, and "
        "leave that to the optimizer",
        change={"weight_decay": {"from": "added", "to": "subtracted"}},
        predicted={"weights_per_step": {"from": factor, "to": 1.0}},
        snippet=(
            "import torch\n\n"
            "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)  # takes it away\n"
        ),
    )


def _begin_smaller(divergence: Divergence) -> Prescription:
    first = divergence.links[0]
    return Prescription(
        title="initialise with a gain that keeps sizes (1, and sqrt(2) before a ReLU; orthogonal for recurrent "
        f"weights), or normalise between layers: largest output {first.value:.3g} -> about {first.usual:.3g}",
        change={"initialise": True},
        predicted={"largest_output": {"from": first.value, "to": first.usual}},
        snippet=(
            "import torch\n\n"
            "for layer in model.modules():\n"
            "    if isinstance(layer, torch.nn.Linear):\n"
            "        torch.nn.init.kaiming_normal_(layer.weight)  # recurrent: orthogonal_(layer.weight)\n"
        ),
    )


def _is_proportional(view: RunView, divergence: Divergence) -> bool:
    name = divergence.first.optimizer
    mine = next((o for o in view.optimizers if text(o.get("name")) == name), {})
    return text(mine.get("class")) in _PROPORTIONAL


def _clips(divergence: Divergence) -> bool:
    clip = divergence.first.clip_norm
    return clip is not None and 0.0 < clip < math.inf


def _is_bounded_by_clipping(divergence: Divergence) -> bool:
    """Whether the root's update, clipped as :func:`_clip_norm` proposes, leaves the weight in place, or is unknown.

    Without a healthy norm to clip at, every step may be clipped, so the clipped update must be a usual one.
    """
    before = norms_of(divergence.steps[: divergence.at])
    ratio, norm = divergence.own_ratio, divergence.first.grad_norm
    if ratio is None:
        return True
    clipped = ratio * min(1.0, clip_level(before) / norm) if norm else ratio
    return clipped < (REPLACED if len(before) >= _HEALTHY else _BRISK)


def _norm_words(divergence: Divergence) -> str:
    usual = norms_of(divergence.steps[: divergence.at])
    norm = divergence.first.grad_norm
    return f" (norm {median(usual[-8:]):.3g} -> {norm:.3g})" if usual and norm is not None else ""
