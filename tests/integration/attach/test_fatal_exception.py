"""An exception that ends a recorded training is in its log, and what runs there is none of the exception's own code."""

from __future__ import annotations

import json

import pytest

import precdoctor
from precdoctor.cli import main
from precdoctor.diagnosis.ranking.ending import end_of_run, ending
from tests.support.processes import record, script

TRAINING = """
import sys
import torch

class Loud(Exception):
    def __str__(self):
        print("the exception's own code", flush=True)
        return "loud"

    @property
    def args(self):
        print("the exception's own code", flush=True)
        return ("loud",)

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sys.excepthook = lambda *_: print("handled", flush=True)
for step in range(4):
    target = torch.tensor([0, 5 if step == 3 and sys.argv[1] == "label" else 1])
    loss = torch.nn.functional.cross_entropy(model(torch.ones(2, 4)), target)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
try:
    int("no number")
except ValueError:
    pass
if sys.argv[1] == "own":
    raise Loud("text")
if sys.argv[1] == "file":
    open("missing.txt")
sys.exit(int(sys.argv[1]))
"""
LABEL_LINE = 1 + TRAINING.splitlines().index(next(x for x in TRAINING.splitlines() if "cross_entropy" in x))


def recorded(folder, how, *options):
    script(folder, "train.py", TRAINING)
    found = record(folder, *options, "--", "python", "train.py", how)
    return found, json.loads((found.run / "rank-00000" / "end.json").read_text()).get("exception")


def test_a_label_out_of_range_is_named_and_the_gate_does_not_pass(tmp_path, capsys):
    found, exception = recorded(tmp_path, "label")
    assert exception == {
        "type": "IndexError", "message": "Target 5 is out of bounds.", "file": "train.py", "line": LABEL_LINE,
    }  # fmt: skip
    said = f"The command ended with status 1, IndexError at train.py:{LABEL_LINE}: Target 5 is out of bounds."
    assert f"{said} A label is outside 0 to C-1" in ending(end_of_run(precdoctor.open_run(found.run)))
    assert main(["gate", str(found.run)]) == 3
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_messages_and_names_can_be_left_out(tmp_path):
    script(tmp_path / "elsewhere", "loss.py", "import torch\n\n\ndef loss(x):\n    raise ValueError(x)\n")
    text = "import sys\nsys.path.insert(0, '../elsewhere')\nimport loss\nimport training\n"
    script(tmp_path / "here", "train.py", f"{text}training.train(1)\nloss.loss(1)\n")
    found = record(tmp_path / "here", "--redact-names", "--", "python", "train.py")
    exception = json.loads((found.run / "rank-00000" / "end.json").read_text()).get("exception")
    assert exception == {"type": "ValueError", "file": "loss.py", "line": 5}
    notes = (found.run / "attach.jsonl").read_text().splitlines()
    assert all("/" not in json.loads(line)["executable"] for line in notes)


def test_the_text_of_a_class_of_others_is_not_asked_for(tmp_path):
    found, exception = recorded(tmp_path, "own")
    assert b"the exception's own code" not in found.out
    assert exception["type"] == "Loud" and "message" not in exception


@pytest.mark.slow
def test_a_file_that_is_missing(tmp_path):
    assert recorded(tmp_path, "file")[1]["message"] == "No such file or directory: 'missing.txt'"


@pytest.mark.slow
@pytest.mark.parametrize("status", ["0", "3"])
def test_a_status_of_the_script_s_own_has_no_exception(tmp_path, status):
    found, exception = recorded(tmp_path, status)
    assert (found.status, exception) == (int(status), None)
    assert main(["gate", str(found.run)]) == (3 if status == "3" else 0)
