"""What other tools read back of an exported run is what was recorded."""

from __future__ import annotations

import errno
import json
import math
import sys
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

import precdoctor
from precdoctor.cli import main
from precdoctor.integrations.export import tables
from tests.support.runs import write_run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = [
        {"step": s, "module": m, "kind": k, "dtype": "float16", "numel": 10, "zero": 2, "subnormal": 4, "amax": 2.0**s,
         "exp_lo": -3, "exp_hist": [1, 0, 7], "shape": [2, 5], "nan": int(s == 2)}
        for s in range(3) for m in ("blocks.0", "=head") for k in ("output", "grad_output")
    ]  # fmt: skip
    steps = [
        {"step": s, "loss": math.nan if s == 2 else 1.5 - s, "loss_scale": 1024.0, "wall_time": 1000.0 + s, "lr": 0.5}
        for s in range(4)
    ]
    return write_run(tmp_path / "mine", tensors, steps, [{"event": "warning", "data": '{"message": "m"}'}], ranks=2)


def test_parquet_is_the_whole_log_in_three_files(run, tmp_path, capsys):
    assert main(["export", str(run), "--to", "parquet"]) == 0
    assert capsys.readouterr().err == "Wrote mine-parquet: tensors.parquet, steps.parquet, events.parquet\n"
    recorded = precdoctor.open_run(run)
    for table in ("tensors", "steps", "events"):
        back = pd.read_parquet(tmp_path / "mine-parquet" / f"{table}.parquet")
        ours = getattr(recorded, table)()
        assert list(back.columns) == list(ours.columns) and len(back) == len(ours) > 0
        for column in ("step", "rank", "attempt"):
            assert back[column].fillna(-1).tolist() == ours[column].fillna(-1).tolist()
    back = pd.read_parquet(tmp_path / "mine-parquet" / "tensors.parquet")
    assert back["module"].tolist() == recorded.tensors()["module"].tolist()
    assert [h.tolist() for h in back["exp_hist"]] == [[1, 0, 7]] * len(back)


def test_csv_reads_back_and_is_no_formula(run, tmp_path):
    assert main(["export", str(run), "--to", "csv", "-o", "out"]) == 0
    tensors = pd.read_csv(tmp_path / "out" / "tensors.csv")
    assert set(tensors["module"]) == {"blocks.0", "'=head"}
    assert tensors["amax"].tolist() == precdoctor.open_run(run).tensors()["amax"].tolist()
    assert json.loads(tensors["exp_hist"][0]) == [1, 0, 7] and json.loads(tensors["shape"][0]) == [2, 5]
    assert tensors["scale"].isna().all()
    lines = (tmp_path / "out" / "steps.csv").read_text().splitlines()
    at = lines[0].replace('"', "").split(",").index("loss")
    assert [line.split(",")[at] for line in lines[1:5]] == ["1.5", "0.5", "nan", "-1.5"]


def test_only_some_tensors(run, tmp_path):
    command = ["export", str(run), "--to", "parquet", "-o", "some", "--kind", "output", "--module", "blocks.*"]
    assert main(command) == 0
    back = pd.read_parquet(tmp_path / "some" / "tensors.parquet")
    assert set(back["module"]) == {"blocks.0"} and set(back["kind"]) == {"output"} and len(back) == 6
    assert len(pd.read_parquet(tmp_path / "some" / "steps.parquet")) == 8


