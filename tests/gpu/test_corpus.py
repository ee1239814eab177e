"""Ten faults and two healthy scripts of the public corpus, trained on the GPU: found there as on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import precdoctor
from benchmarks.faults.truth import SCRIPTS, load
from tests.support.processes import record

FAULTS = (
    "nonfinite/gpt_chars",
    "nonfinite/vit_patches",
    "nonfinite/moe_router",
    "nonfinite/realnvp_rings",
    "nonfinite/siamese_signatures",
    "nonfinite/seq2seq_reverse",
    "nonfinite/pose_geodesic",
    "nonfinite/convnext_grn",
    "nonfinite/style_gram",
    "nonfinite/bert_mlm",
)
HEALTHY = ("healthy/translation_masks", "healthy/extreme_logits")
TRUTH = {truth.name: truth for truth in load("all")}
DEVICE = os.environ.get("DEVICE", "cuda")
RUNNER = Path(__file__).with_name("on_device.py")
pytestmark = [pytest.mark.slow, pytest.mark.any_device]


def diagnosed(name, folder):
    done = record(folder, str(RUNNER), DEVICE, str(SCRIPTS / f"{name}.py"))
    run = precdoctor.open_run(done.run)
    assert len(run.steps()), done.err
    report = precdoctor.diagnose(run)
    return [f for f in report.findings if f.severity.value in ("error", "warning")]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_where_it_is(name, tmp_path):
    truth, findings = TRUTH[name], diagnosed(name, tmp_path)
    assert findings
    first = findings[0]
    assert first.code == truth.code
    assert first.cause in truth.causes
    assert (first.location.module or "") == truth.module


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_raises_no_alarm(name, tmp_path):
    assert diagnosed(name, tmp_path) == []
