"""PD204 along calls: gradients vanish before the first calls of a recurrent cell, and the loss does not fall."""

from __future__ import annotations

import math
from statistics import fmean

from precdoctor.diagnosis.analyses.depth import LAST_CALL, Chain, call_chains, rising_share, slope
from precdoctor.diagnosis.analyses.histories import quarter_means, watched_steps
from precdoctor.diagnosis.claims.finding import Finding, Location, Phase, Prescription
from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.claims.snippets import module_expression
from precdoctor.diagnosis.claims.words import percent, plural
from precdoctor.diagnosis.survey.rows import grouped, tensor_evidence
from precdoctor.diagnosis.survey.view import RunView


def decay(chain: Chain) -> float:
    """Binades that the gradient loses from the last layer or call to the first."""
    return math.log2(chain.norms[-1] / chain.norms[0])


def number_of_calls(chain: Chain) -> int:
    """Number of calls in a step. Late calls share one row; its number of elements shows how many they are."""
    first, last = chain.links[0], chain.links[-1]
    if last.index < LAST_CALL or not (first.rms and last.rms):
        return last.index + 1
    return last.index + round((last.norm / last.rms) ** 2 / (first.norm / first.rms) ** 2)


def find_forgetting(view: RunView, least: int) -> Chain | None:
    """The module with at least ``least`` calls that loses most from last call to first; None without any."""
    candidates = (c for c in call_chains(view, "grad_output", least) if len(c.alive) >= least)
    return max(candidates, key=decay, default=None)


def learnt_share(view: RunView) -> float | None:
    """Share by which the mean loss over ranks fell from the oldest to the newest quarter; None below four losses."""
    every = ((s.step, s.loss) for steps in view.timeline.values() for s in steps)
    by_step = grouped((step, loss) for step, loss in every if loss is not None and math.isfinite(loss))
    means = quarter_means([fmean(ranks) for _, ranks in sorted(by_step.items())])
    if means is None:
        return None
    before, after = means
    return (before - after) / abs(before) if before else 0.0


def forgetting_finding(rule: Rule, view: RunView, chain: Chain, fallen: float, limits: tuple[float, float]) -> Finding:
    """The finding for a module that forgets.

    ``limits`` are those of the decay in binades, and of ``fallen``, the :func:`learnt_share`.
    """
    step, calls, lost = watched_steps(view)[-1], number_of_calls(chain), decay(chain)
    first, last = chain.alive[0], chain.alive[-1]
    later = " and later" if last.index == LAST_CALL else ""
    place = chain.root, first.module
    gradients = [r for r in view.any_rows(step) if r.kind == "grad_output" and r.layer == place]
    row = next((r for r in gradients if r.call == first.index), None)
    per_call = slope(chain.norms[:-1] if later else chain.norms)
    return rule.finding(
        confidence=0.75,
        title=f"gradients vanish along {calls} calls of `{first.module}`: {first.norm / last.norm:.2g} reaches "
        "the first",
        message=f"A step calls `{first.module}` ({chain.module_class}) {calls} times. The gradient of its output falls "
        f"from {last.norm:.3g} at call {last.index}{later} to {first.norm:.3g} at call {first.index} (L2, median of "
        f"{plural(chain.steps, 'step')}). That is a fall by 2^{lost:.1f} (limit 2^{limits[0]:g}), a factor of "
        f"{2.0**per_call:.3g} per call. FP32 rounds away the first calls' share of the weights' gradient. From the "
        f"oldest quarter of the run to the newest the loss has fallen by {percent(max(0.0, fallen))} (limit "
        f"{percent(limits[1])}). The cell does not learn from its first calls.",
        location=Location(chain.root, first.module, chain.module_class, "grad_output", Phase.BACKWARD, 0, step),
        evidence={
            "decay_binades": lost,
            "limit": limits[0],
            "binades_per_call": per_call,
            "calls": calls,
            "loss_fell_by": fallen,
            "links": [{"call": k.index, "norm": k.norm} for k in chain.links],
            "steps_examined": chain.steps,
            "confidence_reason": f"it falls in {rising_share(chain.norms):.0%} of the steps from call to call; "
            "that the loss stays up for this reason is inferred",
            **tensor_evidence(row, gradients),
        },
        prescription=_lasting_state(chain, calls),
    )


def _lasting_state(chain: Chain, calls: int) -> Prescription:
    """Initialise the cell so that it keeps its state over the calls of a step.

    A forget gate with the bias log(T - 1) keeps 1 - 1/T of the state per call, (1 - 1/T)^T after T calls (Tallec and
    Ollivier, arXiv:1804.11188); an orthogonal matrix keeps the norm (Saxe et al., arXiv:1312.6120).
    """
    module, ratio = chain.links[0].module, chain.alive[0].norm / chain.alive[-1].norm
    if "LSTM" in chain.module_class:
        after = (1.0 - 1.0 / calls) ** calls
        bias = math.log(max(2, calls) - 1)
        return Prescription(
            title=f"forget gates that stay open, bias {bias:.2g}: first / last {ratio:.2g} -> about {after:.2g}",
            change={"module": module, "forget_gate_bias": {"to": bias}},
            predicted={"first_to_last_gradient": {"from": ratio, "to": after}},
            snippet=(
                "import torch\n\n"
                f"cell = {module_expression(module)}\n"
                "n = cell.hidden_size\n"
                "with torch.no_grad():  # the gates are stacked: input, forget, cell, output\n"
                f"    cell.bias_ih[n : 2 * n] = {bias:.3g}\n"
                "    cell.bias_hh[n : 2 * n] = 0.0\n"
            ),
        )
    return Prescription(
        title=f"a recurrence that keeps the norm: first / last {ratio:.2g} -> about 1",
        change={"module": module, "recurrent_weights": {"to": "orthogonal"}},
        predicted={"first_to_last_gradient": {"from": ratio, "to": 1.0}},
        snippet=(
            "import torch\n\n"
            f"cell = {module_expression(module)}\n"
            "torch.nn.init.orthogonal_(cell.weight_hh)  # the matrix that the state of the call before goes through\n"
        ),
    )
