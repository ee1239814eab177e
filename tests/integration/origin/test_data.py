"""Data that is not finite: the finding names the sample, and blames the code only where that made it."""

from __future__ import annotations

import io

import pytest

import precdoctor
from precdoctor.reporting.console import make_console
from precdoctor.reporting.terminal import print_full
from tests.support.processes import record, script, warm

SCRIPT = """
import collections
import csv
import io
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, random_split

case = sys.argv[1]
torch.manual_seed(0)
text = io.StringIO()
csv.writer(text).writerows([[f"{v:.5f}" for v in row] for row in torch.randn(64, 7).tolist()])
table = [row.split(",") for row in text.getvalue().splitlines()]
if case != "constant":
    table[37][6 if case in ("target", "ignored") else 4] = ""
missing = float("inf" if case == "infinite" else "nan")
values = torch.tensor([[float(cell) if cell else missing for cell in row] for row in table])
if case == "constant":
    values[37, :6] = 0.25


class Rows(Dataset):
    def __len__(self):
        return len(values)

    def __getitem__(self, i):
        return values[i, :6], values[i, 6]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(row[:6], row[6]) for row in values])


class Batch:
    def __init__(self, items):
        self._store = {"x": torch.stack([x for x, _ in items]), "y": torch.stack([y for _, y in items])}

    def __getattr__(self, name):
        return self.__dict__["_store"][name]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x.x if isinstance(x, Batch) else x).squeeze(-1)


def standard(x):
    centred = x - x.mean(dim=1, keepdim=True)
    return centred / x.std(dim=1, keepdim=True)  # a constant row


def train(net, optimizer, loader):
    for batch in loader:
        x, y = (batch, batch.y) if isinstance(batch, Batch) else batch
        if case == "constant":
            x = standard(x)
        out = net(x)
        if case == "ignored":
            seen = ~torch.isnan(y)
            out, y = out[seen], y[seen]
        loss = nn.functional.mse_loss(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    data = Stream() if case == "stream" else Rows()
    if case == "split":
        data, _ = random_split(data, [56, 8], generator=torch.Generator().manual_seed(3))
    workers = 2 if case in ("split", "target") else 0
    how = {"batch_size": 8, "num_workers": workers, "collate_fn": Batch if case == "object" else None}
    train(net, optimizer, DataLoader(data, shuffle=case != "stream", **how))
    print([p.sum().item().hex() for p in net.parameters()])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    script(folder, "table.py", SCRIPT)
    return folder


def findings(folder, case):
    run = record(folder, "--strict", "--", *warm("table.py", case), run=folder / case)
    assert run.status == 0, run.err
    return list(precdoctor.diagnose(precdoctor.open_run(run.run)).findings)


@pytest.mark.parametrize(
    ("case", "title", "samples"),
    [
        ("feature", "the input data holds a NaN: sample 37 of the data set, column 4 of field 0", [37]),
        ("infinite", "the input data holds one +Inf: sample 37 of the data set, column 4 of field 0", [37]),
        ("target", "the input data holds a NaN: sample 37 of the data set, in field 1", [37]),
        ("split", "the input data holds a NaN: sample 37 of the data set, column 4 of field 0", [37]),
        ("stream", "the input data holds a NaN: sample 5 of the batch, column 4 of field 0", None),
    ],
)
def test_the_sample_and_its_place_are_named_first(folder, case, title, samples):
    (finding,) = findings(folder, case)
    assert (finding.code, finding.cause) == ("PD104", "nonfinite-input-batch")
    assert finding.title.startswith(title)
    (prescription,) = finding.prescriptions
    assert prescription.change.get("samples") == samples
    assert prescription.predicted["nonfinite_elements"] == {"from": 1, "to": 0}
    assert "dtype" not in prescription.change


def test_a_batch_of_any_class_is_looked_into(folder):
    """The order of a ``collate_fn`` of the user's is unknown, so the index is said with that."""
    (finding,) = findings(folder, "object")
    assert finding.title.startswith("the input data holds a NaN: sample ")
    assert "of the batch, column 4 of `x`" in finding.title
    assert "The sample has index 37 in the data set, unless `collate_fn` changes the order." in finding.message


def test_code_that_made_a_finite_batch_non_finite_is_told_from_data_and_autopsy_recommended(folder):
    (finding,) = findings(folder, "constant")
    assert (finding.code, finding.cause) == ("PD104", "nonfinite-input-batch")
    assert finding.title.startswith("code between the data loader and `layers.0` (Linear) made the batch, argument `0`")
    screen = io.StringIO()
    print_full(precdoctor.diagnose(precdoctor.open_run(folder / "constant")), make_console(screen))
    assert f"precdoctor autopsy {folder / 'constant'}" in screen.getvalue()


def test_missing_values_that_the_loss_leaves_out_are_no_finding(folder):
    assert findings(folder, "ignored") == []
