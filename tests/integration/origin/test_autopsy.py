"""``precdoctor autopsy``: the recorded command once more, every op of the failing step traced."""

from __future__ import annotations

import pytest

import precdoctor
from tests.support.processes import PYTHON, ROOT, environment, finish, record, script, start, warm

#: The loss is made outside any module, and the loop gives up before it calls backward: no replay can see anything.
GIVES_UP = """
import sys

import torch

if "unseeded" not in sys.argv:
    torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(6):
    rate = net(torch.randn(8, 4)) * (1e4 if step == 3 else 1)
    loss = rate.exp().mean()  # here
    if not torch.isfinite(loss):
        sys.exit(7)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex(), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("autopsy")
    script(folder, "gives_up.py", GIVES_UP)
    return folder


def precdoctor_command(folder, *arguments):
    start_it = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from precdoctor.cli import main; sys.exit(main())"
    return finish(start(folder, [PYTHON, "-c", start_it, *arguments], environment()), folder)


@pytest.mark.slow
def test_loss_code_before_an_early_end_is_led_back_to_its_line(folder):
    run = record(folder, "--strict", "--autopsy", "--", *warm("gives_up.py"), run=folder / "early")
    assert run.status == 7, run.err
    lines = run.out.decode().splitlines()
    assert lines[:3] == lines[3:], "the second run is the first one again"
    assert any("the same run again" in line for line in run.said)
    (finding,) = precdoctor.diagnose(precdoctor.open_run(run.run)).findings
    assert (finding.code, finding.cause, finding.location.op) == ("PD103", "exp-overflow", "aten.exp.default")
    assert finding.location.step == 3
    assert finding.location.source.code.endswith("# here")
    assert record(folder, "--force", "--", PYTHON, "-c", "", run=folder / "early").status == 0, "an autopsy is ours"


#: What the first step reads is prepared before any model is called.
PREPARES = """
import sys

import numpy
import torch

torch.manual_seed(0)
table = torch.rand(24, 4) + 0.1
table[3] = 0
rows = table.numpy() / table.numpy().sum(1, keepdims=True)  # NumPy, which no trace sees
data = torch.utils.data.TensorDataset(torch.from_numpy(rows) if sys.argv[1] == "loader" else table)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
batches = table.split(8) if sys.argv[1] in ("plain", "numpy") else (x for x, in torch.utils.data.DataLoader(data, 8))
for step, x in enumerate(batches):
    if sys.argv[1] == "numpy":
        x = torch.from_numpy(rows[8 * step : 8 * step + 8])
    elif sys.argv[1] != "loader":
        x = x / x.sum(1, keepdim=True)  # here
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "provenance", "certain"), [("torch", "after-loader", 0.97), ("plain", "unknown", 0.75)]
)
def test_code_before_the_first_call_of_a_model_is_traced(folder, case, provenance, certain):
    script(folder, "prepares.py", PREPARES)
    run = record(folder, "--strict", "--", *warm("prepares.py", case), run=folder / case)
    (found,) = precdoctor.diagnose(precdoctor.open_run(run.run)).findings
    assert (found.code, found.evidence["provenance"], found.confidence) == ("PD104", provenance, certain)
    done = precdoctor_command(folder, "autopsy", str(run.run))
    assert done.status == 0, done.err
    (found,) = precdoctor.diagnose(precdoctor.open_run(run.run)).findings
    assert (found.code, found.cause, found.location.op) == ("PD101", "division-by-zero", "aten.div.Tensor")
    assert "the code before `Linear#0`" in found.title and found.location.source.code.endswith("# here")


@pytest.mark.slow
@pytest.mark.parametrize(("case", "provenance"), [("numpy", "outside-step"), ("loader", "loader")])
def test_a_value_that_no_traced_op_made_is_no_answer_and_the_diagnosis_no_poorer(folder, case, provenance):
    script(folder, "prepares.py", PREPARES)
    run = record(folder, "--strict", "--", *warm("prepares.py", case), run=folder / case)
    before = precdoctor.diagnose(precdoctor.open_run(run.run)).findings[0]
    done = precdoctor_command(folder, "autopsy", str(run.run))
    assert done.status == 3, done.err
    assert "no traced op made the value" in done.err and "next, type" not in done.err
    (found,) = precdoctor.diagnose(precdoctor.open_run(run.run)).findings
    assert (found.code, found.evidence["provenance"]) == ("PD104", provenance)
    assert found.title == before.title and "4 NaN" in found.title


#: Both terms of the divergence are -inf where a class is masked, and autograd has kept one of them only.
MASKED = """
import torch
from torch.nn import functional

torch.manual_seed(0)
net, teacher = torch.nn.Linear(4, 5), torch.nn.Linear(4, 5).requires_grad_(False)
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(6):
    x, barred = torch.randn(8, 4), torch.arange(5) == (4 if step == 3 else 5)
    aim, out = (functional.log_softmax(m(x).masked_fill(barred, -torch.inf), -1) for m in (teacher, net))
    loss = functional.kl_div(out, aim, log_target=True, reduction="batchmean")  # here
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_what_spoils_a_mask_shows_its_operands(folder):
    script(folder, "masked.py", MASKED)
    run = record(folder, "--strict", "--autopsy", "--", *warm("masked.py"), run=folder / "masked")
    (finding,) = precdoctor.diagnose(precdoctor.open_run(run.run)).findings
    assert (finding.code, finding.cause, finding.location.op) == ("PD103", "inf-minus-inf", "aten.sub.Tensor")
    assert finding.location.source.code.endswith("# here")
    assert finding.message.count("and is -inf there") == 2


@pytest.mark.slow
def test_another_run_proves_nothing(folder):
    run = record(folder, "--", PYTHON, "gives_up.py", "unseeded", run=folder / "unseeded")
    done = precdoctor_command(folder, "autopsy", str(run.run))
    assert done.status == 3, done.err
    said = ("the second run is not the first one again (from step 0)", "what went wrong does not repeat itself")
    assert any(sentence in done.err for sentence in said), "by chance, the second run may go well"


@pytest.mark.parametrize(
    ("options", "status", "sentence"),
    [((), 3, "nothing became non-finite"), (("--redact-names",), 2, "--redact-names")],
    ids=["healthy", "redacted"],
)
def test_runs_that_cannot_be_run_again_are_refused(folder, options, status, sentence):
    text = GIVES_UP.replace("1e4 if step == 3", "1e4 if step == 3 and 'bad' in sys.argv")
    script(folder, "maybe.py", text)
    bad = ("bad",) if options else ()
    run = record(folder, *options, "--", *warm("maybe.py", *bad), run=folder / f"maybe{len(options)}")
    done = precdoctor_command(folder, "autopsy", str(run.run))
    assert done.status == status, done.err
    assert sentence in done.err and "Traceback" not in done.err
