"""Compiled kernels are launched past Triton's Python once it has shown how; with stand-ins for both."""

from __future__ import annotations

import pytest
import torch

from precdoctor.recording.kernels import light_launch
from precdoctor.recording.kernels.light_launch import KernelFailedError, LightLaunch

DEVICE = torch.device("cuda", 0)
STREAM, FUNCTION, PACKED = 77, 4711, (4, 1, 0)


class Hooks:
    """Triton's chain of hooks, in newer versions."""

    def __init__(self, *calls):
        self.calls = list(calls)


class Compiled:
    """What Triton returns from a launch; ``launched`` is what has reached the device."""

    def __init__(self, launched):
        self._run = lambda *given: launched.append(given)

    @property
    def run(self):
        return self._run


class OldCompiled:
    """The same in older versions."""

    def __init__(self, launched):
        self.run = lambda *given: launched.append(given)


class Jitted:
    """A kernel of Triton's: ``calls`` counts launches that went through its Python."""

    def __init__(self, kind=Compiled, *, constants=True, hooks=(None, None), moved=False):
        self.launched, self.calls = [], 0
        self.kernel = kind(self.launched)
        self.constants, self.hooks, self.moved = constants, hooks, moved

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            assert num_warps == 4
            self.calls += 1
            rest = arguments if self.constants else arguments[:2]
            rest = rest[::-1] if self.moved else rest
            self.kernel.run(*grid, 1, 1, STREAM, FUNCTION, PACKED, None, *self.hooks, *rest)
            return self.kernel

        return launch


@pytest.fixture(autouse=True)
def one_stream(monkeypatch):
    monkeypatch.setattr(light_launch, "raw_stream", lambda _device: STREAM)


def launch_some(jitted, count=5):
    """So many launches with arguments of their own; those that went through Triton."""
    launch = LightLaunch(jitted, {"num_warps": 4})
    for i in range(count):
        launch(10 + i, DEVICE, (i, 100), 8, True)
    return jitted.calls


@pytest.mark.parametrize(
    "jitted",
    [Jitted(), Jitted(OldCompiled, constants=False), Jitted(hooks=(Hooks(), Hooks()))],
    ids=["newer", "older", "hooks that are empty"],
)
def test_from_the_third_launch_on_triton_is_passed_by(jitted):
    assert launch_some(jitted) == 2
    rest = (8, True) if jitted.constants else ()
    for i, given in enumerate(jitted.launched):
        assert given[:6] == (10 + i, 1, 1, STREAM, FUNCTION, PACKED) and given[9:] == (i, 100, *rest)
    assert [given[6:9] for given in jitted.launched[2:]] == [(None, None, None)] * 3


@pytest.mark.parametrize(
    "jitted",
    [Jitted(moved=True), Jitted(hooks=(Hooks(print), None)), Jitted(hooks=(print, None))],
    ids=["other arguments", "a profiler", "an older profiler"],
)
def test_what_is_not_understood_goes_through_triton(jitted):
    assert launch_some(jitted) == 5
    assert [given[0] for given in jitted.launched] == [10, 11, 12, 13, 14]


def test_kernels_that_are_interpreted_go_through_triton():
    jitted = Jitted()
    jitted.__class__ = type("Interpreted", (Jitted,), {"__getitem__": lambda self, grid: self.interpret})
    jitted.interpret = lambda *_given, num_warps: setattr(jitted, "calls", jitted.calls + num_warps // 4)
    assert launch_some(jitted) == 5


def test_constants_and_devices_have_kernels_of_their_own():
    jitted = Jitted()
    launch = LightLaunch(jitted, {"num_warps": 4})
    for i in range(9):
        launch(1, torch.device("cuda", i % 3 // 2), (i, 0), 8 if i % 3 else 4, True)
    assert jitted.calls == 6
    assert [given[-2] for given in jitted.launched] == [4, 8, 8] * 3


def test_constants_that_do_not_compile_are_not_tried_again_and_others_are():
    jitted = Jitted()
    launch, compiles = LightLaunch(jitted, {"num_warps": 4}), []

    def fails(_programs, _arguments, constants, by_triton=launch._by_triton):
        compiles.append(constants)
        if constants[0] == 4:
            raise RuntimeError("PassManager::run failed")
        return by_triton(_programs, _arguments, constants)

    launch._by_triton = fails
    raised = []
    for i in range(6):
        try:
            launch(1, DEVICE, (i, 0), 4 if i % 2 else 8, True)
        except (RuntimeError, KernelFailedError) as error:
            raised.append(error)
    assert [type(error) for error in raised] == [RuntimeError, KernelFailedError, KernelFailedError]
    assert compiles == [(8, True), (4, True), (8, True)] and jitted.calls == 2


def test_a_full_memory_is_no_reason_to_give_a_kernel_up():
    launch, tries = LightLaunch(Jitted(), {"num_warps": 4}), []

    def full(*_given):
        tries.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    launch._by_triton = full
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError):
            launch(1, DEVICE, (0, 0), 8, True)
    assert len(tries) == 3


def test_a_launcher_that_refuses_is_not_asked_again_and_nothing_is_lost():
    jitted = Jitted()
    launch = LightLaunch(jitted, {"num_warps": 4})
    for i in range(2):
        launch(1, DEVICE, (i, 0), 8, True)
    (known,) = launch._compiled.values()

    def refuse(*_given):
        raise TypeError("wrong number of arguments")

    known.run = refuse
    for i in range(2, 5):
        launch(1, DEVICE, (i, 0), 8, True)
    assert jitted.calls == 5 and [given[9] for given in jitted.launched] == [0, 1, 2, 3, 4]


def test_a_launch_of_another_thread_while_one_is_watched_goes_through_triton():
    jitted = Jitted()
    launch = LightLaunch(jitted, {"num_warps": 4})
    launch(1, DEVICE, (0, 0), 8, True)
    with launch._observing:
        launch(1, DEVICE, (1, 0), 8, True)
    for i in range(2, 5):
        launch(1, DEVICE, (i, 0), 8, True)
    assert jitted.calls == 3 and [given[9] for given in jitted.launched] == [0, 1, 2, 3, 4]


def test_who_waits_for_the_compiler_is_told_once(monkeypatch, capfd):
    now = iter(range(0, 100, 3))  # each launch through Triton takes three seconds
    monkeypatch.setattr(light_launch.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(light_launch, "_slow_start", light_launch._SlowStartNotice())
    launch = LightLaunch(Jitted(), {"num_warps": 4})
    launch(1, DEVICE, (1, 2), "first")
    assert "compiled" not in capfd.readouterr().err
    launch(1, DEVICE, (1, 2), "second")
    launch(1, DEVICE, (1, 2), "third")
    launch(1, DEVICE, (1, 2), "third")
    assert capfd.readouterr().err.count("kernels are compiled for this GPU") == 1
