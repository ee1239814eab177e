"""Every parallel layout on real ranks: what the log says of the layout, and what the rules say of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import precdoctor
from precdoctor.diagnosis.claims.finding import Diagnosis
from precdoctor.runlog import Run, open_run
from tests.support.processes import ROOT, environment, finish, start, torchrun

#: Healthy ones by number of ranks; those of ``make slow`` run longer.
HEALTHY = {
    2: ("ddp.accumulate.clip", "ddp.batchnorm.bf16", "ddp.ignored", "ddp.local", "fsdp2", "tp", "pp"),
    4: ("hsdp.accumulate",),
}
MORE = {
    2: (
        *("ddp", "ddp.sgd", "ddp.frozen.sgd", "ddp.accumulate.bf16.batchnorm", "ddp.ignored.sgd", "fsdp1"),
        *("fsdp1.original.accumulate", "fsdp2.accumulate.clip", "fsdp2.bf16.sgd", "tp.sgd", "pp.1f1b.sgd"),
    ),
    4: (
        "ddp.clip",
        "fsdp2_tp",
        "ddp_tp",
        "pp",
        "pp.1f1b",
        "fsdp2_tp.sgd",
        "hsdp.bf16",
        "hybrid",
        "hybrid.accumulate.sgd",
    ),
}
FAULTY = {
    2: ("ddp.flip", "ddp.reset", "ddp.unsynced", "ddp.ignored.clip", "tp.flip.bias", "tp.plain"),
    4: ("ddp.flip", "hsdp.flip", "fsdp2_tp.flip.bias"),
}


def recorded(folder: Path, ranks: int, steps: int, names: tuple[str, ...]) -> Path:
    """The runs of these trainings, below the folder that is returned."""
    out = folder / f"of-{ranks}"
    done = finish(start(ROOT, torchrun(ranks, "-m", "tests.support.layouts", out, steps, *names), environment()), out)
    assert done.status == 0, done.err
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of two and of four ranks, started when first asked for."""
    folder, made = tmp_path_factory.mktemp("layouts"), {}

    def of(ranks: int, name: str) -> Run:
        if ranks not in made:
            made[ranks] = recorded(folder, ranks, 8, (*FAULTY[ranks], *HEALTHY[ranks]))
        return open_run(made[ranks] / name)

    return of


def layout(run: Run, rank: int) -> dict[str, Any]:
    return next(r.facts["layout"] for r in run.ranks if r.rank == rank)


def placement(run: Run, rank: int, parameter: str) -> dict[str, Any] | None:
    facts = next(r.facts for r in run.ranks if r.rank == rank)
    (found,) = [p for r in facts["roots"] for p in r["parameters"] if f"{p['module']}.{p['name']}" == parameter]
    number = found.get("placement")
    return None if number is None else facts["layout"]["placements"][number]


def place(run: Run, rank: int) -> dict[str, tuple[int, int]]:
    return {d["name"]: (d["rank"], d["size"]) for d in layout(run, rank)["dimensions"]}


def lies(run: Run, rank: int, parameter: str) -> tuple[Any, ...] | None:
    """Over which dimensions it is replicated and sharded; the lowest rank with a copy, and how many have one."""
    found = placement(run, rank, parameter)
    return found and (found["replicated"], found["sharded"], found["first"], found["replicas"])


def test_replicas(runs):
    run = runs(2, "ddp.ignored")
    assert [place(run, rank) for rank in (0, 1)] == [{"dp": (0, 2)}, {"dp": (1, 2)}]
    assert layout(run, 0)["ranks"] == 2
    assert lies(run, 1, "down.weight") == (["dp"], [], 0, 2)
    assert lies(run, 1, "up.weight") is None, "DistributedDataParallel ignores it"


def test_shards(runs):
    run = runs(2, "fsdp2")
    (name,) = place(run, 1)
    assert [lies(run, rank, "up.weight") for rank in (0, 1)] == [([], [name], rank, 1) for rank in (0, 1)]


@pytest.mark.slow
def test_replicated_shards(runs):
    run = runs(4, "hsdp.accumulate")
    assert place(run, 2) == {"dp_replicate": (1, 2), "dp_shard": (0, 2)}
    copies = [lies(run, rank, "norm.weight") for rank in range(4)]
    assert copies == [(["dp_replicate"], ["dp_shard"], rank % 2, 2) for rank in range(4)]


