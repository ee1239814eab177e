"""Hooks around what autograd saves are noticed, with torch's own answer and where torch has none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from precdoctor.recording.scene import saved_hooks


@pytest.fixture(params=["asked", "counted"])
def active(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    autograd = torch._C._autograd
    if request.param == "asked":
        if not hasattr(autograd, "_top_saved_tensors_default_hooks"):
            pytest.skip("this torch cannot be asked")
        yield saved_hooks.active
    else:
        for name in ("_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"):
            monkeypatch.setattr(autograd, name, getattr(autograd, name))  # put back afterwards
        yield saved_hooks._counted()


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def test_within_hooks_and_not_behind_them(active):
    assert not active()
    with save_on_cpu():
        assert active()
        with saved_tensors_hooks(same, same):
            assert active()
        assert active()
    assert not active()


def test_not_behind_an_error(active):
    with pytest.raises(ZeroDivisionError), save_on_cpu():
        1 / 0  # noqa: B018 - the error is what it is for
    assert not active()


def test_a_refused_pair_of_hooks_is_none(active):
    with pytest.raises(RuntimeError), torch.autograd.graph.disable_saved_tensors_hooks("no"), save_on_cpu():
        pass
    assert not active()


def test_each_thread_has_its_own(active):
    seen: list[bool] = []
    with save_on_cpu():
        other = threading.Thread(target=lambda: seen.append(bool(active())))
        other.start()
        other.join()
    assert seen == [False]


def test_hooks_still_work(active):
    packed = []
    x = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(lambda t: packed.append(t.shape) or t, same):
        y = (x * x).sum()
    y.backward()
    assert packed and torch.equal(x.grad, torch.full((3,), 2.0))
