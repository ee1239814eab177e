"""``whatif --state`` against real casts of the moments of a recorded AdamW."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from precdoctor.diagnosis.offline.whatif.recipe import ask  # noqa: E402
from precdoctor.diagnosis.offline.whatif.states import forecast_states  # noqa: E402
from precdoctor.runlog import open_run  # noqa: E402
from tests.support.processes import ROOT  # noqa: E402

EPS = 1e-6
#: Features of very different size, as embeddings and outlier channels make them: moments span thirty binades.
TRAIN = f"""
import sys, numpy as np, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps={EPS})
size = torch.exp2(torch.linspace(-8, 6, 64))
for step in range(9):
    loss = model(torch.randn(64, 64) * size).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
kept = {{}}
for name, p in model.named_parameters():
    for key in ("exp_avg", "exp_avg_sq"):
        kept[f"{{name}} {{key}}"] = optimizer.state[p][key].numpy()
np.savez(sys.argv[1], **kept)
"""
FORMATS = {
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("states")
    (directory / "train.py").write_text(TRAIN)
    command = [
        sys.executable,
        "-m",
        "precdoctor",
        "record",
        "--every",
        "1",
        "-o",
        "run",
        "--",
        sys.executable,
        "train.py",
    ]
    subprocess.run(
        [*command, "kept.npz"],
        cwd=directory,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    with np.load(directory / "kept.npz") as arrays:
        return directory / "run", dict(arrays)


@pytest.mark.parametrize("name", FORMATS)
def test_real_casts_lie_between_the_ends(recorded, name):
    path, kept = recorded
    answer = forecast_states(open_run(path), ask(name), steps=(8, 9))
    assert len(answer.states) == len(kept) == 12
    dtype, largest = FORMATS[name]
    decibels = []
    for s in answer.states:
        values = kept[f"{s.parameter} {s.state}"].astype(np.float64).ravel()
        scale = largest / np.abs(values).max() if largest else 1.0
        stored = torch.from_numpy((values * scale).astype(np.float32)).to(dtype).double().numpy() / scale
        nonzero = values != 0
        prediction = s.forecast.prediction
        lost = nonzero & (stored == 0)
        share = lost.sum() / nonzero.sum()
        assert prediction.flushed.low - 1e-9 <= share <= prediction.flushed.high + 1e-9, (s.parameter, s.state)
        sqnr = 10 * np.log10(np.square(values).sum() / np.square(stored - values).sum())
        assert prediction.sqnr_db.low - 0.1 <= sqnr <= prediction.sqnr_db.high + 0.1
        decibels.append(abs(prediction.sqnr_db.estimate - sqnr))
        assert (s.effect is not None) == (s.state == "exp_avg_sq")
        if s.effect is None:
            continue
        doubled = (lost & (values > EPS**2)).sum() / nonzero.sum()
        assert s.effect.doubled.low - 1e-9 <= doubled <= s.effect.doubled.high + 1e-9
        longer = (np.sqrt(values) + EPS) / (np.sqrt(stored) + EPS)
        assert longer[lost].max(initial=1.0) <= s.effect.longest * (1 + 1e-6)
        if (survivors := nonzero & ~lost).sum() >= 100:
            assert s.effect.error == pytest.approx(np.sqrt(np.square(longer[survivors] - 1).mean()), rel=0.35)
    assert np.median(decibels) <= 1.0


def test_the_answer_names_what_would_be_lost(recorded):
    path, _ = recorded
    plain = forecast_states(open_run(path), ask("fp16"), steps=(8, 9))
    assert plain.share("doubled") > 0.05 and plain.states[0].forecast.holds is False
    assert plain.eps == EPS and plain.longest_after == pytest.approx(1000**0.5)
    scaled = forecast_states(open_run(path), ask("fp16", scaling="tensor"), steps=(8, 9))
    assert scaled.share("doubled") < plain.share("doubled") / 2
    assert not plain.stalls and forecast_states(open_run(path), ask("bf16")).stalls


def told(path, *flags):
    command = [sys.executable, "-m", "precdoctor", "whatif", str(path), *flags]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_the_command_answers_in_words_and_in_json(recorded):
    path, _ = recorded
    screen = told(path, "--state", "fp16", "--worst", "2").stdout
    assert "What if FP16, with no scale?" in screen and "would not survive" in screen
    found = json.loads(told(path, "--state", "fp16", "--output-format", "json").stdout)
    assert found["question"] == {"mode": "state", "asked": "FP16"}
    assert {"parameter", "state", "doubled", "longest", "error_of_rest", "flushed"} <= set(found["states"][0])
    assert found["states"][0]["doubled"]["estimate"] > 0.05 and found["failing"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--state", "e4m3", "--plan"), "--plan has nothing to act on"),
        pytest.param(("--state", "e4m3", "--format", "fp16"), "--format has nothing to act on", marks=pytest.mark.slow),
        pytest.param(
            ("--state", "e4m3", "--output-format", "concise"),
            "--output-format concise does not go with --state",
            marks=pytest.mark.slow,
        ),
        (("--state", "e9m9"), "e9m9"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(recorded, flags, said):
    done = told(recorded[0], *flags)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
