"""Where the mode may be open, and how it is closed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from precdoctor.recording.fp8.fp8_mode import CastMode, is_open, supported
from precdoctor.recording.ops.dispatched_ops import take_off


class Other(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("backends", "may"), [({1: None}, True), ({1: None, 2: print}, False), ({}, True)])
def test_in_older_torch_not_where_something_is_compiled(monkeypatch, backends, may):
    monkeypatch.delattr(TorchDispatchMode, "ignore_compile_internals", raising=False)
    monkeypatch.setitem(sys.modules, "torch._dynamo.eval_frame", SimpleNamespace(cached_backends=backends))
    assert supported() is may


def test_it_is_taken_from_under_other_modes_which_stay_in_order():
    def nothing(*_):
        return None

    observer = SimpleNamespace(before=nothing, after=nothing, written=nothing)
    ours, first, second = CastMode(observer), Other(), Other()
    with first:
        ours.__enter__()
        assert is_open() and ours.is_top
        second.__enter__()
        assert not ours.is_top
        take_off(ours)
        assert _get_current_dispatch_mode_stack() == [first, second] and not is_open()
        take_off(ours)  # twice does nothing
        assert torch.ones(2).mul_(2.0).tolist() == [2.0, 2.0]
        second.__exit__(None, None, None)
    assert _get_current_dispatch_mode_stack() == []
