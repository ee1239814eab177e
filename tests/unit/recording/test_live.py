"""Looking for live objects: all are found, and no other thread sees that somebody looks."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
from torch import nn

from precdoctor.recording.model.live_objects import instances
from precdoctor.recording.model.module_names import Names


@pytest.fixture
def makers():
    """Threads that fill tuples and change places all the time; what went wrong in them."""
    errors, over, interval = [], threading.Event(), sys.getswitchinterval()

    def make():
        while not over.is_set():
            try:
                tuple(x for x in range(2000))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    yield errors
    over.set()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)


def test_tuples_that_other_threads_are_filling_stay_theirs(makers):
    """CPython raises SystemError in that thread when anybody else holds one."""
    child = nn.Linear(2, 2)
    parent = nn.Sequential(child)
    for _ in range(10):
        assert Names().place(child, None).module == "0"
    assert makers == []
    del parent


def test_a_tuple_that_is_being_filled_has_one_owner_when_the_search_is_over():
    def fill():
        yield 1
        instances(nn.Module)
        yield from range(100)

    assert len(tuple(fill())) == 101  # CPython asks how many own it whenever it has to grow


def test_no_collection_runs_while_the_list_is_there(monkeypatch):
    """Its callbacks and finalizers are Python, and let other threads run."""
    original, collects = gc.get_objects, []
    monkeypatch.setattr(gc, "get_objects", lambda *given: collects.append(gc.isenabled()) or original(*given))
    instances(nn.Module)
    gc.disable()
    try:
        instances(nn.Module)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert collects == [False, False]


def test_audit_hooks_run_while_no_list_is_there(monkeypatch):
    """They run at each call of ``get_objects``, may be Python, and let other threads run."""
    original, calls = gc.get_objects, []
    monkeypatch.setattr(gc, "get_objects", lambda *given: calls.append(given) or original(*given))
    parent = nn.Sequential(nn.ReLU())  # of now: what was there before the tests is left out of the list
    assert any(m is parent for m in instances(nn.Module)) and len(calls) == 1


def test_modules_that_other_threads_are_making_may_change_meanwhile():
    """Nobody's `_modules` is walked through while another thread may put a child into it."""
    grown, shared, over = nn.Module(), nn.ReLU(), threading.Event()
    grown._modules.update({str(number): shared for number in range(500_000)})  # a walk that takes long

    def grow():
        own, number = grown._modules, 0
        while not over.is_set():
            own[number] = shared
            number = (number + 1) % 500_000

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(3):
            assert Names().place(nn.Linear(2, 2), None).root == "Linear#0"
    finally:
        over.set()
        thread.join()


def test_every_live_module_is_found_whatever_its_generation():
    old = nn.Sequential(nn.Linear(2, 2))
    gc.collect()
    young = nn.Linear(2, 2)
    found = {id(m) for m in instances(nn.Module)}
    assert {id(m) for m in (old, old[0], young)} <= found
    assert found == {id(o) for o in gc.get_objects() if issubclass(type(o), nn.Module)}


def test_nothing_is_held_afterwards():
    instances(nn.Module)
    assert not [o for o in gc.get_objects() if type(o) is list and len(o) > 10_000 and any(x is o for x in o)]
    before = len(gc.get_objects())
    for _ in range(3):
        instances(nn.Module)
    assert len(gc.get_objects()) - before < 10
