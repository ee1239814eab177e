"""What is kept to be measured together, when it is launched, and in which order: with a device that only counts."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from precdoctor.recording import kernels
from precdoctor.recording.slots.batched_launch import BatchedLaunch, Gradients, Update


class Device:
    """Stands for one on which it is worth while to wait."""

    def __init__(self):
        self.launches = []
        self.kept = True

    def together(self, jobs, tables):
        self.launches.append([job.slot for job in jobs])
        self.jobs, self.tables = list(jobs), tables


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(kernels, "gathers", lambda *_: device.kept)
    monkeypatch.setattr(kernels, "together", device.together)
    return device


def keep(together, slot, x=None, launch=kernels.stat, *, restart=False):
    return together.takes(torch.ones(4) if x is None else x, slot, launch, restart=restart)


def test_on_the_cpu_nothing_waits():
    with BatchedLaunch() as together:
        assert not keep(together, 0)
        assert not keep(together, 1, launch=Update(torch.ones(4), torch.ones(4)))


def test_what_a_block_keeps_is_one_launch_in_its_order(device):
    weights = BatchedLaunch()
    with weights as together:
        for slot in (3, 1, 2):
            assert keep(together, slot, restart=slot == 1)
        assert device.launches == []
    assert device.launches == [[3, 1, 2]]
    assert [job.restart for job in device.jobs] == [False, True, False]
    tables = device.tables
    with weights as together:
        keep(together, 5)
    assert device.launches == [[3, 1, 2], [5]]
    assert device.tables is tables, "what is on the device stays for the next step"
    with weights:
        pass
    assert len(device.launches) == 2


def test_updates_carry_what_they_are_held_against(device):
    before, after, intended = torch.zeros(2), torch.ones(2), torch.full((2,), 0.5)
    with BatchedLaunch() as together:
        assert keep(together, 7, after, Update(before, intended))
    (job,) = device.jobs
    assert job.x is after and job.before is before and job.intended is intended


def test_what_is_measured_in_a_way_of_its_own_does_not_wait(device):
    with BatchedLaunch() as together:
        assert not keep(together, 0, launch=lambda _x, _slot: None)
    assert device.launches == []


def test_a_slot_is_in_a_launch_once(device):
    with BatchedLaunch() as together:
        for slot in (0, 1, 0, 2):
            keep(together, slot)
    assert device.launches == [[0, 1], [0, 2]]


def test_what_cannot_wait_comes_after_what_waits_for_its_slot(device):
    with BatchedLaunch() as together:
        keep(together, 0)
        keep(together, 1)
        device.kept = False
        assert not keep(together, 2)
        assert device.launches == []
        assert not keep(together, 1)
        assert device.launches == [[0, 1]]


def test_no_more_than_a_limit_is_held(device):
    small, large = torch.ones(100), torch.ones(10_000)  # 400 and 40 000 bytes
    with BatchedLaunch(1000) as together:
        for slot in range(5):
            keep(together, slot, small)
        keep(together, 5, large)
    assert device.launches == [[0, 1, 2], [3, 4, 5]]
    with BatchedLaunch() as together:
        for slot in range(50):
            keep(together, slot, large)
    assert len(device.launches) == 3


def test_an_error_in_the_block_leaves_nothing_behind(device):
    together = BatchedLaunch()
    with pytest.raises(KeyError), together:
        keep(together, 0)
        raise KeyError
    with together:
        keep(together, 1)
    assert device.launches == [[0], [1]]


# --- gradients within a backward pass --------------------------------------------------------------------------------


def a_pass(gradients, parameters, and_then=lambda p: None):
    """A backward pass through the parameters; says which of their gradients could wait."""
    waited = []
    for slot, parameter in enumerate(parameters):
        parameter.grad = torch.ones_like(parameter)
        room = gradients.waiting_room(parameter.grad)
        waited.append(room is not None and room.takes(parameter.grad, slot, kernels.stat, restart=True))
        and_then(parameter)
    gradients.end()
    return waited


@pytest.fixture
def parameters():
    return [nn.Parameter(torch.zeros(3)) for _ in range(4)]


def test_gradients_wait_once_a_pass_has_shown_that_nobody_writes_to_them(device, parameters):
    gradients = Gradients()
    assert a_pass(gradients, parameters) == [False] * 4
    for _ in range(2):
        assert a_pass(gradients, parameters) == [True] * 4
    assert device.launches == [[0, 1, 2, 3]] * 2


def test_gradients_that_are_written_to_before_the_end_never_wait(device, parameters):
    gradients = Gradients()
    for _ in range(3):
        assert a_pass(gradients, parameters, lambda p: p.grad.mul_(0.5)) == [False] * 4
    assert a_pass(gradients, parameters) == [False] * 4
    assert device.launches == []


def test_gradients_that_are_freed_before_the_end_never_wait(device, parameters):
    def step_and_free(parameter):
        parameter.grad = None
        gc.collect()

    gradients = Gradients()
    for _ in range(3):
        assert a_pass(gradients, parameters, step_and_free) == [False] * 4


def test_writing_to_them_later_ends_it(device, parameters):
    gradients = Gradients()
    a_pass(gradients, parameters)
    assert a_pass(gradients, parameters, lambda p: p.grad.zero_()) == [True] * 4
    assert a_pass(gradients, parameters) == [False] * 4


@pytest.mark.parametrize(("ranks", "wait"), [(2, False), (1, True)])
def test_with_other_ranks_they_never_wait(device, parameters, monkeypatch, ranks, wait):
    gradients = Gradients()
    a_pass(gradients, parameters)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    assert a_pass(gradients, parameters) == [wait] * 4


def test_sparse_gradients_never_wait(device):
    gradients, x = Gradients(), torch.eye(3).to_sparse()
    for _ in range(2):
        assert gradients.waiting_room(x) is None
        gradients.end()


def test_a_pass_without_gradients_shows_nothing(device, parameters):
    gradients = Gradients()
    gradients.end()
    assert a_pass(gradients, parameters) == [False] * 4
