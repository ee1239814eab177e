"""From a non-finite loss or gradient back to the op, the line and the cause, in real training processes."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys

import pytest

import precdoctor
from precdoctor.reporting.console import make_console
from precdoctor.reporting.terminal import print_full
from tests.support.faulty import BAD_STEP, FAULTS
from tests.support.processes import record, script, warm
from tests.support.torch_release import RELEASE

#: In three scripts something that the loss code added or subtracted is in no graph: it is not computed to its end. In
#: one the gradients are made after the backward pass, which is finite.
REPRODUCED = {
    "late_in_a_long_loss": "in-kind",
    "a_softmin_of_nothing": "in-kind",
    "own_backward_that_overflows": "in-kind",
    "divergence_of_masked_classes": "in-kind",
    "gradients_cut_sample_by_sample": None,
}


#: Torch before 2.12 does not keep what a compiled function returned (docs/reliability.md).
UNKEPT = {"compiled_loss", "compiled_with_its_model"} if RELEASE < (2, 12) else set()


@pytest.fixture(params=FAULTS)
def name(request):
    if request.param in UNKEPT:
        pytest.skip("this torch does not keep what a compiled function returned")
    return request.param


def test_the_op_the_line_and_the_cause_are_found(faulty, name):
    fault, (finding, *others) = FAULTS[name], faulty.findings(name)
    assert others == [], [f.title for f in others]
    assert (finding.code, finding.cause) == (fault.code, fault.cause)
    if fault.op is not None:
        assert finding.location.op.split(".")[1] == fault.op
    elif fault.cause is None:
        assert finding.location.op is None
    if fault.op is not None or fault.reads:
        assert finding.location.source.file.endswith("faulty.py")
        assert finding.location.source.line == fault.line
        assert finding.location.source.code.endswith("# here")
    assert finding.location.module == fault.module
    assert finding.confidence >= 0.75
    assert finding.prescriptions
    step = finding.location.step
    assert finding.evidence["last_finite_step"] == (step - 1 if step else None), "the checkpoint to go back to"


def test_looking_changes_nothing(faulty):
    assert [name for name in FAULTS if faulty.recorded[name] != faulty.plain[name]] == []


def test_the_replay_is_the_run_itself(faulty, name):
    incident, *later = faulty.events(name, "incident")
    assert not later or name == "one_of_two_optimizers", "whose weights are bad again at its next step"
    assert faulty.events(name, "error") == []
    if incident["phase"] == "optimizer":
        assert incident["phase"] == "optimizer"
    else:
        assert incident["reproduced"] == REPRODUCED.get(name, "bit-for-bit")


@pytest.mark.parametrize("name", [n for n, fault in FAULTS.items() if fault.cause is None])
def test_autopsy_is_recommended_where_no_replay_reaches_the_op(faulty, name):
    diagnosis = precdoctor.diagnose(precdoctor.open_run(faulty.directory / name))
    screen = io.StringIO()
    print_full(dataclasses.replace(diagnosis, run={**diagnosis.run, "cwd": "."}), make_console(screen))
    assert f"precdoctor autopsy {faulty.directory / name}" in screen.getvalue()


def test_training_that_recovers_goes_on_as_if_nobody_had_looked(faulty):
    losses = faulty.recorded["recovered_by_the_scaler"]["losses"]
    assert [i for i, loss in enumerate(losses) if loss != loss] == [BAD_STEP]
    (incident,) = faulty.events("recovered_by_the_scaler", "incident")
    assert incident["changed_attributes"] == ["Net.calls", "Net.seen"]


MEMORY = """
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.memory, self.bank = nn.Linear(4, 4), torch.zeros(4), [torch.zeros(2)]
        self.scale, self.ready = nn.Parameter(torch.ones(4)), False

    def forward(self, x, shift):
        h = self.fc(x)
        if not self.ready:  # as ActNorm
            with torch.no_grad():
                self.scale.copy_(1 / h.std(0))
            self.ready = True
        h = h * self.scale
        self.memory.mul_(0.5).add_(h.detach().mean(0))
        self.bank[0].add_(1.0)
        return torch.log(h.square().mean() - shift)


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    loss = net(torch.randn(8, 4), 100.0 if step == int(sys.argv[1]) else 0.0)
    loss.backward()
    if torch.isfinite(loss):
        optimizer.step()
    optimizer.zero_grad()
