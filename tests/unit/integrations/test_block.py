"""What the callbacks share: one recording at a time, closed whatever the trainer does."""

from __future__ import annotations

import pytest

import precdoctor
from precdoctor.errors import RunExistsError, UsageError

torch = pytest.importorskip("torch")


@pytest.fixture
def block(tmp_path, monkeypatch):
    from precdoctor.integrations.block import Block

    monkeypatch.chdir(tmp_path)
    made = []

    def make(*arguments, **options):
        made.append(Block(*arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


def train(steps=2):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_a_training_that_resumes_counts_on(block):
    one = block("run", {"every": 1}, force=False)
    assert one.path is None
    one.begin(first_step=100)
    train()
    one.end()
    one.end()
    run = precdoctor.open_run(one.path)
    assert run.steps()["step"].tolist() == [100, 101] and all(r.complete for r in run.ranks)


def test_a_training_that_never_ended_is_closed_by_the_next(block):
    one = block(None, {}, force=False)
    one.begin(0)
    train()
    first = one.path
    one._run = "second"  # the name of a default directory goes by the second
    one.begin(0)
    train()
    one.end()
    assert one.path != first
    assert all(r.complete for path in (first, one.path) for r in precdoctor.open_run(path).ranks)


def test_an_existing_run_is_not_replaced_unasked(block):
    first = block("run", {}, force=False)
    first.begin(0)
    first.end()
    with pytest.raises(RunExistsError):
        block("run", {}, force=False).begin(0)
    block("run", {}, force=True).begin(0)


def test_options_are_those_of_record(block):
    with pytest.raises(UsageError, match="has no option 'evry'"):
        block("run", {"evry": 2}, force=False).begin(0)


def test_under_the_command_it_leaves_the_recording_to_it(block, tmp_path, monkeypatch):
    monkeypatch.setenv("PRECDOCTOR_RUN", str(tmp_path / "outer"))
    one = block("run", {}, force=False)
    one.begin(0)
    one.end()
    assert one.path == tmp_path / "outer" and not (tmp_path / "run").exists()
