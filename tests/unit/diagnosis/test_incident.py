"""What is told of the way to an incident."""

from __future__ import annotations

import pytest

from precdoctor.diagnosis.engine import diagnose
from tests.rules.PD104.samples import with_batches
from tests.support.training import FACTS, ROOT, tensor


@pytest.mark.parametrize(("parameters", "way"), [([], [ROOT]), ([{"name": "w"}], ["Encoder#0", ROOT])])
def test_transforms_of_samples_are_no_way_to_a_bad_batch_but_models_are(tmp_path, parameters, way):
    """Each batch comes after a module of its own, which is finite; that of step 9 is not."""
    run = with_batches()
    for step, rows in run.tensors.items():
        for row in rows:
            row["order"] += 1
        rows.insert(0, tensor(step, "output", "", 0, root="Encoder#0", module_class="Encoder"))
    encoder = {"name": "Encoder#0", "class": "Encoder", "modules": [], "parameters": parameters}
    run.facts = {**FACTS, "roots": [*FACTS["roots"], encoder]}
    found = diagnose(run.poison(9, "batch", "", nan=4).write(tmp_path / "run")).findings
    assert [entry["module"] for entry in found[0].evidence["path"]] == way
    assert found[0].code == "PD104"
