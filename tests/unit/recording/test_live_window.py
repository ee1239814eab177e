"""A trace that is open before any model is called, for as long as data is prepared."""

from __future__ import annotations

import torch

from precdoctor.recording.microscope.slicing import slice_back
from precdoctor.recording.microscope.tracer import External, Tracer


def test_a_trace_without_end_keeps_its_last_ops_only():
    tracer = Tracer({})
    tracer.window = 20
    with tracer:
        early = torch.ones(3) * 2
        for _ in range(50):
            torch.ones(3) + 1
        zeros = torch.zeros(3)
        late = zeros / zeros
    assert len(tracer.records) <= 20
    assert tracer.source(early) == External("constant"), "it is from before the trace"
    (origin,) = slice_back(tracer.records, [tracer.source(late)]).origins
    assert tracer.records[origin].op == "aten.div.Tensor"


def test_memory_that_another_tensor_had_is_not_its_work():
    """NumPy makes a tensor without an op, and may get the memory of one that is gone."""
    tracer = Tracer({})
    with tracer:
        x = torch.zeros(3)
        y = x / x
    assert tracer.made_bad(y) and not tracer.made_bad(x)
    tracer.forget(y)
    assert not tracer.made_bad(y) and tracer.source(y) == External("constant")
