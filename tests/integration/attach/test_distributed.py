"""Several ranks: sharded weights, the ranks one asks for, and the training they leave alone."""

from __future__ import annotations

import pytest

import precdoctor
from tests.support.processes import environment, finish, record, script, start

SHARDED = """
import hashlib
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import training

dist.init_process_group("gloo")
net = training.model()
fully_shard(net[0])
fully_shard(net)  # the last layer is of this group: gathered when the backward pass begins, given back when it ends
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
losses = []
for _ in range(3):
    optimizer.zero_grad()
    for _ in range(2):
        loss = net(torch.randn(4, 8)).square().mean()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item().hex())
local = b"".join(p.to_local().detach().numpy().tobytes() for p in net.parameters())
training.say("RESULT", dist.get_rank(), losses, hashlib.sha256(local).hexdigest())
dist.destroy_process_group()
"""
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")


def results(out: bytes) -> list[str]:
    return sorted(line for line in out.decode().splitlines() if line.startswith("RESULT"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    script(folder, "sharded.py", SHARDED)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    return finish(start(folder, [*TORCHRUN, "sharded.py"], environment()), folder)


@pytest.mark.slow
def test_fsdp2_shards_are_recorded_by_the_rank_that_has_them(folder, plain):
    run = record(folder, "--strict", "--", *TORCHRUN, "sharded.py", run=folder / "all")
    assert run.status == plain.status == 0, run.err
    assert results(run.out) == results(plain.out)  # to the last bit
    assert len(results(run.out)) == 2
    assert run.steps("rank-00000") == run.steps("rank-00001") == [0, 1, 2]
    rows = precdoctor.open_run(run.run).tensors()
    assert set(rows["module"]) <= {"", "0", "1", "2", "3"}  # no prefix of a wrapper
    assert set(rows["module_class"]) == {"Sequential", "Linear", "ReLU", "Dropout", ""} & set(rows["module_class"])
    for kind in ("weight", "weight_grad_step", "update"):
        first = rows[
            (rows["kind"] == kind) & (rows["module"] == "0") & (rows["name"] == "weight") & (rows["step"] == 0)
        ]
        assert first["rank"].tolist() == [0, 1], kind
        assert first["numel"].sum() == 8 * 16, kind  # each rank its own half
        assert first["fingerprint"].nunique() == 2, kind


@pytest.mark.slow
def test_only_the_ranks_one_asks_for(folder, plain):
    run = record(folder, "--ranks", "1", "--", *TORCHRUN, "sharded.py", run=folder / "one")
    assert run.status == 0, run.err
    assert results(run.out) == results(plain.out)
    assert list(run.ranks) == ["rank-00001"]
    assert run.steps("rank-00001") == [0, 1, 2]


@pytest.mark.slow
def test_ranks_that_do_not_exist_are_said_to_be_the_reason(folder):
    script(folder, "train.py", "import training; training.train(1)")
    run = record(folder, "--ranks", "3,7", "train.py", run=folder / "none")
    assert run.status == 0
    assert "nothing was recorded: no process has a rank that --ranks names" in run.err


NAN_ON_ONE = """
import torch
import torch.distributed as dist
import training

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(training.model())
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())
for step in range(4):
    x = torch.randn(4, 8)
    if step == 2 and dist.get_rank() == 1:
        x[3, 5] = float("nan")
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
training.say("RESULT", dist.get_rank(), [p.isnan().any().item() for p in net.parameters()])
dist.destroy_process_group()
"""


def test_the_rank_whose_batch_held_a_nan_is_named(folder):
    script(folder, "one.py", NAN_ON_ONE)
    run = record(folder, "--strict", "--on-nonfinite", "skip", "--", *TORCHRUN, "one.py", run=folder / "nan")
    assert run.status == 0, run.err
    assert results(run.out) == [f"RESULT {rank} {[False] * 4}" for rank in (0, 1)], "both ranks skipped the step"
    (finding,) = precdoctor.diagnose(precdoctor.open_run(run.run)).findings
    assert (finding.code, finding.cause) == ("PD104", "nonfinite-input-batch")
    assert (finding.location.rank, finding.location.step) == (1, 2)
    assert "sample 3" in finding.message
