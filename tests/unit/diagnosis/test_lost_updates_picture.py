"""The picture of PD501 is of the weight, and says so, beside the update."""

from __future__ import annotations

from pathlib import Path

from precdoctor.cli import main
from precdoctor.diagnosis import diagnose
from precdoctor.reporting.html.page import render
from precdoctor.runlog import open_run
from tests.support.training import Training


def test_the_picture_names_its_tensor(tmp_path: Path, capsys) -> None:
    training = Training(weight_dtype="bfloat16")
    training.change(lambda r: r.update(unchanged=4096, zero=4096, amax=0.0005), kind="update")
    run = training.change(lambda r: r.update(amax=0.125), kind="weight").write(tmp_path / "run")
    (found,) = (f for f in diagnose(run).findings if f.code == "PD501")
    words = "weight, half an ulp 0.000488 at its amax; the largest update is 0.0005"
    assert found.evidence["range"]["tensor"] == words and found.evidence["range"]["amax"] == 0.125
    main(["diagnose", str(run.path)])
    assert f"of the {words}" in " ".join(capsys.readouterr().out.split())
    assert f"Drawn is the {words}." in render(open_run(run.path))
