from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from precdoctor.recording.process.threads import Threads
from precdoctor.recording.recorder.hook_guard import guarded


class Worker:
    """A thread that does what it is asked to, one thing after the other."""

    def __init__(self) -> None:
        self._asked, self._done, self._task, self._result = threading.Event(), threading.Event(), None, None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while self._asked.wait():
            self._asked.clear()
            if self._task is None:
                return
            self._result = self._task()
            self._done.set()

    def do(self, task):
        self._task = task
        self._asked.set()
        self._done.wait()
        self._done.clear()
        return self._result

    def end(self) -> None:
        self._task = None
        self._asked.set()
        self._thread.join()


@pytest.fixture
def workers():
    made = [Worker() for _ in range(3)]
    yield made
    for worker in made:
        worker.end()


@pytest.fixture
def recorder():
    """What threads ask a recorder, and what they have it say."""
    said = []
    fake = SimpleNamespace(step=0, said=said)
    fake.current, fake.internal_error = SimpleNamespace(recorder_ns=0, wait_ns=0), said.append
    fake.on_the_clock = False
    fake.threads = Threads(lambda: fake.step > 0, lambda: fake.on_the_clock, said.append)
    return fake


def test_the_first_that_trains_is_recorded_and_nothing_runs_in_the_others(workers, recorder):
    first, second, third = workers
    body = guarded(recorder)(lambda: "recorded")
    assert [w.do(recorder.threads.elsewhere) for w in (first, first)] == [False, False]
    recorder.step = 1
    assert [w.do(recorder.threads.elsewhere) for w in (second, third, first, second)] == [True, True, False, True]
    assert [w.do(body) for w in workers] == ["recorded", None, None]
    assert len(recorder.said) == 1 and recorder.said[0].startswith("several threads")


def test_nobody_takes_over_while_a_hook_runs(workers, recorder):
    """Two threads in hooks would write into the same slots."""
    first, second, _ = workers
    begun, go_on = threading.Event(), threading.Event()

    def look():
        begun.set()
        return go_on.wait(10)

    first.do(recorder.threads.elsewhere)
    body = guarded(recorder)(look)
    hook = threading.Thread(target=lambda: first.do(body))
    hook.start()
    assert begun.wait(10)
    assert second.do(recorder.threads.elsewhere)
    go_on.set()
    hook.join()
    assert not second.do(recorder.threads.elsewhere)
    assert first.do(body) is None


def test_another_takes_over_when_it_has_ended(workers, recorder):
    first, second, _ = workers
    first.do(recorder.threads.elsewhere)
    recorder.step = 1
    assert second.do(recorder.threads.elsewhere)
    first.end()
    assert not second.do(recorder.threads.elsewhere)
    assert second.do(guarded(recorder)(lambda: "recorded")) == "recorded"


@pytest.mark.parametrize("calls", [[], ["a model"]])
def test_one_that_only_tried_a_model_out_gives_way_unless_it_is_at_it(workers, recorder, calls):
    first, second, _ = workers
    first.do(recorder.threads.elsewhere)
    recorder.threads.calls = calls
    assert second.do(recorder.threads.elsewhere) == bool(calls)
    recorder.step = 1
    assert first.do(recorder.threads.elsewhere) == (not calls)
