"""What stands for a compiled function in replays: what it reads, whether it may run again, and what it holds on to."""

import gc
import weakref

import pytest
import torch
from torch import nn

from precdoctor.recording.model.module_names import Names
from precdoctor.recording.scene.compiled_function import CompiledFunction, reads_of, runs_again, trained_in, trains

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


def _steps_first(model, optimizer, x):
    optimizer.step()
    model(x).sum().backward()


def _never_goes_back(model, optimizer, x):
    optimizer.step()
    return model(x)


def _ordinary(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).log().sum()
    (2 * loss).backward(torch.tensor(3.0))
    optimizer.step()
    return loss


@pytest.mark.parametrize(
    ("function", "whether"),
    [
        *((_ordinary, True), (_whole_step, True), (_outer_step, True), (_steps_first, False)),
        *((_never_goes_back, False), (_plain, False), (_with_inner, False)),
    ],
)
def test_a_train_step_does_what_must_not_be_done_twice_behind_its_backward(function, whether):
    assert trains(function) is whether


def test_a_train_step_is_run_again_up_to_its_backward_and_no_further():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.weight.grad = torch.ones(2, 2)
    before = model.weight.detach().clone()
    step = CompiledFunction(trains=True)
    step.take(_ordinary, {"model": model, "optimizer": optimizer})

    x = torch.ones(1, 2)
    loss = step(model, optimizer, x)

    assert torch.equal(loss.nan_to_num(), (2 * model(x).log().sum()).nan_to_num())
    assert step.brought(loss) == 3.0
    assert torch.equal(model.weight, before)
    assert torch.equal(model.weight.grad, torch.ones(2, 2)), "neither used nor thrown away"
    assert [id(p) for p in trained_in([step, model])] == [id(p) for p in model.parameters()]
    assert trained_in([model]) == []


def test_torch_is_as_it_was_after_a_train_step_that_fails():
    own = torch.autograd.backward, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad
    step = CompiledFunction(trains=True)
    step.take(lambda: None, {})

    with pytest.raises(RuntimeError, match="no backward"):
        step()
    assert (torch.autograd.backward, torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == own
