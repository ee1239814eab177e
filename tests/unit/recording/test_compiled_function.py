"""What stands for a compiled function in replays: what it reads, whether it may run again, and what it holds on to."""

import gc
import weakref

import pytest
import torch
from torch import nn

from precdoctor.recording.microscope.compiled_function import CompiledFunction, reads_of, runs_again
from precdoctor.recording.naming import Names

HISTORY = []
SCALE = 2.0
STEPS = 0


def _scaled(x):
    return x * SCALE


def _plain(model, x):
    HISTORY.append(float(x.sum()))
    return _scaled(model(x)).log().mean()


def _whole_step(model, x):
    loss = _plain(model, x)
    loss.backward()
    return loss


def _outer_step(model, x):
    return _whole_step(model, x)


def _counts(x):
    global STEPS
    STEPS += 1
    return x


def _with_inner(x):
    def reduce(y):
        torch.distributed.all_reduce(y)
        return y

    return reduce(x)


@pytest.mark.parametrize(
    ("function", "again"),
    [(_plain, True), (_whole_step, False), (_outer_step, False), (_counts, False), (_with_inner, False)],
)
def test_what_trains_counts_or_talks_to_other_ranks_is_not_run_twice(function, again):
    assert runs_again(function) is again


def test_variables_of_the_functions_it_calls_are_its_own_too():
    def loss(x):
        return _plain(abs, x) + offset

    offset = torch.ones(1)

    assert reads_of(loss).items() >= {"offset": offset, "HISTORY": HISTORY, "SCALE": SCALE}.items()


def test_modules_of_the_object_whose_method_it_is_are_its_children():
    class Trainer:
        def __init__(self):
            self.model, self.history = nn.Linear(2, 1), []

        def loss(self, x):
            return self.model(x).mean()

    trainer, stand_in = Trainer(), CompiledFunction()
    stand_in.take(trainer.loss, {})

    assert [name for name, _ in stand_in.named_parameters()] == ["model.weight", "model.bias"]
    assert trainer in stand_in.owners({})
    assert stand_in(torch.ones(3, 2)).shape == ()


def test_nothing_of_the_users_is_held_between_two_steps():
    model, stand_in = nn.Linear(2, 1), CompiledFunction()
    there = weakref.ref(model)
    stand_in.take(_plain, {"model": model})
    del model
    assert there() is not None
    stand_in.release()
    gc.collect()

    assert there() is None
    assert list(stand_in.parameters()) == []


def test_it_is_nobodys_root():
    model, stand_in, names = nn.Sequential(nn.Linear(2, 1)), CompiledFunction(), Names()
    stand_in.take(_plain, {"model": model})

    assert names.place(model[0], None).root == "Sequential#0"
