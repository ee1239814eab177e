"""PD1xx: where NaN and Inf come from.

Words of the family:

- An *incident* is a step with a non-finite loss, gradient, weight, buffer or output that no loss scaler handled.
- The *origin* of an incident is the first recorded tensor that became non-finite (``analyses.origin``).
- A *replay* is the step run again, op by op (``analyses.op_facts``). Its *culprit* is the op that made the first
  non-finite value, or the first op that read a tensor that was non-finite before the step.
- A *cause* names why the value became non-finite: ``matmul-overflow``, ``log-of-nonpositive``, ``other`` ...
- A *prescription* is the change that mends the cause, with the predicted effect of that change.

From a log to a finding:

1. :mod:`.bad_steps` finds the steps; :mod:`.incident_search` builds an :class:`.incident.Incident` for each.
2. Causes come from the recorded tensors (:mod:`.tensor_causes`), or from the replayed ops: :mod:`.culprit` finds the op
   and asks :mod:`.arithmetic_causes` and :mod:`.gradient_causes`.
3. :mod:`.merged_incidents` merges ranks, repetitions and consequences.
4. :mod:`.incident_report` makes the findings. Each rule describes its incidents from the tensors; :mod:`.op_report`
   describes replayed incidents, with :mod:`.op_prescriptions` and :mod:`.domain_prescriptions`. If training had
   diverged before the incident, the finding leads with the divergence (``diagnosis.divergence``).

PD101 to PD105 share this path and differ in the place that they report: forward pass, backward pass, loss, batch,
weights. PD106, PD107 and PD108 check buffers, deep scans and replays by themselves.
"""
