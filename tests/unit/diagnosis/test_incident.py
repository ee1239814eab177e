"""What is told of the way to an incident, and of its coming again."""

from __future__ import annotations

import json

import pytest

from precdoctor.diagnosis.engine import diagnose
from tests.rules.PD104.samples import with_batches
from tests.support.training import FACTS, ROOT, Training, tensor


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


def bad_losses(*, unsampled=(), steps=(9, 12, 17), last=None, all_steps=24):
    """The loss is NaN on these steps, the gradients are finite; from ``last`` on it stays NaN."""
    run = Training(steps=all_steps)
    for step in (*steps, *range(last or all_steps, all_steps)):
        run.poison(step, "loss", then=False, nan=1)
        run.change(lambda r: r.update(nan=0, first_bad_order=None), kind="grad_output", step=step)
        for kind in ("weight_grad", "weight_grad_step", "update"):
            run.change(lambda r: r.update(nan=0, first_bad_order=None), kind=kind, step=step)
        run.step_rows[step]["non_finite"] = 1
    return run.unsample(*unsampled)


def losses_told(run, path):
    found = [f for f in diagnose(run.write(path)).findings if f.code == "PD103"]
    return [(f.location.step, f.evidence["occurrences"], f.evidence.get("likely_steps", [])) for f in found]


def test_what_was_not_recorded_is_counted_with_the_only_fault_it_may_be(tmp_path):
    assert losses_told(bad_losses(), tmp_path / "all") == [(9, 3, [])]
    assert losses_told(bad_losses(unsampled=[12, 17]), tmp_path / "some") == [(9, 1, [12, 17])]


def test_a_loss_that_stays_bad_is_told_by_itself(tmp_path):
    unsampled = [12, *range(20, 24)]
    told = losses_told(bad_losses(steps=(9, 12), unsampled=unsampled, last=20), tmp_path / "run")
    assert [step for step, _, _ in told] == [9, 12]


def test_what_comes_before_the_fault_that_is_known_is_told_by_itself(tmp_path):
    assert [step for step, _, _ in losses_told(bad_losses(unsampled=[9]), tmp_path / "run")] == [9, 12]


def test_the_range_on_healthy_steps_is_said_of_a_named_tensor(tmp_path):
    run = Training(dtype="float16").poison(9, "output", "blocks.0.mlp.up", pos_inf=4)
    found = diagnose(run.write(tmp_path / "run")).findings[0]
    assert found.code == "PD101"
    assert " At healthy step 8 `blocks.0.mlp.up` output reached " in found.message


@pytest.mark.parametrize(
    ("policy", "scale", "words"),
    [
        ("examine", None, "These steps changed no weight, so"),
        ("skip", None, "With `--on-nonfinite skip` these steps changed no weight, so"),
        ("skip", 1024.0, "The loss scaler skipped these steps, so"),
    ],
)
def test_a_skipped_step_is_the_scalers_only_if_there_is_one(policy, scale, words, tmp_path):
    run = Training(scale=scale).poison(7, "output", "blocks.0.mlp.up", then=False, pos_inf=4).skip(7)
    run.step_rows[7].update(loss=float("nan"), found_inf=True if scale else None)
    where = tmp_path / "run"
    run.write(where)
    info = json.loads((where / "run.json").read_text())
    (where / "run.json").write_text(json.dumps({**info, "options": {"on_nonfinite": policy}}))
    assert words in diagnose(where).findings[0].message


def test_a_gradient_that_the_backward_pass_left_finite_is_checked_behind_it(tmp_path):
    """Anomaly detection looks at the backward pass alone."""
    run = Training(ranks=1).poison(7, "weight_grad_step", "emb", nan=3).write(tmp_path / "run")
    [finding] = [f for f in diagnose(run).findings if f.code == "PD102"]
    assert finding.prescriptions[0].change["check_gradients"]
