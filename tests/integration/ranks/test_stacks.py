"""FSDP2 with the dtypes of its reduction, and Accelerate, on two real ranks; `make stacks` runs all there is."""

from __future__ import annotations

import functools
import json

import pytest

import precdoctor
from precdoctor.runlog import open_run
from tests.support.processes import ROOT, environment, finish, start, torchrun

HEALTHY = {
    "torch": ("fsdp2.bf16.fp32-reduce.clip", "fsdp2.bf16.fp16-reduce"),
    "accelerate": ("fsdp2.bf16.clip", "ddp.bf16.accumulate.clip"),
}
#: Code, rank, module and step of the one finding.
FAULTY = {
    "torch": {
        "fsdp2.bf16.fp16-reduce.low": ("PD708", "rank 1", "experts.1", 11),
        "fsdp2.bf16.bf16-reduce.nan": ("PD104", "rank 1", "", 5),
        "fsdp2.pure.lost": ("PD501", "rank 1", "experts.1", 11),
    },
    "accelerate": {"fsdp2.bf16.nan": ("PD104", "rank 1", "", 5)},
}
#: Of `make test`; the others are `make slow`.
QUICK = "torch"


def runs_of(*kinds):
    """A test item for each run of these."""
    return [
        pytest.param(stack, name, marks=() if stack == QUICK else pytest.mark.slow)
        for kind in kinds
        for stack, names in kind.items()
        for name in names
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Where the runs of a stack are, trained when they are first asked for."""

    @functools.cache
    def of(stack):
        pytest.importorskip(stack)
        out = tmp_path_factory.mktemp(stack)
        command = torchrun(2, "-m", "benchmarks.stacks.drive", stack, out, *HEALTHY[stack], *FAULTY[stack])
        done = finish(start(ROOT, command, environment()), out)
        assert done.status == 0, done.err
        return out

    return of


@pytest.mark.parametrize(("stack", "name"), runs_of(HEALTHY, FAULTY))
def test_no_bit_of_training_changes(trained, stack, name):
    for rank in (0, 1):
        assert json.loads((trained(stack) / f"{stack}.{rank}.json").read_text())["equal"][name] is True


@pytest.mark.parametrize(("stack", "name"), runs_of(HEALTHY))
def test_a_healthy_run_has_no_findings(trained, stack, name):
    assert [f.title for f in precdoctor.diagnose(trained(stack) / name).findings] == []


@pytest.mark.parametrize(("stack", "name"), runs_of(FAULTY))
def test_the_fault_is_the_one_finding(trained, stack, name):
    (finding,) = precdoctor.diagnose(trained(stack) / name).findings
    at = finding.location
    assert (finding.code, at.rank_place, at.module, at.step) == FAULTY[stack][name]


def test_gradients_are_seen_before_and_after_the_reduction(trained):
    rows = open_run(trained("torch") / "fsdp2.bf16.fp16-reduce").tensors(filters=[("step", "==", 3)])
    rows = rows[rows["name"].isin(("weight", "bias"))].set_index(["kind", "rank", "module", "name"])
    for rank in (0, 1):
        for module in ("up", "norm", "experts.1", "head"):
            local, given = (rows.loc[(kind, rank, module, "weight")] for kind in ("weight_grad", "weight_grad_step"))
            assert local["dtype"] == "bfloat16" and given["dtype"] == "float32"
            assert local["numel"] == 2 * given["numel"]