print(net.memory.tolist(), net.bank[0].tolist())
"""


COMPILED = """
import sys

import torch


class Loss:
    def __init__(self):
        self.net, self.memory, self.shift = torch.nn.Linear(4, 4), torch.zeros(4), 0.0

    def compute(self, x):
        self.memory.add_(1.0)
        return torch.log(self.net(x).square().mean() - self.shift)


torch.manual_seed(0)
of = Loss()
compute, optimizer = torch.compile(of.compute, backend="eager"), torch.optim.SGD(of.net.parameters(), lr=0.1)
for step in range(4):
    of.shift = 100.0 if step == int(sys.argv[1]) else 0.0
    loss = compute(torch.randn(8, 4))
    loss.backward()
    if not torch.isfinite(loss):
        of.net.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
print(of.memory.tolist())
"""


@pytest.mark.parametrize(
    ("text", "bad_step"),
    [(MEMORY, "0"), (MEMORY, "4"), (COMPILED, "2")],
    ids=["first call", "later call", "compiled method"],
)
def test_a_replay_does_not_write_to_tensors_that_are_plain_attributes(tmp_path, text, bad_step):
    path = script(tmp_path, "memory.py", text)
    plain = subprocess.run([sys.executable, str(path), bad_step], capture_output=True, check=True)
    done = record(tmp_path, "--", *warm(path, bad_step))
    assert done.out == plain.stdout
    events = precdoctor.open_run(done.run).events()
    (data,) = events.loc[events["event"] == "incident", "data"]
    assert json.loads(data)["outcome"] == "origin", "it was replayed"


def test_the_micro_batch_is_named(faulty):
    (incident,) = faulty.events("third_of_four_micro_batches", "incident")
    assert incident["micro_step"] == 2


def test_a_batch_the_first_steps_wrote_to_is_copied_before_the_later_ones(faulty):
    (incident,) = faulty.events("batch_modified_in_place", "incident")
    assert incident["changed_arguments"] == [], "the copies are as the forward pass got them"


def test_the_sample_is_named(faulty):
    (finding,) = faulty.findings("nan_in_the_batch")
    assert "sample 2 at [2, 1]" in finding.message


def test_the_first_op_that_returns_it_is_named_if_what_it_read_is_not_known(faulty):
    (finding,) = faulty.findings("target_beside_an_own_function")
    assert "first sees a non-finite value in the result of aten.sub.default at " in finding.message
    assert "8 NaN of 8 elements. It lacks operands `self` and `other`" in finding.message


def test_what_a_mask_is_to_hold_instead_is_said(faulty):
    (finding,) = faulty.findings("divergence_of_masked_classes")
    assert finding.prescriptions[0].title.startswith("set masked elements to 0 before mul at ")
    assert finding.prescriptions[0].title.endswith(", or use -1e4 in place of -inf in the mask")
    (finding,) = faulty.findings("smoothing_over_a_forbidden_class")
    assert finding.prescriptions[0].title.startswith("use -1e4 in place of -inf in the mask")


def test_an_eps_that_the_format_flushes_is_named(faulty):
    (finding, *_) = faulty.findings("adam_on_half_weights")
    assert "exact zeros; eps 1e-08 is 0 in float16." in finding.message


def test_a_poisoned_buffer_is_named_at_the_step_it_happened_although_no_loss_shows_it(faulty):
    (finding,) = faulty.findings("running_variance_overflows")
    assert (finding.location.step, finding.location.kind) == (BAD_STEP, "buffer")
    assert finding.evidence["last_finite_step"] == BAD_STEP - 1
    assert "running_var" in finding.title
    assert all(loss == loss for loss in faulty.recorded["running_variance_overflows"]["losses"])


def test_a_buffer_that_the_first_forward_pass_poisons_was_finite_before(faulty):
    (finding,) = faulty.findings("codes_that_nothing_is_near")
    assert (finding.location.step, finding.location.kind) == (0, "buffer")
    assert "makes buffer `codes` non-finite, unseen by the loss" in finding.title


def test_a_poisoned_optimizer_state_is_named_although_the_weights_stay_finite(faulty):
    (finding,) = faulty.findings("second_moment_overflows")
    assert (finding.location.step, finding.location.kind) == (BAD_STEP, "opt_state")
    assert finding.evidence["last_finite_step"] == BAD_STEP - 1
    assert "exp_avg_sq" in finding.title
