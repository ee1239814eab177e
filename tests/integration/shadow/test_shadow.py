"""FP32 beside the reduced precision: healthy trainings are clean, faults are named, and nobody's training changes."""

from __future__ import annotations

import json
import subprocess

import pytest

import precdoctor
from precdoctor.diagnosis.analyses.shadow_errors import Limits, shadowed
from precdoctor.diagnosis.engine import view_of
from precdoctor.recording.options import RecordOptions
from precdoctor.reporting.shadow_view import verdict
from tests.support.processes import PATIENCE, PYTHON, ROOT, environment, script, warm
from tests.support.shadows import CASES

#: Verdict, and for a fault what the worst piece is: module, kind, the module beside it.
EXPECTED = {
    "gpt-bf16": ("clean",),
    "gpt-fp16": ("clean",),
    "cnn": ("clean",),
    "cnn-fp16": ("clean",),
    "lstm": ("clean",),
    "gan": ("clean",),
    "pure-bf16": ("clean",),
    "one-pass-bf16": ("precision", "blocks.1.norm1", "output", None),
    "one-pass-fp16": ("precision", "blocks.1.norm1", "output", None),
    "sharp-softmax": ("precision", "blocks.1.attn", "grad_output", "blocks.1.attn.qkv"),
    "running-sum": ("precision", "blocks.1.mlp.2", "output", None),
    "difference": ("precision", "blocks.1.mlp", "output", None),
    "tiny-gradients": ("precision", "1", "grad_input", None),
    "fp32": ("nothing-reduced",),
    "generator": ("indeterminate",),
    "closure": ("indeterminate",),
}
#: Checkpointing both ways, recurrent cells, several models, sparse gradients, in-place code, odd containers.
SPECIMENS = ("gpt_checkpoint", "gpt_checkpoint_reentrant", "recurrent", "gan", "odd_outputs", "gpt_fp16_scaler")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shadows")
    command = warm("-m", "tests.support.shadows", directory)
    env = environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: precdoctor.open_run(directory / name) for name in CASES}


def found_in(run):
    view = view_of(run)
    assert view.events_of("error") == []
    return shadowed(view)


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_right_and_names_the_place(runs, name):
    found = found_in(runs[name])
    state, sentence = verdict(found, Limits())
    assert state == EXPECTED[name][0], sentence
    if state == "precision":
        worst = Limits().guilty(found)[0]
        assert (worst.module, worst.kind, worst.beside) == EXPECTED[name][1:], sentence
    if state in ("precision", "clean"):
        assert found.steps and found.exact, name
        assert found.refused == () and found.notes == ()


@pytest.mark.parametrize("name", [n for n in CASES if EXPECTED[n][0] in ("clean", "precision")])
def test_diagnose_tells_the_same(runs, name):
    findings = [f for f in precdoctor.diagnose(runs[name]).findings if f.code == "PD704"]
    assert len(findings) == (EXPECTED[name][0] == "precision")
    if findings:
        assert findings[0].location.module == EXPECTED[name][1]


def test_a_bias_whose_gradient_is_zero_but_for_rounding_is_no_finding(runs):
    (stem,) = [p for p in found_in(runs["cnn"]).pieces if (p.module, p.kind) == ("stem", "weight_grad")]
    assert stem.accumulated > 0.1 > 0.01 > stem.local  # all the way it is noise in both


def test_both_models_of_a_gan_are_compared_although_their_optimizers_take_turns(runs):
    found = found_in(runs["gan"])
    assert set(found.roots) == {"Sequential#0", "Sequential#1"}  # nothing in the loss module is reduced
    assert found.steps == (0, 1, 2, 3)


def test_errors_all_the_way_grow_behind_a_fault_and_its_own_error_stays_there(runs):
    pieces = {(p.module, p.kind): p for p in found_in(runs["one-pass-bf16"]).pieces if p.beside is None}
    before, at, behind = (pieces[m, "output"] for m in ("blocks.0.mlp.2", "blocks.1.norm1", "blocks.2.mlp.2"))
    u = 2.0**-8
    assert before.accumulated < 4 * u < at.accumulated and behind.accumulated > 2 * before.accumulated
    assert behind.local < u < at.local


@pytest.mark.slow
def test_no_specimen_trains_differently_beside_its_shadow(tmp_path):
    boot = ROOT / "precdoctor" / "recording" / "boot_path"
    (tmp_path / "idle").mkdir()
    options = RecordOptions(shadow="fp64", shadow_every=1, on_nonfinite="examine")
    recorded = environment(
        PYTHONPATH=f"{boot}:{ROOT}", PYTHONWARNINGS="ignore", PRECDOCTOR_RUN=str(tmp_path / "idle"),
        PRECDOCTOR_OPTIONS=options.to_json(), ZOO_RUNS=str(tmp_path / "runs"),
    )  # fmt: skip
    (tmp_path / "runs").mkdir()
    digests = []
    for env in (environment(PYTHONPATH=str(ROOT), PYTHONWARNINGS="ignore"), recorded):
        done = subprocess.run(
            warm("-m", "tests.support.zoo", *SPECIMENS), cwd=tmp_path, env=env, capture_output=True,
            text=True, timeout=PATIENCE,
        )  # fmt: skip
        lines = map(json.loads, done.stdout.splitlines())
        digests.append({line["name"]: line["digest"] for line in lines})
    assert digests[0] == digests[1] and digests[0].keys() == set(SPECIMENS)
    for name in SPECIMENS:
        found = found_in(precdoctor.open_run(tmp_path / "runs" / name))
        assert found.steps, f"{name} was not compared"


def test_the_command_prints_its_report_and_returns_the_status_of_the_script(tmp_path):
    text = """
        import sys, torch
        model = torch.nn.Linear(8, 8).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().sum().backward()
            optimizer.step()
        sys.exit(3)
        """
    script(tmp_path, "train.py", text)
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from precdoctor.cli import main; sys.exit(main())"
    command = [PYTHON, "-c", start, "shadow", "-o", "run", "--at", "1,3", "--output-format", "json"]
    done = subprocess.run(
        [*command, "--", *warm("train.py")], cwd=tmp_path, env=environment(), capture_output=True, text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    document = json.loads(done.stdout)
    assert document["verdict"] == "clean" and document["steps"] == [1, 3] and document["narrowest"] == "bfloat16"
    assert done.stderr.splitlines()[-1].split() == ["precdoctor", "diagnose", "run"]
