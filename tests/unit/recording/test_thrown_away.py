"""When gradients that are thrown away were an attempt; whole loops are in ``integration/observe/test_left_out.py``."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from precdoctor.recording.options import RecordOptions
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.steps.abandoned_attempts import AbandonedAttempts

INF = float("inf")


class Loop:
    """The calls a training loop makes, as hooks pass them on; ``ended`` lists whose attempts were left out."""

    def __init__(self, tmp_path, **options) -> None:
        self.recorder = Recorder(tmp_path, RecordOptions(**options))
        self.recorder.state = "armed"
        self.thrown = AbandonedAttempts(self.recorder)
        self.ended: list[torch.optim.Optimizer] = []
        self.unscaled: list[torch.optim.Optimizer] = []
        self.updated: list[torch.optim.Optimizer] = []
        self.thrown.install(
            self._leave_out,
            lambda optimizer: optimizer in self.unscaled,
            lambda optimizer: optimizer in self.updated,
        )
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def _leave_out(self, optimizer: torch.optim.Optimizer, _found: object) -> None:
        self.ended.append(optimizer)
        self.step()

    def forward(self) -> None:
        self.thrown.forward_begins()

    def backward(self, gradient: float) -> None:
        self.thrown.backward_begins()
        for p in self.model.parameters():
            p.grad = torch.full_like(p, gradient)
        self.recorder.micro_step += 1
        self.thrown.backward_ended()

    def step(self) -> None:
        self.thrown.meet(self.optimizer)
        self.thrown.attempt_ended()
        self.recorder.micro_step = 0

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@pytest.fixture
def loop(tmp_path, monkeypatch):
    for owner in (torch.optim.Optimizer, nn.Module):
        monkeypatch.setattr(owner, "zero_grad", owner.zero_grad)  # put back at the end
    return Loop(tmp_path)


def test_overflowed_gradients_thrown_away_end_the_step_as_the_next_forward_pass_begins(loop):
    loop.forward()
    loop.backward(INF)
    loop.zero_grad()
    assert loop.ended == []
    loop.forward()
    assert loop.ended == [loop.optimizer]
    assert all(p.grad is None for p in loop.model.parameters())


def test_the_last_ones_end_with_the_run(loop):
    loop.forward()
    loop.backward(INF)
    loop.zero_grad()
    loop.thrown.run_ends()
    assert loop.ended == [loop.optimizer]


def test_the_module_may_throw_them_away_once_the_optimizer_is_known(loop):
    loop.forward()
    loop.backward(1.0)
    loop.step()
    for module, ended in ((nn.Linear(3, 3), []), (nn.Sequential(loop.model), [loop.optimizer])):
        loop.forward()
        loop.backward(INF)
        module.zero_grad()
        loop.forward()
        assert loop.ended == ended


def test_an_open_step_has_the_loss_of_the_gradients_that_are_there_as_the_run_ends(loop):
    """Fisher information after the last step: one backward pass per batch, none of them for a step."""
    for _ in range(3):
        loop.zero_grad()
        loop.forward()
        loop.recorder.current.losses.append(1.5)
        loop.backward(1.0)
    loop.thrown.run_ends()
    assert not loop.ended
    assert loop.recorder.current.thrown_losses == 2


def test_gradients_that_a_step_has_used_are_thrown_away_all_the_time(loop):
    for gradient in (1.0, INF):
        loop.forward()
        loop.backward(gradient)
        loop.step()
        loop.zero_grad()
        loop.zero_grad()
    loop.forward()
    assert loop.ended == []


def overflow(loop: Loop) -> None:
    loop.forward()
    loop.backward(INF)
    loop.zero_grad()
    loop.forward()


def test_who_throws_finite_gradients_away_may_mean_anything_by_it(loop):
    loop.forward()
    loop.backward(1.0)
    loop.zero_grad()
    overflow(loop)
    assert loop.ended == []


def test_a_second_optimizer_makes_it_a_guess(loop):
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    other.zero_grad()
    overflow(loop)
    assert loop.ended == []


def test_weights_that_are_lost_as_well_are_no_skipped_step(loop):
    with torch.no_grad():
        loop.model.weight.fill_(INF)
    overflow(loop)
    assert loop.ended == []


def test_inside_a_step_a_closure_may_do_as_it_likes(loop):
    loop.thrown.attempt_open = True
    overflow(loop)
    assert loop.ended == []


def test_another_backward_pass_without_a_forward_pass_is_surgery(loop):
    loop.forward()
    loop.backward(INF)
    loop.zero_grad()
    loop.backward(1.0)
    loop.forward()
    assert loop.ended == []


def test_gradients_unscaled_for_a_step_that_never_comes_are_one_whatever_they_hold(loop):
    other = torch.optim.SGD(loop.model.parameters(), 0.1)
    loop.unscaled = [other]
    loop.forward()
    loop.backward(1.0)
    loop.zero_grad()  # several optimizers, finite gradients
    assert loop.ended == []
    other.zero_grad()
    assert loop.ended == [other]


def late(loop: Loop, gradient: float) -> None:
    loop.forward()
    loop.zero_grad()
    loop.backward(gradient)


def test_a_loop_that_zeroes_late_must_be_known_first(loop):
    late(loop, INF)
    late(loop, INF)
    assert loop.ended == []
    late(loop, INF)
    assert len(loop.ended) == 1
    loop.thrown.run_ends()  # it has left steps out before: so it does the last one
    assert len(loop.ended) == 2


def test_a_run_that_dies_in_its_first_bad_step_has_not_skipped_it(loop):
    for _ in range(3):
        late(loop, 1.0)
        loop.step()
    late(loop, INF)
    loop.thrown.run_ends()
    assert loop.ended == []


def test_accumulation_never_throws_anything_away(loop):
    for _ in range(3):
        late(loop, 1.0)
        for _ in range(3):
            loop.forward()
            loop.backward(INF)
        loop.step()
    assert loop.ended == []


def test_ranks_may_disagree_so_nothing_is_inferred_from_their_gradients(loop, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    overflow(loop)
    assert loop.ended == []


def test_finite_gradients_that_stay_behind_an_update_are_no_attempt(loop):
    for _ in range(4):
        loop.forward()
        loop.backward(1.0)
        loop.unscaled = loop.updated = [loop.optimizer]
    assert loop.ended == []
    loop.zero_grad()
    assert loop.ended == [loop.optimizer]


def test_a_loop_that_zeroes_late_gives_them_up_as_the_next_forward_pass_begins(loop):
    for _ in range(2):
        loop.forward()
        loop.zero_grad()
        loop.backward(1.0)
        loop.step()
    loop.forward()
    loop.zero_grad()
    loop.backward(1.0)
    loop.unscaled = loop.updated = [loop.optimizer]
    loop.forward()
    assert loop.ended == [loop.optimizer]