def test_tensor_parallel(runs):
    run = runs(2, "tp")
    assert place(run, 1) == {"tp": (1, 2)}
    assert lies(run, 1, "up.weight") == ([], ["tp"], 1, 1)
    assert lies(run, 1, "down.bias") == lies(run, 0, "norm.weight") == (["tp"], [], 0, 2)


@pytest.mark.slow
def test_shards_of_tensor_parallel_parts(runs):
    run = runs(4, "fsdp2_tp.flip.bias")
    assert place(run, 3) == {"dp": (1, 2), "tp": (1, 2)}
    assert lies(run, 3, "down.weight") == ([], ["dp", "tp"], 3, 1)
    assert lies(run, 3, "down.bias") == (["tp"], ["dp"], 2, 2)


def test_pipeline(runs):
    run = runs(2, "pp")
    assert [(layout(run, rank)["stages"], layout(run, rank)["stage_count"]) for rank in (0, 1)] == [([0], 2), ([1], 2)]
    assert lies(run, 1, "0.weight") is None, "the other stage has another one of this name"
    rows = run.tensors(columns=["step", "rank", "kind", "call"], filters=[("kind", "==", "batch")])
    assert set(rows["call"]) == {0, 1}, "a batch in two parts; torch also runs a stage once to find out its shapes"


def test_training_with_dtensors_is_what_it_is_without_recording(runs):
    """DTensors find out how a result is sharded with fake tensors, which none of our modes may keep to itself."""
    run = runs(2, "tp")
    assert (run.path / "weights").read_bytes() == (run.path.parent / "tp.plain" / "weights").read_bytes()


def judged(run: Run) -> Diagnosis:
    return precdoctor.diagnose(run)


def hold_silent(run: Run) -> None:
    """No rule has anything to say, and copies were compared where there are any."""
    diagnosis = judged(run)
    assert [(f.code, f.title) for f in diagnosis.findings] == []
    assert diagnosis.verdict == "clean"
    (outcome,) = [r for r in diagnosis.rules if r.code == "PD710"]
    copies = any(p["replicas"] > 1 for rank in run.ranks for p in rank.facts["layout"]["placements"])
    assert outcome.status.value == ("passed" if copies else "not-applicable"), outcome.reason


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in HEALTHY.items() for name in names])
def test_every_rule_is_silent_on_a_healthy_run(runs, ranks, name):
    hold_silent(runs(ranks, name))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE)
def test_every_rule_is_silent_on_longer_healthy_runs(tmp_path, ranks):
    out = recorded(tmp_path, ranks, 40, (*HEALTHY[ranks], *MORE[ranks]))
    for name in (*HEALTHY[ranks], *MORE[ranks]):
        hold_silent(open_run(out / name))


@pytest.mark.parametrize(
    ("ranks", "name", "cause", "where", "step", "tensor"),
    [
        (2, "ddp.flip", "rank-local-change", "rank 1", 4, "down.weight"),
        # The norm by which gradients are clipped includes that of a weight which is each rank's own.
        (2, "ddp.ignored.clip", "unequal-gradients", "rank 1", 1, "norm.bias"),
        (2, "tp.flip.bias", "rank-local-change", "rank 1 (tp rank 1)", 4, "down.bias"),
        (2, "ddp.reset", "left-out-of-broadcast", "rank 1", 0, "down.weight"),
        (2, "ddp.unsynced", "missing-broadcast", "rank 1", 0, "up.weight"),
        (4, "ddp.flip", "rank-local-change", "rank 1", 4, "down.weight"),
        (4, "hsdp.flip", "rank-local-change", "rank 1 (dp_replicate rank 0, dp_shard rank 1)", 4, "down.weight"),
        (4, "fsdp2_tp.flip.bias", "rank-local-change", "rank 1 (dp rank 0, tp rank 1)", 4, "down.bias"),
    ],
)
def test_what_differs_between_replicas_is_named(runs, ranks, name, cause, where, step, tensor):
    (finding,) = judged(runs(ranks, name)).findings
    assert (finding.code, finding.cause) == ("PD710", cause)
    assert (finding.location.rank_place, finding.location.step) == (where, step)
    assert f"`{tensor}`" in finding.title
    if name == "ddp.flip" and ranks == 4:
        assert finding.evidence["alone"] == [1]