def accumulated(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    found.Reload()
    return found


def test_tensorboard_reads_curves_and_histograms(run, tmp_path):
    pytest.importorskip("tensorboard")
    assert main(["export", str(run), "--to", "tensorboard", "-o", "tb"]) == 0
    assert sorted(p.name for p in (tmp_path / "tb").iterdir()) == ["rank-00000", "rank-00001"]
    for rank in (0, 1):
        found = accumulated(tmp_path / "tb" / f"rank-0000{rank}")
        loss = found.Scalars("train/loss")
        assert [(e.step, e.wall_time) for e in loss] == [(s, 1000.0 + s) for s in range(4)]
        assert [e.value for e in loss][:2] == [1.5, 0.5] and math.isnan(loss[2].value)
        assert [e.value for e in found.Scalars("amax/output/blocks.0")] == [1.0, 2.0, 4.0]
        assert found.Scalars("subnormal_share/grad_output/blocks.0")[0].value == pytest.approx(0.5)
        assert found.Scalars("headroom_binades/output/=head")[0].value == pytest.approx(math.log2(65504))
        (first, *_) = found.Histograms("exponents/output/blocks.0")
        assert dict(zip(first.histogram_value.bucket_limit, first.histogram_value.bucket, strict=True)) == {
            -3.0: 0.0, -2.0: 1.0, -1.0: 0.0, 0.0: 7.0,
        }  # fmt: skip
        assert first.histogram_value.num == 8


def test_a_second_export_replaces_the_first(run, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    command = ["export", str(run), "--to", "tensorboard", "-o", "tb"]
    assert main(command) == 0
    assert main(command) == 2 and "--force to write there" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert len(list((tmp_path / "tb" / "rank-00000").iterdir())) == 1


def logged(content):
    """The records of a W&B log: LevelDB's framing, 32 KiB blocks, behind a header of 7 bytes."""
    at, whole = 7, b""
    while at + 7 <= len(content):
        left = (1 << 15) - at % (1 << 15)
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield whole
            whole = b""


def test_wandb_is_written_offline(run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "online")  # whatever the environment says
    assert main(["export", str(run), "--to", "wandb", "-o", "wb", "--kind", "output"]) == 0
    logs = sorted((tmp_path / "wb").rglob("run-*.wandb"))
    assert len(logs) == 2
    losses = []
    for data in logged(logs[0].read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            losses.append((items["_step"], items["train/loss"], items.get("amax/output/blocks.0")))
    assert [step for step, _, _ in losses] == [0, 1, 2, 3]
    assert [loss for _, loss, _ in losses][:2] == [1.5, 0.5] and losses[1][2] == 2.0


@pytest.mark.parametrize(("tool", "extra"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_one_sentence(run, monkeypatch, capsys, tool, extra):
    monkeypatch.setitem(sys.modules, tool, None)
    for name in [name for name in sys.modules if name.startswith(f"{tool}.")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["export", str(run), "--to", tool, "-o", "x"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"pip install {extra}" in said
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("arguments", "said", "status"),
    [
        (["RUN"], "name the tool with --to: tensorboard, wandb, csv, parquet", 2),
        (["RUN", "--to", "cvs"], "did you mean 'csv'?", 2),
        (["RUN", "--to", "csv", "--kind", "outputs"], "did you mean 'output'?", 2),
        (["RUN", "--to", "csv", "-o", "RUN"], "holds something already", 2),
        (["RUN", "--to", "csv", "-o", "RUN/run.json"], "is a file; name a directory", 2),
        (["RUN", "--to", "csv", "-o", "/proc/nowhere"], "cannot be made", 2),
        (["missing", "--to", "csv"], "there is no run directory missing", 2),
    ],
)
def test_a_mistake_is_one_sentence(run, capsys, arguments, said, status):
    assert main(["export", *(a.replace("RUN", str(run)) for a in arguments)]) == status
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and said in error


def test_ops_are_exported_where_they_were_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "listed", [{}], [{}], ops=[{"index": 3, "sketch": [1.0] * 8}])
    for tool in ("parquet", "csv"):
        assert main(["export", "listed", "--to", tool, "-o", tool]) == 0
        assert f"ops.{tool}" in capsys.readouterr().err
    assert (
        pd.read_parquet("parquet/ops.parquet")["index"].tolist() == pd.read_csv("csv/ops.csv")["index"].tolist() == [3]
    )


@pytest.mark.parametrize("tool", ["parquet", "csv"])
def test_a_table_that_cannot_be_finished_is_not_left_there(run, tmp_path, monkeypatch, capsys, tool):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    monkeypatch.setattr(tables, "_flat", full)
    assert main(["export", str(run), "--to", tool, "-o", str(tmp_path / "out")]) != 0
    assert "No space left" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*"))
