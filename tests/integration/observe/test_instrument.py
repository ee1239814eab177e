"""``--compiled instrument``: the rows of modules inside compiled graphs, as those of the same model run as written."""

from __future__ import annotations

import json

import pytest

import precdoctor
from precdoctor.cli import main
from precdoctor.recording.observe import compiled_modules
from tests.support.processes import record, script, warm
from tests.support.torch_release import since_2_12

TRAIN = """
import sys, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.act, self.last = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 1)
        self.again = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        x = self.act(self.first(x))
        for layer in (*self.again, self.again[0]):
            x = x + layer(x)
        return {"score": self.last(x), "hidden": x}

torch.manual_seed(0)
net, how = Net(), sys.argv[1]
if how == "wrapped":
    net = torch.compile(net, fullgraph=True, backend=sys.argv[2])
elif how == "in place":
    net.compile(fullgraph=True, backend=sys.argv[2])
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    net.train()
    loss = net(torch.randn(4, 8))["score"].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    net.eval()
    with torch.no_grad():
        net(torch.randn(4, 8))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run by how its model is compiled."""
    folder = tmp_path_factory.mktemp("instrument")
    script(folder, "train.py", TRAIN)

    def run(how: str, backend: str = "aot_eager"):
        options = ["--every", "1", "--compiled", "instrument"]
        done = record(folder, *options, "--", *warm("train.py", how, backend), run=folder / f"{how}-{backend}")
        assert done.status == 0, done.err
        return done

    runs = {}

    def once(how: str, backend: str = "aot_eager"):
        if (how, backend) not in runs:
            runs[how, backend] = run(how, backend)
        return runs[how, backend]

    return once


def rows(done) -> dict[tuple[str, str, str, int], float]:
    """Amax of every output and gradient below the root in the last step."""
    tensors = precdoctor.open_run(done.run).tensors()
    assert set(tensors["phase"]) <= {"train", "optimizer"}  # nothing of the looks at the validation set
    mine = tensors[(tensors["step"] == 2) & tensors["kind"].isin(["output", "grad_output"]) & (tensors["module"] != "")]
    return {tuple(row[:4]): row[4] for row in mine[["module", "kind", "name", "call", "amax"]].itertuples(index=False)}


@since_2_12
@pytest.mark.parametrize("how", ["wrapped", pytest.param("in place", marks=pytest.mark.slow)])
def test_rows_from_inside_a_compiled_graph_are_those_of_the_model_as_written(how, recorded):
    written, inside = rows(recorded("as written")), rows(recorded(how))
    assert ("again.0", "grad_output", "", 1) in inside
    assert inside.keys() == written.keys()
    assert list(inside.values()) == pytest.approx([written[key] for key in inside], rel=1e-4)


@since_2_12
@pytest.mark.slow
def test_inductor_keeps_the_probes(recorded):
    assert rows(recorded("wrapped", "inductor")).keys() == rows(recorded("as written")).keys()


@since_2_12
def test_a_run_says_that_it_was_instrumented(recorded, capsys):
    done = recorded("wrapped")
    assert json.loads((done.run / "run.json").read_text())["bit_neutral"] is False
    events = precdoctor.open_run(done.run).events()
    assert any("differ by rounding" in data for data in events[events["event"] == "warning"]["data"])
    assert main(["diagnose", str(done.run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "It was recorded with --compiled instrument, which may change the training." in said
    assert main(["show", str(done.run)]) == 0
    assert "neutral no: recorded with --compiled instrument" in " ".join(capsys.readouterr().out.split())


def test_a_torch_that_cannot_be_instrumented_is_told_of(monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("no such thing\nat all")

    monkeypatch.setattr(compiled_modules.torch.library, "_register_effectful_op", refuse)
    compiled_modules._supported.cache_clear()
    try:
        assert not compiled_modules._supported()
    finally:
        compiled_modules._supported.cache_clear()
    said = capsys.readouterr().err
    assert "cannot be instrumented (RuntimeError: no such thing); recording boundaries" in said
