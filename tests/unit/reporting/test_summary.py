from __future__ import annotations

import io
import json
import math

import pytest

from precdoctor.cli import main
from precdoctor.reporting.console import make_console
from precdoctor.reporting.run_head import run_facts
from precdoctor.reporting.show_view import print_summary
from precdoctor.reporting.summary import summarise
from precdoctor.runlog import open_run
from tests.support.runs import write_run


@pytest.fixture
def run(tmp_path):
    """Two ranks, three steps: FP16 outputs and subnormal gradients; the last loss is NaN on rank 1."""
    tensors, steps = [], []
    for step in range(3):
        common = {"step": step, "dtype": "float16", "numel": 100, "exp_lo": 0, "exp_hist": [1]}
        tensors.append({**common, "module": "a", "kind": "output", "amax": 2.0**step, "zero": 50})
        tensors.append(
            {**common, "module": "b", "kind": "grad_output", "amax": 2.0**-20, "subnormal": 25, "nan": step // 2}
        )
        bad = step == 2
        base = {"step": step, "grad_norm": 1.0, "lr": 0.1, "recorder_ns": 5, "step_ns": 100, "skipped": step == 1}
        steps.append({**base, "rank": 0, "loss": 3.0 - step})
        steps.append({**base, "rank": 1, "loss": math.nan if bad else 2.0, "non_finite": int(bad)})
    info = {"started": "2026-01-01T00:00:00+00:00", "options": {"every": 1}}
    return open_run(write_run(tmp_path / "r", tensors, steps, [{"event": "scaler"}], ranks=2, info=info, end=False))


def test_rows_are_merged_over_steps_and_ranks(run):
    summary = summarise(run)
    assert summary.rows == {"tensors": 12, "steps": 6, "events": 2}
    assert summary.kinds == {"output": 6, "grad_output": 6} and summary.dtypes == {"float16": 12}
    a, b = sorted(summary.tightest, key=lambda t: t.module)
    assert (a.amax, a.numel, a.zero_fraction, a.rows) == (4.0, 600, 0.5, 6)
    assert a.headroom_binades == pytest.approx(14.0, abs=1e-3)
    assert (b.subnormal_fraction, b.non_finite) == (0.25, 2)
    assert [t.module for t in summary.subnormal] == ["b"]
    assert [t.module for t in summarise(run, top=1).tightest] == ["a"]
    assert summary.recorder["overhead_fraction"] == 0.05
    assert summary.processes == [{"rank": r, "attempt": 0, "complete": False, "cut_short": None} for r in (0, 1)]


@pytest.mark.parametrize("width", [100, 160])
def test_modules_of_two_models_are_told_apart(tmp_path, width):
    common = {"step": 0, "kind": "output", "dtype": "float32", "numel": 4, "module": "main.0"}
    rows = [{**common, "root": root, "amax": 1.0} for root in ("Generator#0", "Discriminator#0")]
    out = io.StringIO()
    steps = [{"step": 0, "rank": 0, "loss": 1.0}]
    print_summary(summarise(open_run(write_run(tmp_path / "gan", rows, steps))), make_console(out, width=width))
    assert "Generator#0 main.0" in out.getvalue() and "Discriminator#0 main.0" in out.getvalue()
    alone = io.StringIO()
    print_summary(summarise(open_run(write_run(tmp_path / "one", rows[:1], steps))), make_console(alone, width=width))
    assert "main.0" in alone.getvalue() and "Generator#0 main.0" not in alone.getvalue()


def test_transforms_of_the_data_are_no_models(tmp_path):
    common = {"step": 0, "dtype": "float32", "numel": 4, "amax": 1.0}
    rows = [
        {**common, "root": "Resize#0", "kind": "output"},
        {**common, "root": "Net#0", "module": "a", "kind": "output"},
        {**common, "root": "MSELoss#0", "kind": "output"},
    ]
    names = ("Resize#0", "Net#0", "MSELoss#0")
    facts = {"roots": [{"name": n, "parameters": [{"name": "w"}] if n == "Net#0" else []} for n in names]}
    steps = [{"step": 0, "rank": 0, "loss": 1.0}]

    def models(name, rows):
        return summarise(open_run(write_run(tmp_path / name, rows, steps, facts=facts))).models

    gradients = [{**common, "root": n, "kind": "grad_output"} for n in names[1:]]
    assert models("trained", rows + gradients) == ["Net#0", "MSELoss#0"]
    assert models("without gradients", rows) == list(names)


def test_casts_stand_apart_and_those_that_clip_most_come_first(tmp_path):
    cast = {"kind": "fp8_operand", "name": "input", "dtype": "bfloat16", "format": "float8_e4m3fn", "numel": 1000}
    rows = []
    for step in range(2):
        common = {**cast, "step": step, "exp_lo": 0, "exp_hist": [1]}
        rows.append({**common, "module": "fits", "amax": 448.0, "saturated": 0, "flushed": 2, "zero": 800})
        rows.append({**common, "module": "clips", "amax": 1792.0, "saturated": 30 * step, "flushed": 0})
        rows.append({**common, "module": "hides", "amax": 448.0, "flushed": 0})
    steps = [{"step": step, "rank": 0, "loss": 1.0} for step in range(2)]
    summary = summarise(open_run(write_run(tmp_path / "r", rows, steps)))
    assert summary.tightest == []
    clips, fits, hides = summary.casts
    assert [t.module for t in summary.casts] == ["clips", "fits", "hides"]
    assert (clips.saturated_fraction, clips.headroom_binades) == (0.015, -2.0)
    assert (fits.saturated_fraction, fits.flushed_fraction) == (0.0, 0.01)
    assert hides.saturated_fraction is None
    file = io.StringIO()
    print_summary(summary, make_console(file, 100))
    assert "float8_e4m3fn" in file.getvalue() and "1.5 %" in file.getvalue() and "–" in file.getvalue()


def test_the_timeline_keeps_the_worst_and_tells_nan_from_missing(run):
    timeline = summarise(run).timeline
    assert timeline["loss"][:2] == [3.0, 2.0] and math.isnan(timeline["loss"][2])
    assert timeline["skipped"] == [0.0, 1.0, 0.0]
    assert timeline["loss_scale"] == [None, None, None]


@pytest.mark.parametrize("width", [80, 140])
def test_the_screen(run, width):
    file = io.StringIO()
    print_summary(summarise(run), make_console(file, width))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "loss" in text and "x marks a NaN or Inf" in text and "first at step 1" in text
    assert "loss scale" not in text  # nobody recorded one
    assert "not by rank 0, rank 1" in text


def test_a_run_without_steps_is_shown_and_says_so(tmp_path, capsys):
    assert main(["show", str(write_run(tmp_path / "r"))]) == 0
    assert "No training step was recorded." in capsys.readouterr().out


def test_json(run, capsys):
    assert main(["show", str(run.path), "--output-format", "json", "--top", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["schema_version"] == 1
    assert shown["timeline"]["loss"] == [3.0, 2.0, "NaN"]
    assert len(shown["tightest"]) == 1


@pytest.mark.parametrize("width", [80, 100])
def test_dtypes_by_op_keep_their_columns_on_a_narrow_screen(tmp_path, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    operation = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    ops = [{"op": operation, "phase": "backward", "inputs": "bfloat16,float32", "outputs": "bfloat16", "calls": 12,
            "amax": 0.01227}]  # fmt: skip
    scans = [{"event": "scan", "step": 0, "root": "GPT#0", "module": "blocks.0.attention",
              "data": json.dumps({"kind": "coverage", "ops": ops})}]  # fmt: skip
    assert main(["show", str(write_run(tmp_path / "r", steps=[{}], events=scans)), "--dtypes"]) == 0
    text = capsys.readouterr().out
    assert "backward" in text and "0.01227" in text and "\u2026" not in text
    assert text.splitlines()[1].split() == ["op", "phase", "dtypes", "calls", "amax", "modules"]
    assert max(map(len, text.splitlines())) <= width


def test_dtypes_by_op(tmp_path, capsys):
    ops = [
        {"op": "aten.addmm.default", "phase": "forward", "inputs": "bfloat16", "outputs": "bfloat16", "calls": 12},
        {"op": "aten._softmax.default", "phase": "forward", "inputs": "bfloat16", "outputs": "float32", "calls": 1},
    ]
    data = json.dumps({"kind": "coverage", "ops": ops})
    scans = [{"event": "scan", "step": 0, "root": "GPT#0", "module": f"blocks.{n}", "data": data} for n in range(3)]
    run = write_run(tmp_path / "r", steps=[{}], events=scans)
    assert main(["show", str(run), "--dtypes"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["addmm", "forward", "bfloat16", "36", "-", "blocks.*"] in [
        [*line[:4], "-", line[-1]] for line in lines if line
    ]
    assert any(line[:5] == ["softmax", "forward", "bfloat16", "to", "float32"] for line in lines)
    assert main(["show", str(run), "--dtypes", "--output-format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["ops"]) == 6
    assert {entry["module"] for entry in shown["ops"]} == {"blocks.0", "blocks.1", "blocks.2"}


def test_scans_with_their_reasons(tmp_path, capsys):
    why = {"what": "amax", "step": 20, "tensor": "GPT#0/blocks.0.norm:input:0", "before": 2.5, "now": 1830.0}
    told = [(0, {"reason": "first"}), (21, {"reason": "evidence", "evidence": [why]})]
    scans = [
        {"event": "scan", "step": step, "data": json.dumps({"kind": "step", "outcome": "done", "ops": 32, **data})}
        for step, data in told
    ]
    scans.append({"event": "scan", "step": 21, "data": json.dumps({"kind": "overflow"})})
    run = write_run(tmp_path / "r", steps=[{}], events=scans)
    assert main(["show", str(run), "--scans"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "0 0 done 32 0 first steps" in shown
    assert "21 0 done 32 1 amax of `blocks.0.norm` input 2.5 -> 1.83e+03 at step 20" in shown
    assert main(["show", str(run), "--scans", "--output-format", "json"]) == 0
    assert [(s["step"], s["reason"], s["found"]) for s in json.loads(capsys.readouterr().out)["scans"]] == [
        (0, "first", 0),
        (21, "evidence", 1),
    ]
    assert main(["show", str(run), "--scans", "--dtypes"]) == 2


def test_a_run_without_a_deep_scan_has_no_dtypes_by_op(run, capsys):
    assert main(["show", str(run.path), "--dtypes"]) == 0
    assert "record it with --deep-scan N" in capsys.readouterr().out


@pytest.mark.parametrize(("ranks", "processes", "said"), [(2, 2, "2 ranks"), (1, 4, "1 rank, 4 processes")])
def test_the_head_tells_of_processes_that_share_a_rank(ranks, processes, said):
    assert run_facts({"steps": 9, "first_step": 0, "last_step": 8, "ranks": ranks, "attempts": processes}) == (
        f"steps 0–8, {said}"
    )
