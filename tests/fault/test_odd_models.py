"""Names longer than any, and objects that fail when they are touched: rows are lost, not the recording."""

import json
import subprocess
import sys
import textwrap

import pytest

from precdoctor.recording.output.step_rows import EventLog
from precdoctor.recording.process import attach
from precdoctor.runlog import open_run
from precdoctor.runlog.caps import MAX_NAME, shortened
from precdoctor.runlog.verify import verify
from precdoctor.runlog.writer import MAX_STRING_BYTES

LONG = """
    import collections, torch
    from torch import nn

    torch.set_num_threads(1)
    TOO_LONG = 2_000_000
    Outputs = collections.namedtuple("Outputs", ["f" * TOO_LONG, "g"])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for letter in "ab":
                self.add_module("n" * TOO_LONG + letter, nn.Linear(4, 4))
            self.register_parameter("p" * TOO_LONG, nn.Parameter(torch.ones(4)))

        def forward(self, x):
            for child in self._modules.values():
                x = child(x)
            x = x * next(iter(self._parameters.values()))
            return Outputs(x, x.detach())

    class Optimizer(torch.optim.SGD):
        pass

    Model.__name__ = "K" * TOO_LONG
    Optimizer.__name__ = "O" * TOO_LONG
    model = Model()
    optimizer = Optimizer(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4))[0].sum().backward()
        optimizer.step()
"""
ODD = """
    import torch
    from torch import nn

    torch.set_num_threads(1)

    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise RuntimeError("not here")

    class Unequal:
        def __hash__(self):
            return 1

        def __eq__(self, other):
            raise RuntimeError("not here")

    class Meta(type):
        def __getattribute__(cls, name):
            raise RuntimeError("not here")

    class Guarded(metaclass=Meta):
        pass

    def odd(y):
        itself, nest = {}, y
        itself["itself"], itself["y"] = itself, y
        for _ in range(3000):
            nest = [nest]
        return [
            y.detach().as_subclass(Refuses), {Unequal(): y}, Guarded(), itself, nest, iter([y]),
            {1e400: y, (1, (2,)): y}, {"x" * 2_000_000: y}, [y] * 3000, y.detach().to("meta"), torch.empty(0),
            y.to_sparse(), range(10**12), {"": y},
        ]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x, which, extra=None):
            y = self.layer(x)
            return y, odd(y)[which]

    class Top(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def forward(self, x, which, extra=None):
            return self.model(x, which, extra)

    torch.manual_seed(0)
    model = Top()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for which, extra in enumerate(odd(torch.ones(2, 4))):
        optimizer.zero_grad()
        model(torch.ones(2, 4), which, extra=extra)[0].sum().backward()
        optimizer.step()
    print(model.model.layer.weight.sum().item().hex())
"""


def recorded(tmp_path, script):
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(script))
    own = [sys.executable, str(file)]
    command = [sys.executable, "-m", "precdoctor", "record", "--every", "1", "-o", "run", "--", *own]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "internal error" not in done.stderr
    run = open_run(tmp_path / "run")
    assert verify(run.path).ok and run.ranks[0].end["reason"] == "exit"
    assert "error" not in set(run.events()["event"])
    return run, own, done.stdout


def test_names_are_cut_and_stay_apart(tmp_path):
    run, _, _ = recorded(tmp_path, LONG)
    rows = run.tensors()
    assert rows["step"].nunique() == 3
    for column in ("root", "module", "module_class", "name"):
        assert rows[column].astype(str).str.len().max() <= 1100
    assert len({m for m in rows["module"] if m.startswith("nnn")}) == 2
    assert len(run.ranks[0].facts["optimizers"][0]["name"]) < 1100


def test_what_fails_when_it_is_touched_costs_its_own_rows(tmp_path):
    run, own, printed = recorded(tmp_path, ODD)
    assert set(run.tensors()["step"]) == set(run.steps()["step"]) and len(run.steps()) == 14
    plain = subprocess.run(own, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert plain.stdout == printed
    lost = run.events().query("event == 'drop'")
    assert set(lost["step"]) <= {0}, "the tensor that refuses everything"


def _raised_by(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def test_whose_error_it_is():
    class Theirs:
        def __eq__(self, other):
            raise RuntimeError

        def method(self):
            raise RuntimeError

        __hash__ = object.__hash__

    assert attach.raised_by_an_object(_raised_by(lambda: Theirs() == 1))
    assert not attach.raised_by_an_object(_raised_by(Theirs().method))
    assert not attach.raised_by_an_object(_raised_by(lambda: attach.glob_allows(["a"], [], None)))


def test_long_texts_of_events_are_cut():
    (row,) = EventLog(0, redact=False).rows(
        [{"event": "warning", "code": "c" * 10**7, "data": {"message": "m" * 10**7}}]
    )
    assert len(row["code"]) == MAX_NAME
    assert json.loads(row["data"])["cut"] > 10**7


def test_what_is_cut_fits_and_differs():
    assert shortened("a" * 10, 10) == "a" * 10
    one, two = shortened("a" * 99 + "b", 50), shortened("a" * 99 + "c", 50)
    assert one != two and len(one) == len(two) == 50
    assert len(shortened("€" * MAX_STRING_BYTES).encode()) < MAX_STRING_BYTES
