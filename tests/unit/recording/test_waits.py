"""A wait for the device is no cost of the recorder: counted apart, and without influence on how often it samples."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from precdoctor.recording.options import RecordOptions
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.recorder.sampling import WARM_UP, Sampler
from precdoctor.recording.slots.deferred import Arriving, read

MS = 1_000_000


class Clock:
    """Stands still but for what somebody spends, and what an event of a device takes."""

    def __init__(self, monkeypatch):
        self.now = 0
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.now)

    def spend(self, ns):
        self.now += ns

    def event(self, ns):
        return SimpleNamespace(query=lambda: False, synchronize=lambda: self.spend(ns))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def recording():
    """A recorder, as far as hooks ask it."""
    current = SimpleNamespace(recorder_ns=0, wait_ns=0)
    return SimpleNamespace(threads=SimpleNamespace(others=set()), current=current, on_the_clock=False)


def step(clock, *, host, wait):
    """One hook that works, reads a number from the device and works on: recorder_ns and wait_ns of the step."""
    recorder = recording()
    arriving = Arriving(clock.event(wait), torch.tensor([3.0]))
    value = (lambda: arriving()[0]) if wait else 3.0

    @guarded(recorder)
    def hook():
        clock.spend(host)
        return read(value)

    assert hook() == 3.0
    return recorder.current


def test_a_wait_is_counted_apart(clock):
    facts = step(clock, host=MS, wait=20 * MS)
    assert (facts.recorder_ns, facts.wait_ns) == (MS, 20 * MS)


@pytest.mark.parametrize("fails", [False, True])
def test_a_hook_inside_another_one_is_charged_once(clock, fails):
    recorder, errors = recording(), []
    recorder.internal_error = errors.append

    @guarded(recorder)
    def inner():
        clock.spend(MS)
        if fails:
            raise ValueError

    @guarded(recorder)
    def outer():
        clock.spend(MS)
        inner()
        clock.spend(MS)

    for _ in range(2):
        outer()
        inner()
    assert recorder.current.recorder_ns == 8 * MS
    assert len(errors) == (4 if fails else 0)


def trained(clock, *, wait, device=0, steps=800):
    """The period after so many steps of 70 ms, a sampled one of which takes 7 ms of the host and ``device`` more."""
    sampler = Sampler(RecordOptions(budget=0.01))
    for number in range(steps):
        sampled = sampler.wants(number)
        began = clock.now
        facts = step(clock, host=7 * MS if sampled else MS // 10, wait=wait)
        clock.spend(70 * MS - wait + (device if sampled else 0))
        took = clock.now - began
        cost, waited = facts.recorder_ns, facts.wait_ns
        sampler.ended("SGD#0", sampled=sampled, step_ns=took, cost_ns=cost, wait_ns=waited)
        if sampled:
            sampler.reconsider(behind=False)
    return sampler.period


def test_a_wait_of_20_ms_a_step_does_not_move_the_period(clock):
    assert trained(clock, wait=20 * MS) == trained(clock, wait=0) == 16


def test_what_a_sampled_step_costs_the_device_does(clock):
    """No host time shows it: such a step only takes longer."""
    assert trained(clock, wait=20 * MS, device=63 * MS, steps=2000) == 128


def test_what_steps_between_samples_cost_is_hidden_where_the_host_waits_longer_than_that(clock):
    def chosen(between, wait):
        sampler = Sampler(RecordOptions(budget=0.01))
        for number in range(800):
            sampled = sampler.wants(number)
            took = 70 * MS + (7 * MS if sampled else 0)
            cost = 7 * MS if sampled else between
            sampler.ended("SGD#0", sampled=sampled, step_ns=took, cost_ns=cost, wait_ns=wait)
            if sampled:
                sampler.reconsider(behind=False)
        return sampler.period, round(sampler.overhead(sampler.period), 2)

    assert chosen(2 * MS, wait=5 * MS) == chosen(0, wait=5 * MS) == (16, 0.01)
    assert chosen(2 * MS, wait=0) == (8, 0.04)  # above the budget, whatever N is
    assert chosen(2 * MS, wait=MS // 2) == (16, 0.03)


def test_without_an_unsampled_step_there_is_nothing_to_compare_with():
    sampler = Sampler(RecordOptions(budget=0.01))
    for _ in range(WARM_UP):
        sampler.ended("SGD#0", sampled=True, step_ns=90 * MS, cost_ns=1, wait_ns=MS)
    assert sampler.reconsider(behind=False)["to"] == 2
    sampler.ended("SGD#0", sampled=False, step_ns=90 * MS, cost_ns=1, wait_ns=MS)
    assert sampler.reconsider(behind=False)["to"] == 1  # it costs the device nothing
