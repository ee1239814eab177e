"""Batches and results whose names are new in each step: what is kept for each name stays bounded."""

from __future__ import annotations

import precdoctor
from precdoctor.recording.slots.slot_table import MOST_NAMES
from tests.support.processes import record, script, warm

STEPS, PER_STEP = 20, 16


def test_further_names_share_a_row(tmp_path):
    script(
        tmp_path,
        "keyed.py",
        f"""
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(8, 4)

            def forward(self, batch):
                return {{key: self.inner(x) for key, x in batch.items()}}

        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range({STEPS}):
            batch = {{f"utt{{step}}-{{i}}": torch.ones(4, 8) for i in range({PER_STEP})}}
            sum(x.square().mean() for x in net(batch).values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = record(tmp_path, "--strict", "--every", "1", "--", *warm("keyed.py"))
    run = precdoctor.open_run(done.run)
    rows = run.tensors(filters=[("kind", "==", "batch")])
    events = run.events()
    (warning,) = events[events["event"] == "warning"].to_dict("records")

    assert rows["name"].nunique() == MOST_NAMES + 1
    assert rows[rows["step"] == STEPS - 1]["name"].tolist() == ["*"]
    assert rows[rows["step"] == STEPS - 1]["numel"].tolist() == [PER_STEP * 4 * 8]
    assert warning["step"] == MOST_NAMES // PER_STEP
    assert "share one row, `*`" in str(warning["data"])
