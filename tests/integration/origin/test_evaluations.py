"""Calls of a trained model without gradients, as in a validation pass, that return something non-finite."""

from __future__ import annotations

import pytest

from tests.support.incidents import incidents, told
from tests.support.processes import record, script, warm

#: ``how`` is what goes wrong: in the model (also if ``compiled``, or in ``inference`` mode), in a loss module, in the
#: data, only in padding, in a weight, or nothing but masks.
LOOP = """
import sys

import torch
from torch import nn

from training import digest

how = sys.argv[1]
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, scale=1.0, mask=None):
        scores = self.last(self.first(x).relu())
        scores = scores / scale
        return scores if mask is None else scores.masked_fill(mask, float("-inf"))


net, criterion = Net(), nn.CrossEntropyLoss(ignore_index=-1)
model = torch.compile(net, backend="eager") if how == "compiled" else net
optimizer = torch.optim.Adam(net.parameters(), 1e-3)


def train():
    net.train()
    for _ in range(30):
        x = torch.rand(8, 8)
        loss = criterion(model(x), torch.arange(8) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(bad):
    net.train(how == "data")
    with torch.inference_mode() if how == "inference" else torch.no_grad():
        for number in range(5):
            x, target, scale, mask = torch.rand(8, 8), torch.arange(8) % 3, torch.ones(8, 1), None
            if bad and number == 3:
                if how == "data":
                    x[2, 5] = float("nan")
                elif how == "loss":
                    target.fill_(-1)
                elif how == "padding":
                    scale = torch.ones(8, 4)
                    scale[0, :2] = 0.0
                elif how == "weight":
                    net.last.weight[0, 0] = float("nan")
                elif how == "masks":
                    mask = torch.arange(4) == 3
                else:
                    scale[1] = 0.0
            scores = model(x, scale=scale, mask=mask) if how == "inference" else model(x, scale, mask)
            used = slice(1, None) if how == "padding" else slice(None)
            print(criterion(scores[used], target[used]).item())


for epoch in range(4):
    train()
    validate(epoch == 2 or (epoch == 3 and how == "padding"))
    if how == "weight" and epoch == 2:
        break
print(digest(net), flush=True)
"""


@pytest.fixture
def loop(tmp_path):
    return script(tmp_path, "loop.py", LOOP)


@pytest.mark.parametrize(
    "how",
    ["model", "loss", *(pytest.param(h, marks=pytest.mark.slow) for h in ("data", "inference", "compiled", "padding"))],
)
def test_the_op_that_makes_a_validation_non_finite_is_named(tmp_path, loop, how):
    done = record(tmp_path, "--strict", "--every", "8", "--", *warm(loop, how))
    if how == "data":
        plain = record(tmp_path, "--on-nonfinite", "observe", "--", *warm(loop, how), run=tmp_path / "plain")
        assert (done.out, done.status) == (plain.out, plain.status), "the same weights and numbers"
        assert told(plain) == incidents(plain) == []
    (finding,) = told(done)
    assert finding.code == {"loss": "PD103", "data": "PD104"}.get(how, "PD101")
    assert finding.severity.value == ("info" if how == "padding" else "warning")
    assert finding.title.endswith("in a call without gradients")
    place = finding.location
    assert place.step == 89, "the last step before the third validation pass"
    if how not in ("data", "loss"):
        assert place.source.code.strip() == "scores = scores / scale"
        assert finding.cause == "division-by-zero"
    assert "nothing to resume" in finding.message
    assert ("after step 119; later calls were not examined" in finding.message) == (how == "padding")
    assert finding.evidence["recovered"]
    examined = [i["bad_samples"] for i in incidents(done)]
    assert examined == {"loss": [1], "padding": [0, 0]}.get(how, [1, 1]), "of the model, and of the loss behind it"


def test_a_bad_weight_that_a_validation_shows_is_an_error(tmp_path, loop):
    done = record(tmp_path, "--strict", "--every", "8", "--", *warm(loop, "weight"))
    (finding,) = told(done)
    assert finding.severity.value == "error"
    assert not finding.evidence["recovered"]
    assert finding.evidence["last_finite_step"] == 88, "step 89 may have spoilt it"
    assert "at step 88" in finding.message


def test_masks_in_a_validation_are_no_incident(tmp_path, loop):
    done = record(tmp_path, "--strict", "--every", "8", "--", *warm(loop, "masks"))
    assert told(done) == incidents(done) == []
