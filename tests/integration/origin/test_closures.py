"""A step with a closure: its loss and gradients come into being inside the step, and are judged there all the same."""

from __future__ import annotations

import pytest

import precdoctor
from tests.support.processes import record, script, warm

#: Prints what each step returned and a digest of the weights. The log of zero is in step 3.
STEPS = """
import functools
import sys

import torch

from training import digest


class Climber(torch.optim.SGD):
    "Sharpness-aware minimisation: up along the gradient before the closure computes another."

    def step(self, closure=None):
        climbed = [(p, 0.05 * p.grad) for p in self.param_groups[0]["params"] if p.grad is not None]
        with torch.no_grad():
            for p, e in climbed:
                p.add_(e)
        loss = closure()
        with torch.no_grad():
            for p, e in climbed:
                p.sub_(e)
        super().step()
        return loss


name, *more = sys.argv[1:]
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = (globals().get(name) or getattr(torch.optim, name))(net.parameters(), lr=0.05)
if name == "LBFGS":
    optimizer.param_groups[0].update(max_iter=4, line_search_fn="strong_wolfe" if "search" in more else None)
other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.05)
bad_call = 2 if "late" in more else 0


class Evaluation:
    def __init__(self, step):
        self.step, self.calls, self.x = step, 0, torch.randn(16, 8)

    def run(self, optimizer):
        bad = self.step == 3 and self.calls == bad_call
        self.calls += 1
        out = net(self.x)
        operand = out.abs() * (not bad) + (not bad)
        loss = (out - self.x[:, :1]).square().mean() + 1e-3 * torch.log(operand).mean()
        optimizer.zero_grad()
        loss.backward()
        return loss.detach()


for step in range(5):
    evaluation = Evaluation(step)
    if "before" in more:  # as Lightning's manual optimization does
        evaluation.run(optimizer)
        if "second" in more:
            other.step(closure=lambda: None)
        result = optimizer.step(closure=lambda: None)
    else:  # as its automatic optimization does
        result = optimizer.step(closure=functools.partial(evaluation.run, optimizer))
    print(step, result, evaluation.calls, digest(net), flush=True)
"""


@pytest.fixture
def steps(tmp_path):
    return script(tmp_path, "steps.py", STEPS)


def trained(tmp_path, steps, *arguments, policy="examine"):
    """The run under a policy, recorded; and the lines about what is not finite."""
    done = record(tmp_path, "--strict", "--on-nonfinite", policy, "--", *warm(steps, *arguments), run=tmp_path / policy)
    return done, [line for line in done.said if "not finite" in line]


@pytest.mark.parametrize(
    ("arguments", "micro_step"),
    [
        ("Adam", 1),
        pytest.param("SGD", 1, marks=pytest.mark.slow),
        ("Adam before", 1),
        ("Climber", 1),
        ("LBFGS late", 3),
    ],
)
def test_a_bad_evaluation_is_led_to_its_op(tmp_path, steps, arguments, micro_step):
    done, said = trained(tmp_path, steps, *arguments.split())
    plain, _ = trained(tmp_path, steps, *arguments.split(), policy="observe")
    events = precdoctor.open_run(done.run).events()
    incidents, ops = (events[events["event"] == kind] for kind in ("incident", "op"))

    assert said[0].startswith("step 3: the loss is not finite, first made by aten.log.default at steps.py:")
    assert incidents["step"].tolist()[:1] == [3]
    assert incidents["micro_step"].tolist()[:1] == [micro_step], "judged before the optimizer went on"
    assert "aten.log.default" in set(ops[ops["step"] == 3]["op"])
    assert done.out == plain.out, "what the optimizer returns, and the weights, are what they were"


def test_trial_points_of_a_line_search_are_left_to_it(tmp_path, steps):
    done, said = trained(tmp_path, steps, "LBFGS", "late", "search")
    assert done.status == 0
    assert said == []


@pytest.mark.parametrize("arguments", ["Adam", "LBFGS", "Adam before second"])
def test_skip_leaves_the_weights_alone(tmp_path, steps, arguments):
    done, said = trained(tmp_path, steps, *arguments.split(), policy="skip")
    digests = [line.split()[-1] for line in done.out.splitlines()]
    assert len(said) == (2 if "second" in arguments else 1)
    assert all(line.endswith("the step is skipped") for line in said)
    assert digests[3] == digests[2]
    assert len(set(digests)) == 4


@pytest.mark.parametrize("arguments", ["Climber", "LBFGS late"])
def test_a_step_that_has_begun_is_not_skipped(tmp_path, steps, arguments):
    done, said = trained(tmp_path, steps, *arguments.split(), policy="skip")
    plain, _ = trained(tmp_path, steps, *arguments.split(), policy="observe")
    assert said[0].endswith("the step is not skipped, it has begun; training goes on")
    assert done.out.splitlines()[3] == plain.out.splitlines()[3]


def test_stop_ends_the_run_before_the_optimizer_goes_on(tmp_path, steps):
    done, said = trained(tmp_path, steps, "SGD", policy="stop")
    assert done.status == 66
    assert len(said) == 1
    assert len(done.out.splitlines()) == 3
