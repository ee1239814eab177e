"""Buffers and optimizer state that become non-finite while nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from precdoctor.recording.options import RecordOptions
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.slots.step_batch import StepFacts
from precdoctor.recording.steps.persistent_state import BufferWatch, OptimizerStateWatch


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path / "never-armed", RecordOptions())


def look(watch: BufferWatch) -> list[tuple[str, int | None]]:
    return [(p.name, p.last_finite) for p in watch.judge(*watch.launch())]


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(3))
        self.register_buffer("lowest", torch.full((3,), torch.inf))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def test_a_buffer_is_told_of_once_when_it_turns(recorder):
    net, watch = Running(), BufferWatch(recorder)
    recorder.names.place(net, None)
    assert look(watch) == [], "an infinity that was there from the beginning is meant"
    recorder.current = StepFacts(1)
    net.level.add_(1.0)
    net.count.add_(1)
    assert look(watch) == []
    recorder.current = StepFacts(2)
    net.level[1] = torch.nan
    assert look(watch) == [("level", 1)]
    recorder.current = StepFacts(3)
    net.level.add_(1.0)
    assert look(watch) == []


def test_what_the_first_forward_pass_made_non_finite_is_held_against_its_copy(recorder):
    net = Running()
    copies = {id(net.level): torch.zeros(3), id(net.lowest): net.lowest.clone()}
    watch = BufferWatch(recorder, lambda buffer: copies.get(id(buffer)))
    recorder.names.place(net, None)
    net.level[1] = torch.nan
    assert look(watch) == [("level", None)]


def test_a_buffer_put_in_the_place_of_another_is_looked_at(recorder):
    net, watch = Running(), BufferWatch(recorder)
    recorder.names.place(net, None)
    look(watch)
    net.level = net.level + torch.inf
    assert look(watch) == [("level", 0)]


def test_running_statistics_change_without_a_word_and_are_looked_at_all_the_same(recorder):
    net, watch = nn.BatchNorm1d(2), BufferWatch(recorder)
    recorder.names.place(net, None)
    assert look(watch) == []
    net(torch.randn(8, 2) * 1e25)
    assert ("running_var", 0) in look(watch)


def test_nothing_is_read_where_nobody_wrote(recorder):
    net, watch = Running(), BufferWatch(recorder)
    recorder.names.place(net, None)
    look(watch)
    assert watch.launch() == (None, [])


@pytest.mark.parametrize(("gradient", "due"), [(1.0, False), (1e20, True)])
def test_optimizer_state_is_read_between_samples_only_after_a_huge_gradient(recorder, gradient, due):
    parameter = nn.Parameter(torch.ones(3))
    optimizer, watch = torch.optim.Adam([parameter]), OptimizerStateWatch(recorder)
    parameter.grad = torch.full((3,), gradient)
    optimizer.step()
    assert watch.due(optimizer, gradient) is due


def steps(optimizer, watch, parameter, gradient):
    """One step with that gradient everywhere; the state that it leaves, if it is read."""
    parameter.grad = torch.full((3,), gradient)
    optimizer.step()
    return watch.look(optimizer) if watch.due(optimizer, gradient) else None


def test_state_that_overflowed_is_named_with_its_parameter(recorder):
    recorder.live = True
    parameter = nn.Parameter(torch.ones(3))
    optimizer, watch = torch.optim.Adam([parameter]), OptimizerStateWatch(recorder)
    assert steps(optimizer, watch, parameter, 1.0) == []
    recorder.current, recorder.live = StepFacts(1), False
    (found,) = steps(optimizer, watch, parameter, 1e22)
    assert (found.name, found.last_finite) == ("exp_avg_sq", 0)
    assert found.parameter is parameter
    assert steps(optimizer, watch, parameter, 1e22) is None, "once is enough"


def test_an_optimizer_at_the_address_of_one_that_is_gone_is_another(recorder):
    parameter = nn.Parameter(torch.ones(3))
    gone, watch = torch.optim.Adam([parameter]), OptimizerStateWatch(recorder)
    assert steps(gone, watch, parameter, 1e22)
    other = torch.optim.Adam([parameter])
    watch._watched[id(other)] = watch._watched.pop(id(gone))  # as if it had been made there
    del gone
    assert steps(other, watch, parameter, 1e22)
