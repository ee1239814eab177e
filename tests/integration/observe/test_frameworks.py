"""Scripts of transformers, accelerate and Lightning, and DistributedDataParallel, recorded untouched."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import pytest

import precdoctor
from precdoctor.runlog.reader import Run
from tests.support.processes import ROOT, environment, finish, record_command, start

SCRIPTS = ROOT / "tests" / "support" / "frameworks"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Recorded:
    run: Run
    plain: dict[str, Any]
    recorded: dict[str, Any]

    def rows(self, **equal):
        frame = self.run.tensors()
        for column, value in equal.items():
            frame = frame[frame[column] == value]
        return frame


def result(out: bytes) -> dict[str, Any]:
    (line,) = [line for line in out.decode().splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def both_ways(folder, name: str) -> Recorded:
    """The script by itself and under `record`, side by side."""
    script = [sys.executable, str(SCRIPTS / f"{name}.py"), str(folder / "output")]
    children = [
        start(folder, script, environment(**OFFLINE)),
        start(folder, record_command(folder / "run", "--strict", "--", *script), environment(**OFFLINE)),
    ]
    plain, recorded = [finish(child, folder / "run") for child in children]
    assert (plain.status, recorded.status) == (0, 0), plain.err[-2000:] + recorded.err[-2000:]
    run = precdoctor.open_run(folder / "run")
    events = run.events()
    assert events[events["event"].isin(["error", "warning", "drop"])].empty
    assert run.steps()["complete"].all()
    return Recorded(run, result(plain.out), result(recorded.out))


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    return both_ways(tmp_path_factory.mktemp("transformers"), "with_transformers")


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory):
    return both_ways(tmp_path_factory.mktemp("accelerate"), "with_accelerate")


@pytest.fixture(scope="module")
def lightning(tmp_path_factory):
    return both_ways(tmp_path_factory.mktemp("lightning"), "with_lightning")


@pytest.mark.slow
def test_frameworks_train_as_without_the_recorder(transformers, accelerate, lightning):
    for framework in (transformers, accelerate, lightning):
        assert framework.plain == framework.recorded


@pytest.mark.slow
def test_transformers_trainer(transformers):
    steps = transformers.run.steps()
    assert steps["micro_steps"].tolist() == [2] * 4
    assert steps["loss"].tolist() == pytest.approx(transformers.plain["losses"], rel=2e-3)  # it logs rounded
    assert steps["lr"].tolist() == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert steps["clip_norm"].tolist() == [0.5] * 4
    assert set(steps["autocast_dtype"]) == {"bfloat16"}
    assert steps["loss_scale"].isna().all()
    rows = transformers.rows(step=3)
    assert "GPT2LMHeadModel#0" in set(rows["root"])
    outputs = rows[rows["kind"] == "output"]
    assert {"transformer.h.1.attn.c_attn", "transformer.wte", "lm_head"} <= set(outputs["module"])
    assert set(outputs["call"]) == {0}  # the evaluation before it does not count
    (attention,) = outputs[outputs["module"] == "transformer.h.1.attn.c_attn"].to_dict("records")
    assert attention["numel"] == 2 * 2 * 12 * 96 and attention["dtype"] == "bfloat16"
    for kind in ("weight", "weight_grad", "weight_grad_step", "update"):
        assert ("transformer.wte", "weight") in set(
            rows[rows["kind"] == kind][["module", "name"]].itertuples(index=False, name=None)
        )


@pytest.mark.slow
def test_accelerate_script(accelerate):
    steps = accelerate.run.steps()
    assert steps["micro_steps"].tolist() == [2, 2, 2]
    losses = accelerate.plain["losses"]
    assert steps["loss"].tolist() == pytest.approx(
        [(a + b) / 2 for a, b in zip(losses[::2], losses[1::2], strict=True)]
    )
    assert steps["clip_norm"].tolist() == [1.0] * 3
    assert set(steps["autocast_dtype"]) == {"bfloat16"}
    assert set(steps["optimizer"]) == {"AdamW#0"}
    rows = accelerate.rows(step=1)
    assert {"Net#0"} <= set(rows["root"])
    assert set(rows[rows["kind"] == "update"]["module"]) == {"body.0", "head"}
    assert set(rows[rows["kind"] == "batch"]["numel"]) == {2 * 4 * 8}


@pytest.mark.slow
def test_lightning_trainer(lightning):
    steps = lightning.run.steps()
    assert steps["step"].tolist() == list(range(6))
    assert steps["loss"].tolist() == pytest.approx(lightning.plain["losses"])
    assert steps["micro_steps"].tolist() == [1] * 6
    rows = lightning.rows()
    assert rows[rows["kind"].isin(["output", "input", "batch", "loss"])]["amax"].max() < 1e5  # validation adds 10^6
    assert set(rows["phase"]) == {"train"}
    for step in range(6):
        one = rows[rows["step"] == step]
        outputs = one[one["kind"] == "output"].set_index("module")["numel"].to_dict()
        assert outputs == {"net.0": 64, "net.1": 64, "net.2": 64, "net.3": 4, "criterion": 1}
        assert set(one["root"]) == {"Lit#0", ""}
        given = one[one["kind"] == "weight_grad_step"]
        assert given["sum_sq"].sum() == pytest.approx(0.01, rel=1e-2) or given["sum_sq"].sum() < 0.01
        assert len(given) == len(one[one["kind"] == "update"]) == len(one[one["kind"] == "weight"]) == 6


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    """Two ranks of one run, each started as a launcher would, without paying for the launcher."""
    folder = tmp_path_factory.mktemp("ddp")
    script = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, {str(SCRIPTS / 'with_ddp.py')!r}]\n"
        "ranks = [subprocess.Popen(command, env={**os.environ, 'RANK': rank}) for rank in '01']\n"
        "sys.exit(max(rank.wait() for rank in ranks))\n"
    )
    (folder / "launch.py").write_text(script)
    command = record_command(folder / "run", "--strict", "--", sys.executable, str(folder / "launch.py"))
    env = environment(RENDEZVOUS=str(folder / "rendezvous"), GLOO_SOCKET_IFNAME="lo", **OFFLINE)
    done = finish(start(folder, command, env), folder / "run")
    assert done.status == 0, done.err[-3000:]
    return precdoctor.open_run(folder / "run")


@pytest.mark.slow
def test_ranks_have_gradients_of_their_own_and_are_given_the_same(ddp):
    rows = ddp.tensors(filters=[("step", "==", 1)])
    assert set(rows["rank"]) == {0, 1}
    by_rank = {
        kind: group.groupby(["module", "name"], observed=True)["fingerprint"].nunique()
        for kind, group in rows.groupby("kind", observed=True)
    }
    assert set(by_rank["weight_grad"]) == {2}
    for kind in ("weight", "weight_grad_step", "update"):
        assert set(by_rank[kind]) == {1}, kind


def test_names_are_without_the_wrapper(ddp):
    rows = ddp.tensors()
    assert set(rows["root"]) == {"Net#0", ""}
    assert set(rows["module"]) == {"", "body", "head"}
    assert set(rows[rows["module"] == ""]["module_class"]) <= {"Net", ""}
    assert set(rows[rows["kind"] == "batch"]["numel"]) == {24}


def test_rank_json_tells_how_gradients_are_reduced(ddp):
    for rank in ddp.ranks:
        (net,) = (r for r in rank.facts["roots"] if r["name"] == "Net#0")
        assert net["reduction"] == {
            "wrapper": "DistributedDataParallel", "ranks": 2, "hook": "fp16_compress_hook", "dtype": "float16",
        }  # fmt: skip


def test_a_hand_written_scale_is_inferred_although_gradients_are_averaged_over_ranks(ddp):
    assert set(ddp.steps()["loss_scale"]) == {1024.0}
