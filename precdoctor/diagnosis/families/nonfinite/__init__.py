"""PD1xx: where NaN and Inf come from.

An *incident* is a step whose loss, gradients, weights or buffers hold non-finite values that no loss scaler took care
of (:mod:`.bad_steps`). Its *origin* is the first tensor that went bad, by the recorded rows (:mod:`.incident_search`); its
*culprit* the op that made it so, where the failing step was replayed (:mod:`.culprit`, from ``survey.op_facts``). A
*cause* says why (:mod:`.tensor_causes` from rows; :mod:`.arithmetic_causes`, :mod:`.power_causes` and :mod:`.optimizer_causes` from
ops). Incidents that repeat or follow from an earlier one are merged (:mod:`.merged_incidents`,
:mod:`.later_incidents`, :mod:`.poisoned_state`).

Rules differ in the place they answer for: forward, backward, loss, batch, weights, buffers, results that a mask
hides, results that a replay does not repeat. :mod:`.incident_report` and :mod:`.op_report` give their words.
"""

from precdoctor.diagnosis.claims.rule import Rule
from precdoctor.diagnosis.families.nonfinite import (
    bad_input_batch,
    irreproducible_nonfinite,
    nonfinite_loss,
    nonfinite_origin_backward,
    nonfinite_origin_forward,
    nonfinite_weights,
    poisoned_buffers,
    swallowed_nonfinite,
)

RULES: tuple[Rule, ...] = (
    nonfinite_origin_forward.RULE,
    nonfinite_origin_backward.RULE,
    nonfinite_loss.RULE,
    bad_input_batch.RULE,
    nonfinite_weights.RULE,
    poisoned_buffers.RULE,
    swallowed_nonfinite.RULE,
    irreproducible_nonfinite.RULE,
)
