"""What an optimizer is given in place of its closure."""

from __future__ import annotations

import copy
import functools
import math
import pickle

import pytest
import torch

from precdoctor.recording.observe.closures import JudgedClosure
from tests.support.torch_release import RELEASE


@pytest.fixture
def told():
    return []


def judged(closure, told):
    return JudgedClosure(closure, lambda: told.append("begins"), lambda: told.append("ends"))


def test_it_returns_what_the_closure_returns(told):
    result = torch.ones(1)
    assert judged(lambda *args, **kwargs: (result, args, kwargs), told)(1, key=2) == (result, (1,), {"key": 2})
    assert told == ["begins", "ends"]


def test_what_the_closure_raises_passes_through(told):
    def closure():
        raise ZeroDivisionError("of the user's")

    with pytest.raises(ZeroDivisionError, match="of the user's"):
        judged(closure, told)()
    assert told == ["begins"], "there is nothing to judge"


def test_copies_and_pickles_are_the_closure_itself(told):
    assert pickle.loads(pickle.dumps(judged(math.sqrt, told))) is math.sqrt
    assert copy.deepcopy(judged(math.sqrt, told)) is math.sqrt
    assert copy.copy(judged(math.sqrt, told)) is math.sqrt


def test_it_has_the_attributes_of_the_closure(told):
    def closure():
        return 1

    closure.kind = "own"
    assert (judged(closure, told).kind, judged(closure, told).__name__) == ("own", "closure")
    assert torch.enable_grad()(judged(functools.partial(closure), told))() == 1


def test_compiled_code_calls_the_closure_alone(told):
    graphs = []

    def backend(graph, _example):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def step(x, closure):
        return closure(x)

    try:
        for _ in range(3):  # a new closure in each step, and no new graph
            assert step(torch.ones(2), judged(lambda x: x + 1, told)).tolist() == [2.0, 2.0]
    finally:
        torch._dynamo.reset()  # hooks stay where they are in a process that has compiled something
    assert told == []
    assert len(graphs) == 1 or RELEASE < (2, 12), "torch 2.6 compiles for each object"
